"""bench/extract.py [--cpu] [--target DIR] [--disk] [--folder DIR] [--shards N]: extraction against the bare forward.

Both run over the same padded batches: six buckets, lengths of 200 to 8,192 (24 to 384 with --cpu), 5 taps, argmax.
The bare forward is the target's own plus the head over the positions that predict a token, in the same chunks, and
their argmax; it keeps nothing. The product's number is that of its pipeline (extract/pipeline.py), store written and
committed. Both are warm: every shape has run before, memory is allocated. The bare forward runs before and after.

On a GPU the target has Qwen3-8B's shape with random weights (or --target DIR); the store lies on /dev/shm or --folder.
--cpu takes --target DIR (SmolLM2) or a random model of its shape. --disk makes the forward so cheap that the disk is
the limit. The store goes at the end.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.data.config import DataConfig
from dflash.data.prepare import prepare
from dflash.extract import forecast
from dflash.extract.batches import batches_of, largest_batch
from dflash.extract.pipeline import Pipeline
from dflash.extract.states import CHUNK, Extractor, Layout, Stage, fill_inputs
from dflash.extract.summary import speeds
from dflash.files import allocated_bytes
from dflash.store import Store, StoreMeta, create_store
from dflash.target import TargetSpec, default_taps, head_logits, head_weight, load_target, text_model

GPU_BUCKETS, GPU_SHORTEST = (770, 1216, 1728, 2432, 3296, 8192), 200
CPU_BUCKETS, CPU_SHORTEST = (64, 128, 192, 256, 320, 384), 24
QWEN3_8B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
#: A forward that costs next to nothing beside the states it leaves.
WIDE = {
    "vocab_size": 256, "hidden_size": 4096, "intermediate_size": 16, "num_hidden_layers": 9, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    arguments = parse()
    device = torch.device("cpu" if arguments.cpu else "cuda")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    root = Path(tempfile.mkdtemp(prefix="dflash-bench-", dir=arguments.folder))
    try:
        started = time.monotonic()
        model, spec = make_model(arguments, device, root)
        store, layout = make_store(arguments, spec, device, root)
        print(f"target and empty store after {time.monotonic() - started:.1f} s", file=sys.stderr)
        print(json.dumps(measure(model, spec, store, layout, device), indent=1))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--disk", action="store_true", help="a forward so cheap that the disk is the limit")
    parser.add_argument("--target", help="a target's folder instead of random weights")
    parser.add_argument("--folder", default="/dev/shm", help="where the store goes for a while")
    parser.add_argument("--shards", type=int, default=0, help="timed shards of each bucket (3; 1 with --cpu)")
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser.parse_args()


def make_model(arguments: argparse.Namespace, device: torch.device, root: Path) -> tuple[Any, TargetSpec]:
    if arguments.target:
        spec = TargetSpec.read(arguments.target)
        return load_target(arguments.target, None, str(device)), spec
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = WIDE if arguments.disk else SMOLLM2 if arguments.cpu else QWEN3_8B
    family, made = (LlamaConfig, LlamaForCausalLM) if arguments.cpu else (Qwen3Config, Qwen3ForCausalLM)
    config = family(**shape, dtype="bfloat16")
    config.save_pretrained(root / "model")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = made(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False), TargetSpec.read(root / "model")


def make_store(
    arguments: argparse.Namespace, spec: TargetSpec, device: torch.device, root: Path
) -> tuple[Store, Layout]:
    """A store whose buckets have some shards each, documents of random ids."""
    ceilings, shortest = (CPU_BUCKETS, CPU_SHORTEST) if arguments.cpu else (GPU_BUCKETS, GPU_SHORTEST)
    shards = 1 + (arguments.shards or (1 if arguments.cpu else 3))
    if arguments.cpu:
        forecast.default_rows_per_shard = lambda ceiling: max(1, 2048 // ceiling)  # type: ignore[assignment]
    draw = np.random.default_rng(0)
    data = root / "data.jsonl"
    with data.open("w") as file:
        for low, ceiling in zip((shortest - 1, *ceilings), ceilings, strict=False):
            for length in draw.integers(low + 1, ceiling + 1, shards * forecast.default_rows_per_shard(ceiling)):
                ids = draw.integers(3, spec.vocab_size, length).tolist()
                line = {"input_ids": ids, "loss_mask": [0] * 8 + [1] * (len(ids) - 8)}
                file.write(json.dumps(line) + "\n")
    need = int(1.2 * shards * len(ceilings) * 32_768 * 5 * 2 * spec.hidden_size)
    if (free := shutil.disk_usage(root).free) < need and not arguments.cpu:
        sys.exit(f"{root.parent} has {free / 1e9:.0f} GB free, this needs {need / 1e9:.0f}: --folder or --shards.")
    prepared_folder = root / "prepared"
    prepared_folder.mkdir()
    config = DataConfig(data=(str(data),), buckets=ceilings, holdout=0.0)
    prepared = prepare(config, None, prepared_folder, (), vocab_size=spec.vocab_size)
    meta = StoreMeta(
        target={"name": spec.name, "config": "bench", "weights": "bench", "dtype": spec.dtype},
        tokenizer="",
        template="",
        data=prepared.fingerprints["data"],
        taps=default_taps(spec.num_layers, 5),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        labels="tokens" if arguments.disk else "argmax",
        buckets=forecast.make_buckets(prepared.plan, forecast.FORWARD_TOKENS[device.type]),
        counts=prepared.counts,
    )
    kept = root / "kept"
    kept.mkdir()
    (kept / "config.json").write_text("{}")
    store = create_store(root / "store", meta, prepared, kept)
    layout = Layout(taps=meta.taps, hidden_size=meta.hidden_size, labels=meta.labels, storage=meta.storage)
    return store, layout


def measure(model: Any, spec: TargetSpec, store: Store, layout: Layout, device: torch.device) -> dict[str, Any]:
    shards = store.shards()
    first = [(name, 0) for name in dict.fromkeys(name for name, _ in shards)]
    timed = [shard for shard in shards if shard not in first]
    bare = Bare(model, spec, store, layout, device)
    bare.seconds(first)
    product(model, spec, store, layout, device, first)
    before = bare.seconds(timed)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    written = allocated_bytes(store.root / "shards")
    pipeline, allocated = product(model, spec, store, layout, device, timed)
    written = allocated_bytes(store.root / "shards") - written
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    after = bare.seconds(timed)
    totals = pipeline.totals
    own = (before + after) / 2
    disk = write_speed(store.root, min(written, 8 << 30))
    return {
        "device": pipeline.device_name,
        "torch": torch.__version__,
        "store_on": str(store.root.parent.parent),
        "tokens": totals.tokens,
        "batches": sum(1 for shard in timed for _ in batches_of(store, shard)),
        "bare_tokens_per_second": totals.tokens / own,
        "bare_seconds": [round(before, 3), round(after, 3)],
        "product_tokens_per_second": totals.tokens / totals.seconds,
        "product_seconds": round(totals.seconds, 3),
        "product_over_bare": own / totals.seconds,
        **{key: value for key, value in speeds(totals).items() if key != "tokens_per_second"},
        "bytes_written": written,
        "product_gigabytes_per_second": written / totals.seconds / 1e9,
        "folder_gigabytes_per_second": disk,
        "product_over_folder": written / totals.seconds / 1e9 / disk,
        "device_allocations_while_timed": allocated,
        "host_memory_grown_megabytes": grown / 1024,
    }


def product(
    model: Any, spec: TargetSpec, store: Store, layout: Layout, device: torch.device, shards: list[tuple[str, int]]
) -> tuple[Pipeline, int]:
    """The product's pipeline over these shards; hooks and pool are there before its clock starts. Also how often the
    device's allocator asked the driver for memory after the first shard."""
    extractor, warm = Extractor(model, spec, layout, largest_batch(store)[1]), 0
    pipeline = Pipeline(store, extractor, layout, device, worker=0, max_bad=0.01)
    try:
        with pipeline.running():
            for number, shard in enumerate(shards):
                pipeline.shard(shard, lambda: False)
                warm = allocations(device) if not number else warm
    finally:
        extractor.close()
    return pipeline, allocations(device) - warm


