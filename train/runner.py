"""How a step runs: eagerly (any device), or as captured CUDA graphs. Both do the same arithmetic on the same tensors.

A runner owns the static tensors of a run: the step number, the sums, the learning rate. `micro` adds a batch's
gradients and sums; `update` applies them and returns tensors whose values may be read later.
"""

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash.graphs import Graphs
from dflash.train.memory import PLAIN, Economy
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout
from dflash.train.static import Geometry, Parts, StaticStep
from dflash.train.step import Batch, Sums, micro_step

__all__ = ["Captured", "Eager", "Parts", "Pending", "Runner"]

BUDGET = "budget"  # the name of the one graph that serves every bucket


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

    graph_seconds: float | None = None

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


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False)


class Captured:
    """One graph a bucket, or one for all (`budget`), and one for the update; inputs are copied into static tensors that
    all buckets share.

    With `capture` False the same compiled kernels run without graphs (--graph off on a GPU).
    """

    def __init__(
        self,
        parts: Parts,
        layout: Layout,
        buckets: list[BucketRows],
        capture: bool,
        budget: bool = False,
        economy: Economy = PLAIN,
        measure: bool = False,
    ) -> None:
        torch._dynamo.config.recompile_limit = 64  # one compilation a bucket and function
        self.parts, self.static = parts, StaticStep(parts, economy, compiled)
        self.sums, self.outcome = self.static.sums, self.static.outcome
        self.buffers = layout.buffers(parts.device, pin=False)
        self.inputs = {bucket.name: layout.batch(self.buffers, bucket) for bucket in buckets}
        self.geometries = self._geometries(layout, buckets, budget, economy)
        self.graphs = Graphs(parts.device)
        self.graphs.measuring = measure
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._graph_seconds = 0.0
        self.warm(capture)

    def _geometries(
        self, layout: Layout, buckets: list[BucketRows], budget: bool, economy: Economy
    ) -> dict[str, Geometry]:
        """Of each graph, the largest first, so that the others fit into its memory."""
        block = self.static.block
        if budget:
            most = max(bucket.anchors for bucket in buckets)
            flat = layout.batch(self.buffers, BucketRows(BUDGET, layout.largest, 1, 1, most))
            rows = {name: self.buffers[name] for name in ("lengths", "documents")}
            flat = replace(flat, ceiling=self.static.ceiling, **rows)
            return {BUDGET: Geometry.of(flat, most, block, economy)}
        ordered = sorted(buckets, key=lambda bucket: -bucket.rows_per_micro * bucket.ceiling)
        return {b.name: Geometry.of(self.inputs[b.name], b.anchors, block, economy) for b in ordered}

    def warm(self, capture: bool) -> None:
        """Compile and capture every graph. Buffers hold zeros: no row, so nothing is learned.

        All are warm before the first is captured: what warming up took is given back, and the graphs' pool, which
        nothing else may use, is not yet there beside it.
        """
        for buffer in self.buffers.values():
            buffer.zero_()
        self.static.ceiling.fill_(1)
        work: dict[str, Callable[[], None]] = {
            name: partial(self.static.micro, geometry) for name, geometry in self.geometries.items()
        }
        work["update"] = self.static.update
        for name, each in work.items():
            self.graphs.warm_up(name, each)
            self.static.forget()
        if self.parts.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        for name, each in work.items():
            self.graphs.keep(name, each, capture)
            self.static.forget()

    def micro(self, micro: Micro, batch: Batch, step: int) -> None:
        """`batch` is on the device, in the layout's order; it is copied into the graph's inputs."""
        bucket, static = micro.bucket, self.static
        inputs = self.inputs[bucket.name]
        for field in fields(Batch):
            ours, new = getattr(inputs, field.name), getattr(batch, field.name)
            if ours is not None:
                ours.copy_(new)
        static.step.fill_(step)
        name = BUDGET if BUDGET in self.geometries else bucket.name
        if name == BUDGET:
            self.buffers["lengths"][bucket.rows_per_micro :].zero_()  # a batch of more rows may have been here
            static.ceiling.fill_(bucket.ceiling)
            static.most.fill_(bucket.anchors)
        for part in range(-(-bucket.anchors // self.geometries[name].replay)):
            static.part.fill_(part)
            self._run(name)

    def update(self, lr: float) -> Tensor:
        self.parts.optimiser.lr.fill_(lr)
        self._run("update")
        return self.outcome

    def _run(self, name: str) -> None:
        """Between two events, whose distance is the graph's time on the device."""
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        self.graphs.run(name)
        ended.record()
        self._timed.append((begun, ended))
        while self._timed and self._timed[0][1].query():
            self._take_time()

    def _take_time(self) -> None:
        begun, ended = self._timed.popleft()
        self._graph_seconds += begun.elapsed_time(ended) / 1000

    @property
    def graph_seconds(self) -> float:
        """The device's time in graphs so far; waits for the last."""
        while self._timed:
            self._timed[0][1].synchronize()
            self._take_time()
        return self._graph_seconds

    @property
    def peaks(self) -> dict[str, int]:
        """Most bytes allocated while each bucket was warmed up; until then, unless `measure` was asked for."""
        alone = self.graphs.peaks.get(BUDGET)
        return self.graphs.peaks if alone is None else dict.fromkeys(self.inputs, alone)

    def close(self) -> None:
        self.graphs.close()


Runner = Eager | Captured
