"""From the store's memory maps to batches: threads fill reusable slots ahead of the loop.

A slot holds one micro-batch in buffers made once for the largest. Filling copies only the valid part of each row and
checks its checksum on the copied bytes; what lies behind is stale and masked by `lengths` in the step. On a CPU the
loop works on the slot in place. On a GPU slots are pinned; a side stream moves each to one of two stages on the
device, while the loop still runs the step before.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from dflash.store import Store
from dflash.train.order import BucketRows, Micro
from dflash.train.step import Batch

SLOTS = 3
STAGES = 2
THREADS = 3
DTYPES = {
    "hidden": torch.bfloat16, "last": torch.bfloat16, "scale": torch.float32, "input_ids": torch.int32,
    "labels": torch.int32, "loss_mask": torch.uint8, "topk_ids": torch.int32, "topk_logp": torch.float16,
}  # fmt: skip
MAX_ROWS = 64


@dataclass(frozen=True)
class Layout:
    """The buffers of a micro-batch: per array the shape behind [row, position], and the most padded tokens."""

    tails: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    largest: int

    @staticmethod
    def of(store: Store, largest: int) -> "Layout":
        tails = {name: tuple(store.array_shape_dtype(name, 2)[0][1:]) for name in store.array_names()}
        dtypes = DTYPES | ({"hidden": torch.int8} if store.meta.storage == "int8" else {})
        return Layout(tails, {name: dtypes[name] for name in tails}, largest)

    def buffers(self, device: torch.device, pin: bool) -> dict[str, Tensor]:
        """Flat buffers, large enough for every micro-batch, and per row its length and document."""
        flat = {
            name: torch.empty(
                self.largest * int(np.prod(tail, dtype=np.int64)),
                dtype=self.dtypes[name],
                device=device,
                pin_memory=pin,
            )
            for name, tail in self.tails.items()
        }
        flat["lengths"] = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device, pin_memory=pin)
        flat["documents"] = torch.full((MAX_ROWS,), -1, dtype=torch.int64, device=device, pin_memory=pin)
        return flat

    def batch(self, buffers: dict[str, Tensor], bucket: BucketRows) -> Batch:
        """Views [rows, ceiling, …] at the buffers' beginning."""
        rows, ceiling = bucket.rows_per_micro, bucket.ceiling
        views = {name: buffers[name][:rows] for name in ("lengths", "documents")}
        for name, tail in self.tails.items():
            shape = (rows, ceiling, *tail)
            views[name] = buffers[name][: int(np.prod(shape))].view(shape)
        views.setdefault("labels", views["input_ids"])  # --labels tokens stores none: the data is the label
        return Batch(**{f.name: views[f.name] for f in fields(Batch) if f.name in views})


class Reader:
    """Yields (micro-step, batch) for a sequence of micro-steps, in order.

    `waited`: seconds that the loop (on a GPU: the device) stood still for want of data.
    """

    def __init__(self, store: Store, layout: Layout, device: torch.device) -> None:
        self.store, self.layout, self.device = store, layout, device
        self.waited = 0.0
        cuda = device.type == "cuda"
        self.slots = [layout.buffers(torch.device("cpu"), pin=cuda) for _ in range(SLOTS)]
        self.stages = [layout.buffers(device, pin=False) for _ in range(STAGES)] if cuda else []
        self.stream = torch.cuda.Stream(device) if cuda else None
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = (
            deque()
        )  # when the device began and ended to wait

    def fill(self, slot: dict[str, Tensor], micro: Micro) -> Batch:
        """Copy a micro-batch's rows into the slot; the batch is views of it, on the host."""
        batch = self.layout.batch(slot, micro.bucket)
        arrays = {name: _numpy(getattr(batch, name)) for name in self.layout.tails}
        documents = self.store.plan.rows[micro.bucket.name].document
        batch.lengths.zero_()
        batch.documents.fill_(-1)
        for place, row in enumerate(micro.rows):
            out = {name: array[place] for name, array in arrays.items()}
            batch.lengths[place] = self.store.read_into(micro.bucket.name, row, out)
            batch.documents[place] = int(documents[row])
        return batch

    def batches(self, micros: Iterator[Micro]) -> Iterator[tuple[Micro, Batch]]:
        """Batches ready for the step, in order. A batch is valid until the next is asked for."""
        host = self._host_batches(micros)
        return host if self.stream is None else self._device_batches(host)

    def _host_batches(self, micros: Iterator[Micro]) -> Iterator[tuple[Micro, Batch]]:
        pending: deque[tuple[Micro, dict[str, Tensor], Future[Batch]]] = deque()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="reader") as pool:

            def ahead(slot: dict[str, Tensor]) -> None:
                if (micro := next(micros, None)) is not None:
                    pending.append((micro, slot, pool.submit(self.fill, slot, micro)))

            for slot in self.slots:
                ahead(slot)
            while pending:
                micro, slot, future = pending.popleft()
                start = time.perf_counter()
                batch = future.result()
                if self.stream is None:
                    self.waited += time.perf_counter() - start
                yield micro, batch
                ahead(slot)

    def _device_batches(self, host: Iterator[tuple[Micro, Batch]]) -> Iterator[tuple[Micro, Batch]]:
        """One batch ahead: while the loop works on a stage, the other is being filled."""
        landed = [torch.cuda.Event() for _ in self.stages]
        drained = [torch.cuda.Event() for _ in self.stages]
        ahead: deque[tuple[int, Micro, Batch]] = deque()
        assert self.stream is not None, "only on a GPU"
        for number, (micro, batch) in enumerate(host):
            index = number % STAGES
            staged = self.layout.batch(self.stages[index], micro.bucket)
            self.stream.wait_event(drained[index])
            with torch.cuda.stream(self.stream):
                for field in fields(Batch):
                    source, target = getattr(batch, field.name), getattr(staged, field.name)
                    if source is not None:
                        target.copy_(source, non_blocking=True)
                landed[index].record(self.stream)
            ahead.append((index, micro, staged))
            if len(ahead) == STAGES:
                yield from self._hand_over(ahead, landed, drained)
            landed[index].synchronize()  # the threads may fill the slot again
        while ahead:
            yield from self._hand_over(ahead, landed, drained)

    def _hand_over(
        self, ahead: "deque[tuple[int, Micro, Batch]]", landed: list[torch.cuda.Event], drained: list[torch.cuda.Event]
    ) -> Iterator[tuple[Micro, Batch]]:
        index, micro, staged = ahead.popleft()
        current = torch.cuda.current_stream(self.device)
        idle, ready = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        idle.record(current)
        current.wait_event(landed[index])
        ready.record(current)
        self._stalls.append((idle, ready))
        while self._stalls and self._stalls[0][1].query():
            begun, ended = self._stalls.popleft()
            self.waited += begun.elapsed_time(ended) / 1000
        yield micro, staged
        drained[index].record(current)


def _numpy(view: Tensor) -> np.ndarray:
    """The tensor's memory as numpy sees it; bfloat16 as the store's uint16."""
    return (view.view(torch.uint16) if view.dtype == torch.bfloat16 else view).numpy()