class Bare:
    """The target's forward and the head's labels over the batches of shards; nothing is kept."""

    def __init__(self, model: Any, spec: TargetSpec, store: Store, layout: Layout, device: torch.device) -> None:
        self.model, self.spec, self.store, self.layout, self.device = text_model(model), spec, store, layout, device
        self.head, self.labels = head_weight(model), layout.labels != "tokens"
        self.chunk = CHUNK[device.type]
        self.logits = torch.empty(self.chunk, len(self.head), dtype=self.head.dtype, device=device)

    @torch.inference_mode()
    def seconds(self, shards: list[tuple[str, int]]) -> float:
        inputs = [self.inputs(batch) for shard in shards for batch in batches_of(self.store, shard)]
        self.synchronize()
        start = time.monotonic()
        for ids, index in inputs:
            last = self.model(input_ids=ids, use_cache=False).last_hidden_state
            if self.labels:
                flat = last.reshape(-1, last.shape[-1])
                for begin in range(0, len(index), self.chunk):
                    states = flat[index[begin : begin + self.chunk]]
                    head_logits(states, self.head, self.spec, out=self.logits[: len(states)]).argmax(-1)
        self.synchronize()
        return time.monotonic() - start

    def inputs(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        documents = [self.store.documents[d][0] for d in batch.documents]
        stage = Stage(Layout(taps=(0,), hidden_size=1, labels="tokens", storage="bf16"), len(documents),
                      len(documents) * batch.ceiling, "cpu")  # fmt: skip
        fill_inputs(stage, documents, batch.ceiling)
        return stage.input_ids.to(self.device), stage.index.to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def allocations(device: torch.device) -> int:
    """Blocks that the caching allocator has ever asked the driver for."""
    return torch.cuda.memory_stats(device)["num_device_alloc"] if device.type == "cuda" else 0


def write_speed(folder: Path, size: int) -> float:
    """GB/s of plain writes with fsync by four threads, past the page cache where the filesystem can: the better of
    two runs."""
    return max(_write_once(folder, size) for _ in range(2))


def _write_once(folder: Path, size: int, threads: int = 4) -> float:
    import mmap

    chunk = 16 << 20
    each = max(chunk, size // threads // chunk * chunk)
    memory = mmap.mmap(-1, chunk)
    memory.write(np.random.default_rng(0).bytes(chunk))

    def write(number: int) -> None:
        path, flags = folder / f"speed{number}", os.O_WRONLY | os.O_CREAT
        try:
            descriptor = os.open(path, flags | os.O_DIRECT)
        except OSError:
            descriptor = os.open(path, flags)
        for offset in range(0, each, chunk):
            os.pwrite(descriptor, memory, offset)
        os.fsync(descriptor)
        os.close(descriptor)

    workers = [threading.Thread(target=write, args=(i,)) for i in range(threads)]
    start = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.monotonic() - start
    for number in range(threads):
        (folder / f"speed{number}").unlink()
    return threads * each / seconds / 1e9


if __name__ == "__main__":
    main()
