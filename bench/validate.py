"""bench/validate.py [STORE DRAFTER]: held-out rows simulated one a forward and many a forward; the walks must be equal.

Alone it makes a small random store and an untrained drafter. On a GPU give a real store and an exported drafter of it.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dflash.simulate
from dflash.checkpoint import write_drafter
from dflash.drafter import Drafter, DrafterConfig, initialise
from dflash.evaluate.config import EvalConfig
from dflash.evaluate.stored import load_parts
from dflash.simulate import held_out_rows, simulate
from dflash.store import Store


def random_pair(folder: Path) -> tuple[Path, Path]:
    """A store of 24 held-out rows at a 135M target's width, and a drafter of two layers."""
    from helpers_store import VOCAB, make_store

    make_store(folder / "store", hidden_size=576, taps=(1, 2, 3), buckets=(96, 384), documents=2, held_out=24)
    config = DrafterConfig(
        hidden_size=576, intermediate_size=1536, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=64,
        rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=2048, vocab_size=VOCAB,
        block_size=16, taps=(1, 2, 3), num_target_layers=6, mask_token_id=300,
    )  # fmt: skip
    drafter = Drafter(config)
    initialise(drafter, seed=0)
    (folder / "drafter").mkdir()
    write_drafter(folder / "drafter", config, dict(drafter.named_parameters()), "float32")
    return folder / "store", folder / "drafter"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        paths = sys.argv[1:3] or random_pair(Path(scratch))
        store, folder = Store.open(paths[0]), Path(paths[1])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        parts = load_parts(folder, store, EvalConfig(drafter=str(folder), store=str(paths[0])), device)
        rows = held_out_rows(store)
        tokens = sum(store.length(*row) or 0 for row in rows)
        many, walks = dflash.simulate.MOST_TOKENS, []
        print(f"{len(rows)} held-out rows, {tokens:,} tokens, {device}, {parts.embed_VH.dtype}")
        for name, most in (("warm-up", many), ("one row a forward", 1), ("many rows a forward", many)):
            dflash.simulate.MOST_TOKENS = most
            start = time.perf_counter()
            walks.append(simulate(store, parts, rows))
            seconds = time.perf_counter() - start
            print(f"  {name:<20} {seconds:8.3f} s  {len(rows) / seconds:8.1f} rows/s")
        pairs = [(a.lengths, b.lengths) for x, y in zip(*walks[1:], strict=True) for a, b in zip(x, y, strict=True)]
        differing = sum(a != b for a, b in pairs)
        print(f"  {differing} of {len(pairs)} answers differ (in bf16 a near tie may)")


if __name__ == "__main__":
    main()
