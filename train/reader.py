"""From the store to batches: threads fill reusable slots ahead of the loop.

A slot holds one micro-batch in buffers made once for the largest, in huge pages: the memory maps are copied there
(--io mmap), or the disk writes there itself (--io direct). Filling takes only the valid part of each row and checks its
checksum on the copied bytes; what lies behind is stale and masked by `lengths` in the step. On a CPU the loop works on
the slot in place. On a GPU slots are pinned; a side stream moves each to one of two stages on the device, while the
loop still runs the step before.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash.store import Store
from dflash.store.direct import aligned
from dflash.train.order import BucketRows, Micro
from dflash.train.step import Batch

SLOTS = 3
STAGES = 2
DTYPES = {
    "hidden": torch.bfloat16, "last": torch.bfloat16, "scale": torch.float32, "input_ids": torch.int32,
    "labels": torch.int32, "loss_mask": torch.uint8, "topk_ids": torch.int32, "topk_logp": torch.float16,
}  # fmt: skip
MAX_ROWS = 64
HUGE_PAGE = 2 << 20
WAITING = 0.05  # share of the loop's time from which waiting for data is worth a word
FASTER = 1.2
FITS = 0.6  # of the available memory, from which a store leaves no room for anything else


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
        make = huge if device.type == "cpu" else torch.empty
        flat = {
            name: make(
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


def huge(count: int, *, dtype: torch.dtype, device: torch.device, pin_memory: bool) -> Tensor:
    """Memory of the host at a huge page's edge, so that the disk can write there (O_DIRECT); pinned by registering it.

    torch's own pinned memory comes in powers of two and small pages; it is what is left where registering fails."""
    size = count * dtype.itemsize
    memory = aligned(size, HUGE_PAGE)
    if pin_memory and size:
        cudart = torch.cuda.cudart()
        address = memory.__array_interface__["data"][0]
        if int(cudart.cudaHostRegister(address, size, 0)) != 0:
            return torch.empty(count, dtype=dtype, device=device, pin_memory=True)
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory).view(dtype)


class Filler:
    """Copies micro-batches into slots, from any thread, and knows how fast that went."""

    def __init__(self, store: Store, layout: Layout) -> None:
        self.store, self.layout = store, layout
        self._bytes, self._seconds, self._lock = 0, 0.0, threading.Lock()

    def fill(self, slot: dict[str, Tensor], micro: Micro) -> Batch:
        """Copy a micro-batch's rows into the slot; the batch is views of it, on the host."""
        start, read = time.perf_counter(), 0
        batch = self.layout.batch(slot, micro.bucket)
        arrays = {name: _numpy(getattr(batch, name)) for name in self.layout.tails}
        documents = self.store.plan.rows[micro.bucket.name].document
        batch.lengths.zero_()
        batch.documents.fill_(-1)
        for place, row in enumerate(micro.rows):
            out = {name: array[place] for name, array in arrays.items()}
            n = self.store.read_into(micro.bucket.name, row, out)
            batch.lengths[place] = n
            batch.documents[place] = int(documents[row])
            read += n * sum(array[place, 0].nbytes for array in arrays.values())
        with self._lock:
            self._bytes, self._seconds = self._bytes + read, self._seconds + time.perf_counter() - start
        return batch

    @property
    def rate(self) -> float:
        """Bytes per second of one thread."""
        return self._bytes / self._seconds if self._seconds else 0.0


class Reader:
    """Yields (micro-step, batch) for a sequence of micro-steps, in order.

    `waited`: seconds that the loop (on a GPU: the device) stood still for want of data.
    """

    def __init__(self, store: Store, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.filler = Filler(store, layout)
        self.waited = 0.0
        cuda = device.type == "cuda"
        self.slots = [layout.buffers(torch.device("cpu"), pin=cuda) for _ in range(SLOTS)]
        self.stages = [layout.buffers(device, pin=False) for _ in range(STAGES)] if cuda else []
        self.stream = torch.cuda.Stream(device) if cuda else None
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = (
            deque()
        )  # when the device began and ended to wait

    def advice(self, share: float, micro: Micro) -> str | None:
        """Where the loop waits for data a `share` of its time: try the other reader on a micro-step that is still to
        come, and say so when it is faster."""
        store, own = self.filler.store, self.filler.rate
        if share < WAITING:
            return None
        occupied, free = sum(int(entry["bytes"]) for entry in store.index.entries.values()), available_memory()
        if store.io == "direct" and occupied < FITS * free:
            why = f"reads the store's {occupied / 1e9:.1f} GB from the page cache ({free / 1e9:.1f} GB) after one epoch"
            other = "mmap"
        else:
            other = "direct" if store.io == "mmap" else "mmap"
            filler = Filler(Store(store.root, store.meta, store.plan, store.documents, other), self.layout)
            filler.fill(self.layout.buffers(torch.device("cpu"), pin=False), micro)
            if filler.rate < FASTER * own:
                return None
            why = f"reads {filler.rate / 1e9:.2f} GB/s a thread here, --io {store.io} {own / 1e9:.2f}"
        return f"The loop waited for data {share:.0%} of its time. --io {other} {why}: stop, and resume with it."

    def batches(self, micros: Iterator[Micro]) -> Iterator[tuple[Micro, Batch]]:
        """Batches ready for the step, in order. A batch is valid until the next is asked for."""
        host = self._host_batches(micros)
        return host if self.stream is None else self._device_batches(host)

    def _host_batches(self, micros: Iterator[Micro]) -> Iterator[tuple[Micro, Batch]]:
        pending: deque[tuple[Micro, dict[str, Tensor], Future[Batch]]] = deque()
        with ThreadPoolExecutor(threads(self.filler.store.io), thread_name_prefix="reader") as pool:

            def ahead(slot: dict[str, Tensor]) -> None:
                if (micro := next(micros, None)) is not None:
                    pending.append((micro, slot, pool.submit(self.filler.fill, slot, micro)))

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


def threads(io: str) -> int:
    """How many fill slots at once. Those that read past the cache mostly wait for the disk, which likes to have several
    reads to do; those that copy out of the cache need a core each, and beyond that fight for Python's lock."""
    return SLOTS if io == "direct" else min(SLOTS, len(os.sched_getaffinity(0)))


def available_memory() -> int:
    """Bytes that programs and the page cache can still have; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
