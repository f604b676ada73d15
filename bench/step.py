"""bench/step.py [A B S]: forward and backward of the training step at three shapes, against an 8192³ bf16 product.

Every line is the product's own step (train/runner.py) on random states; the floor is the step's arithmetic at the rate
of the product measured in the same run. Needs a CUDA GPU. Shapes: A an 8B target, B a 27B target with blocks of 32,
S a 135M target (docs/benchmarks.md).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash import block_attention
from dflash.drafter import Drafter, DrafterConfig, RopeTable, initialise
from dflash.loss import CHUNK_LOGITS, Head, chunk_blocks, decay_weights, default_gamma
from dflash.train import static
from dflash.train.narrow import to_fp8
from dflash.train.optimiser import Optimiser, flatten
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout
from dflash.train.runner import Captured, Parts
from dflash.train.step import Batch, Model, Objective, loss_of

#: hidden, mlp, vocabulary, layers, taps, heads, kv heads, head dim, rows, ceiling, anchors, block
SHAPES = {
    "A": (4096, 12288, 151936, 5, 5, 32, 8, 128, 4, 3072, 2048, 16),
    "B": (5120, 17408, 248320, 5, 5, 32, 8, 128, 4, 2048, 1024, 32),
    "S": (576, 1536, 49152, 5, 5, 9, 3, 64, 1, 2432, 128, 16),
}


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median of event-timed runs after warming up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def peak_rate() -> float:
    """TFLOP/s of an 8192³ bf16 product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b, 20) / 1e9


def flops(shape: tuple[int, ...], visible: float) -> dict[str, float]:
    """Arithmetic of forward and backward by part; `visible` is the mean context of a block."""
    hidden, inner, vocabulary, layers, taps, heads, groups, dim, rows, ceiling, anchors, block = shape
    context, tokens, scored = rows * ceiling, anchors * block, anchors * (block - 1)
    query, key = heads * dim, groups * dim
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * inner
    return {
        "context": 4 * context * taps * hidden**2 + layers * 6 * context * 2 * hidden * key,
        "layers": 6 * tokens * layer * layers,
        "attention": 14 * heads * dim * tokens * (visible + block) * layers,
        "head": 4 * scored * hidden * vocabulary,
    }


def make(shape: tuple[int, ...], device: torch.device) -> tuple[Parts, Layout, BucketRows, Batch]:
    """The product's parts at a shape, and a batch of random states, fully valid."""
    hidden, inner, vocabulary, layers, taps, heads, groups, dim, rows, ceiling, anchors, block = shape
    config = DrafterConfig(
        hidden_size=hidden, intermediate_size=inner, num_layers=layers, num_heads=heads, num_kv_heads=groups,
        head_dim=dim, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, max_position_embeddings=40960,
        vocab_size=vocabulary, block_size=block, taps=tuple(range(taps)), num_target_layers=36, mask_token_id=5,
    )  # fmt: skip
    with torch.device(device):
        drafter = Drafter(config)
    initialise(drafter, seed=0)
    flat = flatten(drafter, torch.bfloat16, device)
    embed, head = (torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(2))
    rope = RopeTable(config, ceiling + block, torch.bfloat16, device)
    model = Model(drafter=drafter, rope=rope, embed_VH=embed, embed_factor=1.0, head=Head(head))
    objective = Objective(loss="ce", decay_J=decay_weights(block, default_gamma(block), device), prefix="agree")
    parts = Parts(model, objective, Optimiser(flat, weight_decay=0.0, clip=1.0), 0, device)
    bucket = BucketRows(f"b{ceiling:04d}", ceiling, rows, rows, anchors)
    tails = {"hidden": (taps * hidden,), "input_ids": (), "labels": (), "loss_mask": ()}
    dtypes = {"hidden": torch.bfloat16, "input_ids": torch.int32, "labels": torch.int32, "loss_mask": torch.uint8}
    layout = Layout(tails, dtypes, rows * ceiling)
    batch = layout.batch(layout.buffers(device, pin=False), bucket)
    batch.hidden.normal_()
    batch.input_ids.random_(0, vocabulary)
    batch.labels.copy_(batch.input_ids)
    batch.loss_mask.fill_(1)
    batch.lengths.fill_(ceiling)
    batch.documents.copy_(torch.arange(rows))
    return parts, layout, bucket, batch


