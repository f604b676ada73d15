"""bench/attention.py [A B S small]: one layer's attention, flex against the kernels of dflash/block_attention.py.

Forward and forward+backward in ms on random anchors, then every tile tried for each kernel, the fastest last: what the
constants there were chosen from. Needs a CUDA GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.step import milliseconds
from dflash import block_attention, flex
from dflash.block_attention import Tile

#: heads, kv heads, head dim, rows, ceiling, anchors, block; `small` is a 135M target's drafter in training
SHAPES = {
    "A": (32, 8, 128, 4, 3072, 2048, 16),
    "B": (32, 8, 128, 4, 2048, 1024, 32),
    "S": (9, 3, 64, 1, 2432, 128, 16),
    "small": (18, 6, 64, 64, 448, 2048, 16),
}
SIZES = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8))
TILES = [Tile(rows, keys, warps, stages) for rows, keys, warps in SIZES for stages in (2, 3)]


def inputs(shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor, int, int]]:
    heads, groups, dim, rows, ceiling, anchors, block = shape
    flat = torch.randperm(rows * ceiling, device="cuda")[:anchors].sort()[0]
    context, tokens = flex.round_up(rows * ceiling, flex.TILE), anchors * block
    sizes = [(tokens, heads), (context, groups), (context, groups), (tokens, groups), (tokens, groups)]
    states = [torch.randn(*size, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes]
    return states, torch.randn_like(states[0]), (flat // ceiling * ceiling, flat, context, block)


def timed(attend_ranges: Callable[..., Callable[..., Tensor]], name: str) -> tuple[float, float]:
    """Milliseconds of the forward, and of forward and backward; the mask is made in both."""
    states, d_out, ranges = inputs(SHAPES[name])
    if attend_ranges is flex.attend_ranges:

        def attend(*states: Tensor) -> Tensor:
            return attend_ranges(*ranges)(*states)

        run = torch.compile(attend, fullgraph=True, dynamic=False)
    else:
        run = attend_ranges(*ranges)
    with torch.no_grad():
        forward = milliseconds(lambda: run(*states), 20)
    return forward, milliseconds(lambda: torch.autograd.grad(run(*states), states, d_out), 20)


def arithmetic(name: str) -> float:
    """TFLOP of forward and backward."""
    heads, _, dim, _, ceiling, anchors, block = SHAPES[name]
    return 14 * heads * dim * anchors * block * (ceiling / 2 + block) / 1e12


def sweep(name: str) -> None:
    for kernel, column in (("forward", 0), ("rows", 1), ("keys", 1)):
        kept, found = block_attention.ROOMY, []
        for tile in TILES:
            block_attention.ROOMY = replace(kept, **{kernel: tile})
            try:
                found.append((timed(block_attention.attend_ranges, name)[column], tile))
            except Exception as error:  # a tile may need more shared memory than there is
                print(f"  {kernel} {tile}: {type(error).__name__}", flush=True)
        block_attention.ROOMY = kept
        for ms, tile in sorted(found, key=lambda each: -each[0]):
            print(f"  {kernel} {ms:.3f} ms {tile}{'  (now)' if tile == getattr(kept, kernel) else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--sweep", action="store_true", help="try every tile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/attention.py needs a CUDA GPU; this machine has none.")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    for name in arguments.shapes:
        for kind in (flex, block_attention):
            forward, both = timed(kind.attend_ranges, name)
            rate = arithmetic(name) / both * 1e3
            print(
                f"{name} {kind.__name__}: {forward:.3f} ms, with backward {both:.3f} ms, {rate:.0f} TFLOP/s", flush=True
            )
        if arguments.sweep:
            sweep(name)


if __name__ == "__main__":
    main()
