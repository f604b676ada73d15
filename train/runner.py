"""How a step runs: eagerly (any device), or as captured CUDA graphs. Both do the same arithmetic on the same tensors.

A runner owns the static tensors of a run: the step number, the sums, the learning rate. `micro` adds a batch's
gradients and sums; `update` applies them and returns tensors whose values may be read later.
"""

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from dflash.flex import TILE, anchors_per_tile, attend_flex, block_mask, round_up
from dflash.train.graph import Graphs
from dflash.train.optimiser import Optimiser
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout
from dflash.train.step import Batch, Blocks, Model, Objective, Sums, drafted_states, lay_blocks, loss_of, micro_step


@dataclass(frozen=True)
class Parts:
    """What a step needs, whichever way it runs."""

    model: Model
    objective: Objective
    optimiser: Optimiser
    seed: int
    device: torch.device


class Pending:
    """A step's outcome on its way to the host: copied without waiting, read some steps later."""

    def __init__(self, outcome: Tensor, device: torch.device) -> None:
        self.done = None
        self.host = outcome
        if device.type == "cuda":
            self.host = torch.empty_like(outcome, device="cpu", pin_memory=True)
            self.host.copy_(outcome, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record()

    def values(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return self.host.tolist()


class Eager:
    """Attention row by row, shapes as they come: batches are cropped to their longest row."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.sums = Sums(parts.model.drafter.config.block_size - 1, parts.device)

    def micro(self, micro: Micro, batch: Batch, step: int) -> None:
        parts = self.parts
        number = torch.tensor(step, dtype=torch.int64, device=parts.device)
        longest = max(2, int(batch.lengths.max()))
        micro_step(
            parts.model,
            batch.cropped(longest),
            parts.objective,
            micro.bucket.anchors,
            parts.seed,
            number,
            self.sums,
            parts.optimiser.flat,
        )

    def update(self, lr: float) -> Tensor:
        """[norm, skipped, sums…], fp32, a tensor of its own."""
        self.parts.optimiser.lr.fill_(lr)
        norm, skipped = self.parts.optimiser.update(self.sums.denominator)
        outcome = torch.cat((torch.stack((norm, skipped)), self.sums.vector))
        self.sums.vector.zero_()
        return outcome

    def close(self) -> None:
        pass


class Captured:
    """One graph a bucket and one for the update; inputs are copied into static tensors that all buckets share.

    With `capture` False the same compiled kernels run without graphs (--graph off on a GPU).
    """

    def __init__(self, parts: Parts, layout: Layout, buckets: list[BucketRows], capture: bool) -> None:
        torch._dynamo.config.recompile_limit = 64  # one compilation a bucket and function
        self.parts, self.layout = parts, layout
        block = parts.model.drafter.config.block_size
        self.block = block
        self.sums = Sums(block - 1, parts.device)
        self.step = torch.zeros((), dtype=torch.int64, device=parts.device)
        self.outcome = torch.zeros(2 + self.sums.vector.numel(), dtype=torch.float32, device=parts.device)
        self.static = layout.buffers(parts.device, pin=False)
        self.inputs = {bucket.name: layout.batch(self.static, bucket) for bucket in buckets}
        self.graphs = Graphs(parts.device)
        self.capture = capture
        self.lay = torch.compile(self._lay, fullgraph=True, dynamic=False)
        self.forward = torch.compile(self._forward, fullgraph=True, dynamic=False)
        self.warm(buckets)

    def warm(self, buckets: list[BucketRows]) -> None:
        """Compile and capture every bucket, the largest first. Buffers hold zeros: no row, so nothing is learned."""
        for buffer in self.static.values():
            buffer.zero_()
        for bucket in sorted(buckets, key=lambda b: -b.rows_per_micro * b.ceiling):
            self.graphs.prepare(bucket.name, partial(self._micro, bucket), self.capture)
            self._reset()
        self.graphs.prepare("update", self._update, self.capture)
        self._reset()
        torch.cuda.empty_cache()

    def _reset(self) -> None:
        self.parts.optimiser.flat.grad.zero_()
        self.sums.vector.zero_()

    def micro(self, micro: Micro, batch: Batch, step: int) -> None:
        """`batch` is on the device, in the layout's order; it is copied into the graph's inputs."""
        inputs = self.inputs[micro.bucket.name]
        for field in fields(Batch):
            ours, new = getattr(inputs, field.name), getattr(batch, field.name)
            if ours is not None:
                ours.copy_(new)
        self.step.fill_(step)
        self.graphs.run(micro.bucket.name)

    def update(self, lr: float) -> Tensor:
        self.parts.optimiser.lr.fill_(lr)
        self.graphs.run("update")
        return self.outcome

    def close(self) -> None:
        self.graphs.close()

    def _micro(self, bucket: BucketRows) -> None:
        parts, batch = self.parts, self.inputs[bucket.name]
        padded = round_up(bucket.anchors, anchors_per_tile(self.block))
        context = round_up(bucket.rows_per_micro * bucket.ceiling, TILE)
        blocks = self.lay(batch, bucket.anchors, padded)
        hidden_AJH = self.forward(batch, blocks, context)
        sums = loss_of(parts.model, batch, blocks, parts.objective, hidden_AJH)
        parts.optimiser.flat.accumulate(sums.numerator)
        self.sums.add(sums, blocks.live_A.sum())

    def _lay(self, batch: Batch, anchors: int, padded: int) -> Blocks:
        return lay_blocks(batch, self.parts.objective, self.block, anchors, padded, self.parts.seed, self.step)

    def _forward(self, batch: Batch, blocks: Blocks, context: int) -> Tensor:
        ceiling = batch.input_ids.shape[1]
        high_A = torch.where(blocks.live_A, blocks.flat_A, 0)  # a dummy sees no context
        low_A = high_A // ceiling * ceiling
        mask = block_mask(low_A, high_A, context, self.block)
        return drafted_states(self.parts.model, batch, blocks, attend_flex(mask), context)

    def _update(self) -> None:
        norm, skipped = self.parts.optimiser.update(self.sums.denominator)
        self.outcome.copy_(torch.cat((torch.stack((norm, skipped)), self.sums.vector)))
        self.sums.vector.zero_()


Runner = Eager | Captured
