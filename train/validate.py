"""Validation on held-out rows: the simulated acceptance length, which is the figure a server will show."""

import numpy as np
import torch

from dflash.simulate import Tally, accepted_drafts, supervised_turns, walk
from dflash.store import Store
from dflash.train.step import Model, row_states


def held_out_rows(store: Store, rows: dict[str, np.ndarray] | None = None) -> list[tuple[str, int]]:
    """(bucket, row) of every held-out row whose shard is there, of `rows` where a run keeps to some."""
    return [
        (bucket.name, row)
        for bucket in store.buckets
        if bucket.held_out
        for row in (range(bucket.rows) if rows is None else rows[bucket.name].tolist())
        if store.length(bucket.name, row)
    ]


@torch.no_grad()
def validate(store: Store, model: Model, rows: list[tuple[str, int]]) -> Tally:
    """Walk every supervised turn of `rows` as a server would (dflash/simulate.py)."""
    device = model.embed_VH.device
    tally = Tally(model.drafter.config.block_size - 1)
    model.drafter.eval()
    for bucket, row in rows:
        arrays = store.read_row(bucket, row)
        ids = torch.from_numpy(arrays["input_ids"]).to(device, torch.int64)
        labels = torch.from_numpy(arrays.get("labels", arrays["input_ids"])).to(device, torch.int64)
        turns = [(start, end) for start, end in supervised_turns(arrays["loss_mask"]) if end - start > 1]
        if not turns:
            continue
        anchors = np.concatenate([np.arange(start, end - 1) for start, end in turns])
        accepted = accepted_drafts(
            model.drafter, model.rope, model.embed_VH, model.embed_factor, model.head,
            row_states(arrays, model), ids, labels, anchors,
        )  # fmt: skip
        accepted_at = dict(zip(anchors.tolist(), accepted.tolist(), strict=True))
        for start, end in turns:
            walk(tally, start, end, accepted_at)
    model.drafter.train()
    return tally
