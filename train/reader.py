"""From the store's memory maps to batches: threads fill reusable slots ahead of the loop.

A slot holds one micro-batch in buffers made once for the largest. Filling copies only the valid part of each row and
checks its checksum on the copied bytes; what lies behind is stale and masked by `lengths` in the step. On a GPU the
buffers are pinned and a side stream moves them; on a CPU the loop works on them in place.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.store import Store
from dflash.train.order import Micro
from dflash.train.step import Batch

SLOTS = 3
THREADS = 2
TORCH_DTYPES = {
    "hidden": torch.bfloat16, "last": torch.bfloat16, "scale": torch.float32, "input_ids": torch.int32,
    "labels": torch.int32, "loss_mask": torch.uint8, "topk_ids": torch.int32, "topk_logp": torch.float16,
}  # fmt: skip


@dataclass
class Slot:
    """Flat buffers by array name, large enough for every micro-batch."""

    buffers: dict[str, Tensor]

    def views(self, names: dict[str, tuple[int, ...]], rows: int, ceiling: int) -> dict[str, Tensor]:
        """[rows, ceiling, …] views at the buffers' beginning."""
        views = {}
        for name, tail in names.items():
            shape = (rows, ceiling, *tail)
            views[name] = self.buffers[name][: int(np.prod(shape))].view(shape)
        return views


class Reader:
    """Yields (micro-step, batch) for a sequence of micro-steps, in order; `waited` is the time the loop stood still."""

    def __init__(self, store: Store, largest: int, device: torch.device) -> None:
        """`largest`: the most padded tokens of any micro-batch."""
        self.store = store
        self.device = device
        self.waited = 0.0
        self.tails = {
            name: tuple(store.array_shape_dtype(name, 2)[0][1:]) for name in store.array_names() if name != "lengths"
        }
        self.dtypes = TORCH_DTYPES | ({"hidden": torch.int8} if store.meta.storage == "int8" else {})
        pin = device.type == "cuda"
        self.slots = [
            Slot({
                name: torch.empty(largest * int(np.prod(tail, dtype=np.int64)), dtype=self.dtypes[name], pin_memory=pin)
                for name, tail in self.tails.items()
            })
            for _ in range(SLOTS)
        ]  # fmt: skip

    def fill(self, slot: Slot, micro: Micro) -> Batch:
        """Copy a micro-batch's rows into the slot; the batch is views of it, on the host."""
        rows, ceiling = micro.bucket.rows_per_micro, micro.bucket.ceiling
        plan = self.store.plan.rows[micro.bucket.name]
        views = slot.views(self.tails, rows, ceiling)
        arrays = {name: _numpy(view) for name, view in views.items()}
        lengths = torch.zeros(rows, dtype=torch.int32)
        documents = torch.full((rows,), -1, dtype=torch.int64)
        for place, row in enumerate(micro.rows):
            out = {name: array[place] for name, array in arrays.items()}
            lengths[place] = self.store.read_into(micro.bucket.name, row, out)
            documents[place] = int(plan.document[row])
        named = {f.name: views[f.name] for f in fields(Batch) if f.name in views}
        named.setdefault("labels", named["input_ids"])  # --labels tokens stores none: the data is the label
        return Batch(**named, lengths=lengths, documents=documents)

    def batches(self, micros: Iterator[Micro]) -> Iterator[tuple[Micro, Batch]]:
        """Batches ready for the step, in order. A batch is valid until the next is asked for."""
        pending: deque[tuple[Micro, Slot, Future[Batch]]] = deque()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="reader") as pool:

            def ahead(slot: Slot) -> None:
                if (micro := next(micros, None)) is not None:
                    pending.append((micro, slot, pool.submit(self.fill, slot, micro)))

            for slot in self.slots:
                ahead(slot)
            while pending:
                micro, slot, future = pending.popleft()
                start = time.perf_counter()
                batch = future.result()
                self.waited += time.perf_counter() - start
                if self.device.type == "cuda":
                    batch = to_device(batch, self.device)
                    torch.cuda.current_stream(self.device).synchronize()  # the slot is free once the copy is done
                yield micro, batch
                ahead(slot)


def _numpy(view: Tensor) -> np.ndarray:
    """The tensor's memory as numpy sees it; bfloat16 as the store's uint16."""
    return (view.view(torch.uint16) if view.dtype == torch.bfloat16 else view).numpy()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a host batch; the caller keeps the slot until the copy is done."""
    parts: dict[str, Any] = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    moved: dict[str, Any] = {n: p if p is None else p.to(device, non_blocking=True) for n, p in parts.items()}
    return Batch(**moved)
