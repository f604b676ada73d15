"""Validation on held-out rows: the simulated acceptance length, which is the figure a server will show."""

from collections.abc import Sequence

from dflash.simulate import Tally, held_out_rows, simulate
from dflash.store import Store
from dflash.train.step import Model

__all__ = ["held_out_rows", "validate"]


def validate(store: Store, model: Model, rows: Sequence[tuple[str, int]], chunk_logits: int | None = None) -> Tally:
    """Walk every supervised turn of `rows` as a server would (dflash/simulate.py)."""
    tally = Tally(model.drafter.config.block_size - 1)
    model.drafter.eval()
    for walks in simulate(store, model, rows, chunk_logits=chunk_logits):
        for walk in walks:
            tally.add(walk.lengths, walk.drafted, walk.accepted)
    model.drafter.train()
    return tally