def products(shape: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of the step's own matrix products, each timed alone, summed by part."""
    hidden, inner, vocabulary, layers, taps, heads, groups, dim, rows, ceiling, anchors, block = shape
    context, tokens, scored = rows * ceiling, anchors * block, anchors * (block - 1)
    chunk = min(chunk_blocks(anchors, block - 1, vocabulary, CHUNK_LOGITS["cuda"]) * (block - 1), scored)
    query, key = heads * dim, groups * dim

    def product(m: int, k: int, n: int) -> float:
        a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (n, k)))
        return milliseconds(lambda: a @ b.T, 10)

    def linear(tokens: int, ins: int, outs: int, to_input: bool = True) -> float:
        """Forward, gradient of the weight, and of the input."""
        return product(tokens, ins, outs) + product(outs, tokens, ins) + to_input * product(tokens, outs, ins)

    layer = [(hidden, query + 2 * key), (query, hidden), (hidden, 2 * inner), (inner, hidden)]
    ours = {
        "context": linear(context, taps * hidden, hidden, False) + layers * linear(context, hidden, 2 * key),
        "layers": layers * sum(linear(tokens, *size) for size in layer),
        "head": scored / chunk * (product(chunk, hidden, vocabulary) + product(chunk, vocabulary, hidden)),
    }
    return {name: round(ms, 2) for name, ms in ours.items()}


def pieces(runner: Captured, bucket: BucketRows, shape: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Milliseconds of parts of the step run alone: what its anchors and mask, attention and loss take."""
    static_step, model = runner.static, runner.parts.model
    geometry = runner.geometries[bucket.name]
    choice = (geometry.batch, geometry.anchors, geometry.replay, geometry.replays)
    blocks = static_step.lay(*choice)
    heads, groups, dim, block = *shape[5:8], shape[11]
    tokens = geometry.replay * block
    sizes = [
        (tokens, heads),
        (geometry.context, groups),
        (geometry.context, groups),
        (tokens, groups),
        (tokens, groups),
    ]
    states = [torch.randn(*size, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes]
    ranges = (blocks.low_A, blocks.high_A, geometry.context, block)
    attend = torch.compile(lambda *states: static.attend_ranges(*ranges)(*states), fullgraph=True, dynamic=False)
    hidden = torch.randn(geometry.replay, block - 1, shape[0], device="cuda", dtype=torch.bfloat16).requires_grad_()

    def attention() -> None:
        out = attend(*states)
        torch.autograd.grad(out, states, out)

    def loss() -> None:
        sums = loss_of(model, geometry.batch, blocks, runner.parts.objective, hidden)
        torch.autograd.grad(sums.numerator, hidden)

    return {
        "anchors": round(milliseconds(lambda: static_step.lay(*choice), repeats), 2),
        "attention": round(shape[3] * milliseconds(attention, repeats), 2),
        "head and loss": round(milliseconds(loss, repeats), 2),
    }


def measure(name: str, rate: float, capture: bool, repeats: int, precision: str) -> dict[str, object]:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shape = SHAPES[name]
    parts, layout, bucket, batch = make(shape, device)
    if precision == "fp8":
        parts = replace(parts, model=to_fp8(parts.model))
    start = time.perf_counter()
    runner = Captured(parts, layout, [bucket], capture=capture)
    ready = time.perf_counter() - start
    micro = Micro(bucket, tuple(range(bucket.rows)))
    runner.micro(micro, batch, 1)
    loss = float(runner.sums.vector[0] / runner.sums.vector[1])
    time_ms = milliseconds(lambda: runner.graphs.run(bucket.name), repeats)
    update_ms = milliseconds(lambda: runner.graphs.run("update"), 5)
    parts_tf = flops(shape, visible=shape[9] / 2)
    floor_ms = sum(parts_tf.values()) / rate / 1e9
    result = {
        "shape": name, "precision": precision, "captured": capture, "ms": round(time_ms, 2),
        "floor_ms": round(floor_ms, 2),
        "floor/time": round(floor_ms / time_ms, 3), "update_ms": round(update_ms, 2), "ready_s": round(ready, 1),
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "reserved_GB": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "loss": round(loss, 4),
    }  # fmt: skip
    if capture is False:
        alone, parts_ms = products(shape), pieces(runner, bucket, shape, repeats)
        result["products_alone"] = alone | {"sum": round(sum(alone.values()), 2)}
        result["parts_alone"] = parts_ms
        result["kernels"] = profile(lambda: runner.graphs.run(bucket.name))
    runner.close()
    return result


def profile(run: Callable[[], object]) -> list[tuple[str, float, int]]:
    """The ten longest kernels of one uncaptured step: name, ms, calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
    return [(e.key[:60], round(e.device_time_total / 1e3, 3), e.count) for e in events[:14]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["A", "B", "S"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp8"), default=["bf16"])
    parser.add_argument("--attention", choices=("flex", "blocks"), default="flex")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/step.py needs a CUDA GPU; this machine has none.")
        return
    if arguments.attention == "blocks":
        static.attend_ranges = block_attention.attend_ranges
    rate = peak_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}: {rate:.0f} TFLOP/s")
    for name in arguments.shapes:
        for precision, capture in ((p, c) for p in arguments.precision for c in (True, False)):
            result = measure(name, rate, capture, arguments.repeats, precision)
            kernels = result.pop("kernels", [])
            print(json.dumps(result), flush=True)
            for kernel in kernels:  # type: ignore[attr-defined]
                print("   ", *kernel, flush=True)


if __name__ == "__main__":
    main()
