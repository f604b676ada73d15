"""The micro-step of static shapes: what a GPU compiles and captures, and what tests run on a CPU as it is.

One geometry serves a bucket (--graph bucket), or every bucket padded to the largest (--graph budget): then the rows'
ceiling and the number of anchors are values on the device. Where memory is short, a batch's anchors are taken in
several replays: all are chosen each time, and the part number on the device says which are trained on.

Axes: S context tokens padded to whole tiles, A anchors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.flex import TILE, anchors_per_tile, attend_ranges, round_up
from dflash.train.layerwise import Layerwise
from dflash.train.memory import Economy
from dflash.train.optimiser import Optimiser
from dflash.train.step import Batch, Blocks, Model, Objective, Sums, drafted_states, lay_blocks, loss_of


@dataclass(frozen=True)
class Parts:
    """What a step needs, whichever way it runs."""

    model: Model
    objective: Objective
    optimiser: Optimiser
    seed: int
    device: torch.device


@dataclass(frozen=True)
class Geometry:
    """The shapes of one graph and the static tensors that it reads."""

    batch: Batch
    context: int  # context tokens, whole tiles
    anchors: int  # that are chosen
    replay: int  # that one replay trains on, whole tiles
    replays: int  # for all of them

    @staticmethod
    def of(batch: Batch, anchors: int, block: int, economy: Economy) -> "Geometry":
        tile = anchors_per_tile(block)
        most = round_up(anchors, tile)
        replay = most if economy.anchors is None else min(most, round_up(economy.anchors, tile))
        return Geometry(batch, round_up(batch.input_ids.numel(), TILE), anchors, replay, -(-anchors // replay))


class StaticStep:
    """Forward and backward of a micro-batch, and the update, on tensors whose addresses never change."""

    def __init__(self, parts: Parts, economy: Economy, compiled: Callable[[Any], Any]) -> None:
        model, self.parts, self.economy = parts.model, parts, economy
        self.block = model.drafter.config.block_size
        self.sums = Sums(self.block - 1, parts.device)
        scalar = torch.zeros((), dtype=torch.int64, device=parts.device)
        self.step, self.part, self.most, self.ceiling = (scalar.clone() for _ in range(4))
        self.outcome = torch.zeros(2 + self.sums.vector.numel(), dtype=torch.float32, device=parts.device)
        self.lay, self.forward = compiled(self._lay), compiled(self._forward)
        self.layerwise = Layerwise(model, parts.objective, compiled, economy.chunk) if economy.layerwise else None

    def micro(self, geometry: Geometry) -> None:
        """One replay's worth of a batch: gradients and sums accumulate, unnormalised."""
        parts, batch = self.parts, geometry.batch
        blocks = self.lay(batch, geometry.anchors, geometry.replay, geometry.replays)
        if self.layerwise is not None:
            sums = self.layerwise.accumulate(parts.optimiser.flat, batch, blocks, geometry.context)
        else:
            hidden_AJH = self.forward(batch, blocks, geometry.context)
            sums = loss_of(parts.model, batch, blocks, parts.objective, hidden_AJH, self.economy.chunk)
            parts.optimiser.flat.accumulate(sums.numerator)
        self.sums.add(sums, blocks.live_A.sum())

    def update(self) -> None:
        norm, skipped = self.parts.optimiser.update(self.sums.denominator)
        self.outcome.copy_(torch.cat((torch.stack((norm, skipped)), self.sums.vector)))
        self.sums.vector.zero_()

    def forget(self) -> None:
        """Drop what has accumulated."""
        self.parts.optimiser.flat.grad.zero_()
        self.sums.vector.zero_()

    def _lay(self, batch: Batch, anchors: int, replay: int, replays: int) -> Blocks:
        parts = self.parts
        most = None if batch.ceiling is None else self.most
        blocks = lay_blocks(batch, parts.objective, self.block, anchors, replay * replays, parts.seed, self.step, most)
        if replays == 1:
            return blocks
        return blocks.taken(self.part * replay + torch.arange(replay, device=self.part.device))

    def _forward(self, batch: Batch, blocks: Blocks, context: int) -> Tensor:
        window = self.parts.model.drafter.config.sliding_window
        attend = attend_ranges(blocks.low_A, blocks.high_A, context, self.block, window)
        return drafted_states(self.parts.model, batch, blocks, attend, context)
