"""Target -> pool of buffers -> writer threads -> disk, so that the target waits only when the disk is really slower.

On a GPU: hooks fill one of two device stages, a copy stream moves it to a pinned buffer, a writer thread waits for
that copy and writes. On a CPU the hooks write into the buffer itself. Buffers go round; when none is free the target
waits, and that time is what `gpu_wait` reports. A shard is committed by the thread that writes its last batch.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash.errors import DflashError
from dflash.extract.batches import Batch, batches_of, largest_batch, source_of
from dflash.extract.states import Extractor, Layout, Stage, fill_inputs
from dflash.extract.totals import Totals
from dflash.store import ShardWriter, Store

BUFFERS = {"cpu": 3, "cuda": 4}
WRITERS = {"cpu": 2, "cuda": 4}
SWITCH_SECONDS = 2e-4  # Python's own 5 ms would let a writer thread keep the one that launches kernels waiting
ALL_BAD_LIMIT = 16  # so many bad documents, and more bad than good: something is wrong with the target itself


class OpenShard:
    """A shard in the making: its writer, and how many of its rows are still to come."""

    def __init__(self, store: Store, shard: tuple[str, int], worker: int) -> None:
        self.writer = ShardWriter(store, shard[0], shard[1], worker)
        self.left = len(store.bucket(shard[0]).rows_of(shard[1]))
        self.bad: list[dict[str, Any]] = []
        self.lost = np.zeros((self.left, len(store.meta.taps), 2))  # per row and tap, of int8: see `lost_to_int8`
        self.committed = False
        self.lock = threading.Lock()

    def done(self, rows: int, bad: list[dict[str, Any]]) -> bool:
        """Note written rows; true for the caller that wrote the last ones."""
        with self.lock:
            self.left -= rows
            self.bad += bad
            return self.left == 0

    def quantisation(self) -> dict[str, list[float]] | None:
        """What int8 lost per tap; summed in the order of rows, so that a shard made again says the same."""
        if self.writer.store.meta.storage != "int8":
            return None
        error, squares = self.lost.sum(axis=0).T.tolist()
        return {"squared_error": error, "squares": squares}


@dataclass
class Written:
    """What travels to a writer thread with its buffer."""

    batch: Batch
    shard: OpenShard
    buffer: Stage
    ready: Any = None  # CUDA event: the copy into the buffer is done
    started: Any = None
    ended: Any = None
    previous_end: Any = None


class Pipeline:
    """Runs shards through an extractor. Use as a context; leaving it stops the writers and drops what is unfinished."""

    def __init__(
        self, store: Store, extractor: Extractor, layout: Layout, device: torch.device, worker: int, max_bad: float
    ) -> None:
        self.store, self.extractor, self.layout, self.device, self.worker = store, extractor, layout, device, worker
        # One bad document never stops a small run, unless none at all is allowed.
        self.max_bad = max(int(max_bad > 0), int(max_bad * sum(bucket.rows for bucket in store.buckets)))
        self.totals = Totals(overlapping=device.type == "cuda")
        self.totals.bad = sum(len(entry["bad"]) for entry in store.index.entries.values())
        self.device_name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        )
        self.on_progress: Callable[[int], None] = lambda tokens: None
        self.cuda = device.type == "cuda"
        self._free: queue.Queue[Stage] = queue.Queue()
        self._work: queue.Queue[Written | None] = queue.Queue()
        self._error: BaseException | None = None
        self._open: list[OpenShard] = []
        self._previous_end: Any = None
        self._writing = 0  # writer threads at work
        self._idle_since = 0.0
        self._allocate()
        self._threads = [
            threading.Thread(target=self._write_for_ever, name=f"dflash-writer-{i}", daemon=True)
            for i in range(WRITERS[device.type])
        ]

    def _allocate(self) -> None:
        rows, tokens = largest_batch(self.store)
        for _ in range(BUFFERS[self.device.type]):
            self._free.put(Stage(self.layout, rows, tokens, "cpu", pinned=self.cuda))
        if self.cuda:
            self._stages = [Stage(self.layout, rows, tokens, str(self.device)) for _ in range(2)]
            self._copied = [torch.cuda.Event() for _ in range(2)]
            self._copy_stream = torch.cuda.Stream(self.device)
            self._turn = 0

    @contextmanager
    def running(self) -> "Iterator[Pipeline]":
        start = self._idle_since = time.monotonic()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        for thread in self._threads:
            thread.start()
        try:
            yield self
            self._finish()
        finally:
            sys.setswitchinterval(interval)
            for _ in self._threads:
                self._work.put(None)
            for thread in self._threads:
                thread.join()
            for shard in self._open:
                if not shard.committed:
                    shard.writer.abandon()
            now = time.monotonic()
            self.totals.seconds = now - start
            self.totals.disk_idle += now - self._idle_since

    def shard(self, shard: tuple[str, int], stopped: Callable[[], bool]) -> None:
        """Make one shard; give up between two batches when `stopped` says so."""
        self._open = [each for each in self._open if not each.committed]
        open_shard = OpenShard(self.store, shard, self.worker)
        self._open.append(open_shard)
        for batch in batches_of(self.store, shard):
            if stopped():
                return
            self._forward(batch, open_shard)

    def _forward(self, batch: Batch, shard: OpenShard) -> None:
        start = time.monotonic()
        buffer = self._take()
        taken = time.monotonic()
        fill_inputs(buffer, [self.store.documents[d][0] for d in batch.documents], batch.ceiling)
        filled = time.monotonic()
        with self.totals.lock:
            self.totals.filling += filled - taken
            if not self.cuda:
                self.totals.idle += taken - start
        written = Written(batch, shard, buffer)
        if self.cuda:
            self._run_on_gpu(written)
        else:
            self.extractor.run(buffer)
        self._work.put(written)

    def _run_on_gpu(self, written: Written) -> None:
        """Queue copies and forward without waiting for any of them."""
        buffer, slot = written.buffer, self._turn
        self._turn = 1 - self._turn
        stage, copied = self._stages[slot], self._copied[slot]
        rows, ceiling = buffer.input_ids.shape
        stage.shape(rows, ceiling, len(buffer.index))
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(copied)  # the stage's last content is on its way no more
        written.started, written.ended, written.ready = (torch.cuda.Event(enable_timing=i < 2) for i in range(3))
        written.previous_end = self._previous_end
        written.started.record(compute)
        for name in ("input_ids", "index", "lengths"):
            getattr(stage, name).copy_(getattr(buffer, name), non_blocking=True)
        self.extractor.run(stage)
        written.ended.record(compute)
        self._previous_end = written.ended
        self._copy_stream.wait_stream(compute)
        with torch.cuda.stream(self._copy_stream), torch.inference_mode():
            host = buffer.results()
            for name, tensor in stage.results().items():
                host[name].copy_(tensor, non_blocking=True)
            copied.record()
            written.ready.record()

    def _take(self) -> Stage:
        """A free buffer; raises what a writer thread has raised."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                continue

    def _finish(self) -> None:
        """Wait until everything is written."""
        self._work.join()
        if self._error is not None:
            raise self._error

    def _write_for_ever(self) -> None:
        while (written := self._work.get()) is not None:
            try:
                try:
                    complete = self._error is None and self._write(written)
                finally:
                    self._free.put(written.buffer)
                if complete:  # the disk may take its time over it, and the buffer is of use meanwhile
                    self._commit(written.shard)
            except BaseException as error:  # kept for the main thread, which raises it
                self._error = error
            finally:
                self._work.task_done()

    @contextmanager
    def _at_work(self) -> "Iterator[None]":
        """Note the time in which this thread, and that in which none, is writing."""
        start = time.monotonic()
        with self.totals.lock:
            if not self._writing:
                self.totals.disk_idle += start - self._idle_since
            self._writing += 1
        try:
            yield
        finally:
            end = time.monotonic()
            with self.totals.lock:
                self._writing -= 1
                self.totals.writing += end - start
                self._idle_since = end

    def _write(self, written: Written) -> bool:
        """Write a batch; true when its shard has all its rows."""
        if written.ready is not None:
            written.ready.synchronize()
        batch, shard = written.batch, written.shard
        with self._at_work():
            bad = self._bad_rows(written)
            lengths = np.array([len(self.store.documents[d][0]) for d in batch.documents], dtype=np.int32)
            for each in bad:
                lengths[each["row"] - batch.first] = 0
            arrays = written.buffer.numpy()
            supervised, agreeing = self._agreement(batch, lengths, arrays)
            shard.writer.write(batch.first, lengths, arrays)
            if "scale" in arrays:
                rows = slice(batch.first, batch.first + len(lengths))
                shard.lost[rows] = np.where(lengths[:, None, None] > 0, written.buffer.lost.numpy(), 0)
        with self.totals.lock:
            self._count(written, lengths, len(bad))
            self.totals.supervised += supervised
            self.totals.agreeing += agreeing
            self._refuse_bad(bad)
            self.on_progress(int(lengths.sum()))
        return shard.done(len(batch.documents), bad)

    def _commit(self, shard: OpenShard) -> None:
        with self._at_work():
            software = {"torch": torch.__version__, **transformers_version()}
            shard.writer.commit(shard.bad, self.device_name, software, shard.quantisation())
        shard.committed = True
        with self.totals.lock:
            self.totals.shards += 1

    def _count(self, written: Written, lengths: np.ndarray, bad: int) -> None:
        totals = self.totals
        totals.tokens += int(lengths.sum())
        totals.rows += len(lengths)
        totals.bad += bad
        if written.previous_end is not None:
            totals.idle += max(0.0, written.previous_end.elapsed_time(written.started)) / 1000

    def _bad_rows(self, written: Written) -> list[dict[str, Any]]:
        """One entry a row, with the first tap that is not finite."""
        finite, batch = written.buffer.finite.numpy(), written.batch
        found = []
        for row in np.flatnonzero(~finite.all(-1)):
            tap = self.layout.checked[int(np.flatnonzero(~finite[row])[0])]
            source = source_of(self.store, batch.shard, batch.first + int(row))
            found.append({"row": batch.first + int(row), "source": source, "tap": tap})
        return found

    def _refuse_bad(self, bad: list[dict[str, Any]]) -> None:
        totals = self.totals
        if bad and (totals.bad > self.max_bad or (totals.bad > ALL_BAD_LIMIT and 2 * totals.bad > totals.rows)):
            raise DflashError(
                f"{totals.bad:,} documents gave states that are not finite, more than --max-bad allows (the last: "
                f"{bad[-1]['source']}, tap {bad[-1]['tap']}): try --dtype float32 or bfloat16, or raise --max-bad."
            )

    def _agreement(self, batch: Batch, lengths: np.ndarray, arrays: dict[str, np.ndarray]) -> tuple[int, int]:
        """Supervised tokens that have a label, and how many of them the target would have chosen itself."""
        supervised = agreeing = 0
        if "labels" in arrays:
            for row, document in enumerate(batch.documents):
                tokens, mask = self.store.documents[document]
                counted = mask[1 : lengths[row]] == 1
                supervised += int(counted.sum())
                agreeing += int((counted & (arrays["labels"][row, 1 : lengths[row]] == tokens[1 : lengths[row]])).sum())
        return supervised, agreeing


def transformers_version() -> dict[str, str]:
    import transformers

    return {"transformers": transformers.__version__}
