"""bf16, lz4 and int8 side by side: bytes per token, speed of writer and reader, error, acceptance after equal training.

    python bench/storages.py [--steps 400] [--prompts 200]

Size, error and acceptance: tiny-chat (tests/assets) answers prompts, the same answers are extracted in each storage,
the same training follows, and the drafter decodes 16 other prompts. Speed: states of 5 taps of 1,024 channels, normal
with channels of different size (which lz4 shrinks like those of models); GB/s count the states as bfloat16, whatever is
stored, from memory to disk with fsync, and from the page cache into the trainer's slots.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from store import make_store, read_ours, readers, seconds, staged, write_ours
from tiny_tasks import prompts

from dflash.store import Store, inspect, write_calib
from dflash.train.reader import Layout, Reader

ROOT = Path(__file__).resolve().parent.parent
STORAGES = ("bf16", "lz4", "int8")
TARGET = ROOT / "tests" / "assets" / "tiny-chat"
TAPS, HIDDEN, CEILING = 5, 1024, 1216


def dflash(*words: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "dflash", *map(str, words), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def speeds(storage: str, folder: Path) -> tuple[float, float]:
    """(written, read) GB/s of bfloat16 states."""
    store = make_store(folder, hidden=HIDDEN, taps=TAPS, ceiling=CEILING, rows=104, per_shard=26, storage=storage)
    arrays = staged(store)
    if storage == "int8":
        write_calib(store.root, np.ones(TAPS * HIDDEN, np.float32))
    else:
        rng = np.random.default_rng(0)
        sizes = np.exp(rng.standard_normal(TAPS * HIDDEN, dtype=np.float32))
        values = rng.standard_normal(arrays["hidden"].shape, dtype=np.float32) * sizes
        arrays["hidden"][:] = (values.view(np.uint32) >> 16).astype(np.uint16)
    size = int(store.plan.rows[store.buckets[0].name].length.sum()) * TAPS * HIDDEN * 2
    written, _ = seconds(lambda: write_ours(store, arrays))
    readers["mmap"] = Reader(Store.open(store.root), Layout.of(store, 4 * CEILING), torch.device("cpu"))
    read_ours(store, "mmap")  # into the page cache
    read = min(seconds(lambda: read_ours(store, "mmap"))[0] for _ in range(3))
    return size / written / 1e9, size / read / 1e9


def learned(storage: str, folder: Path, steps: int) -> dict[str, float]:
    """Bytes per token, relative error and acceptance length on tiny-chat."""
    store, run, drafter = (folder / f"{kind}-{storage}" for kind in ("store", "run", "drafter"))
    made = dflash(
        "extract", "--target", TARGET, "--data", folder / "answers.jsonl", "--store", store, "--num-taps", "3",
        "--buckets", "96,128,192,256", "--storage", storage,
    )  # fmt: skip
    dflash(
        "train", "--store", store, "--run", run, "--steps", str(steps), "--num-layers", "2", "--block-size", "8",
        "--lr", "2e-3", "--gamma", "2", "--clip", "0.3", "--token-budget", "4096", "--anchors", "448",
        "--anchor-density", "1", "--eval-every", str(steps),
    )  # fmt: skip
    dflash("export", run, "--out", drafter, "--dtype", "float32")
    served = dflash(
        "eval", "--drafter", drafter, "--target", TARGET, "--prompts", folder / "eval.jsonl",
        "--max-new-tokens", "160", "--batch-size", "16",
    )  # fmt: skip
    taps = inspect(store)["sample"]["taps"]
    hidden = sum(path.stat().st_blocks * 512 for path in (store / "shards").rglob("hidden/c.*"))
    return {
        "bytes": hidden / made["tokens"], "error": max(tap.get("int8_error", 0.0) for tap in taps),
        "acceptance": served["acceptance_length"]["pooled"], "lossless": served["lossless"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder here unless given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-storages-", dir=arguments.folder or Path.cwd()) as name:
        folder = Path(name)
        print("| storage | hidden, bytes a token | written, GB/s | read, GB/s | error, worst tap | acceptance length |")
        print("| --- | --- | --- | --- | --- | --- |")
        fast = {storage: speeds(storage, folder / storage) for storage in STORAGES}
        asked = prompts(arguments.prompts + 16, seed=0)
        for file, part in (("prompts", asked[: arguments.prompts]), ("eval", asked[arguments.prompts :])):
            (folder / f"{file}.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in part))
        dflash(
            "regenerate", "--data", folder / "prompts.jsonl", "--target", TARGET, "--out", folder / "answers.jsonl",
            "--max-new-tokens", "160", "--batch-size", "100",
        )  # fmt: skip
        for storage, (written, read) in fast.items():
            found = learned(storage, folder, arguments.steps)
            print(
                f"| {storage} | {found['bytes']:.0f} | {written:.2f} | {read:.2f} | {found['error']:.2%} "
                f"| {found['acceptance']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
