"""Target -> pool of buffers -> writer threads -> disk, so that the target waits only when the disk is really slower.

On a GPU: hooks fill one of two device stages, a copy stream moves it to a pinned buffer, a writer thread waits for
that copy and writes. On a CPU the hooks write into the buffer itself. Buffers go round; when none is free the target
waits, and that time is what `gpu_wait` reports. All writer threads share a batch, some rows each, so that a buffer is
soon free and little is left to write when the last forward is done. A shard is committed by the thread that writes
its last rows.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from dflash.errors import DflashError
from dflash.extract.batches import Batch, batches_of, largest_batch, source_of
from dflash.extract.pending import OpenShard, Written
from dflash.extract.states import Extractor, Layout, Stage, fill_inputs
from dflash.extract.totals import Totals
from dflash.store import Store
from dflash.store.shard import ShardGivenUp

BUFFERS = {"cpu": 3, "cuda": 4}
WRITERS = {"cpu": 2, "cuda": 4}
SWITCH_SECONDS = 2e-4  # Python's own 5 ms would let a writer thread keep the one that launches kernels waiting
ALL_BAD_LIMIT = 16  # so many bad documents, and more bad than good: something is wrong with the target itself


class Pipeline:
    """Runs shards through an extractor. Use as a context; leaving it stops the writers and drops what is unfinished."""

    def __init__(
        self, store: Store, extractor: Extractor, layout: Layout, device: torch.device, worker: int, max_bad: float
    ) -> None:
        self.store, self.extractor, self.layout, self.device, self.worker = store, extractor, layout, device, worker
        # One bad document never stops a small run, unless none at all is allowed.
        self.max_bad = max(int(max_bad > 0), int(max_bad * sum(bucket.rows for bucket in store.buckets)))
        self.totals = Totals(overlapping=device.type == "cuda")
        made = store.index.entries.values()
        self.totals.bad, self.totals.rows = sum(len(entry["bad"]) for entry in made), sum(e["rows"] for e in made)
        self.device_name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        )
        self.on_progress: Callable[[int], None] = lambda tokens: None
        self.cuda = device.type == "cuda"
        self._free: queue.Queue[Stage] = queue.Queue()
        self._work: queue.Queue[tuple[Written, range] | None] = queue.Queue()
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
        self._hand_over(written)

    def _hand_over(self, written: Written) -> None:
        rows = len(written.batch.documents)
        written.parts = min(rows, len(self._threads))
        borders = [rows * i // written.parts for i in range(written.parts + 1)]
        for start, stop in pairwise(borders):
            self._work.put((written, range(start, stop)))

    def _run_on_gpu(self, written: Written) -> None:
        """Queue copies and forward without waiting for any of them."""
        buffer, slot = written.buffer, self._turn
        self._turn = 1 - self._turn
        stage, copied = self._stages[slot], self._copied[slot]
        rows, ceiling = buffer.input_ids.shape
        stage.shape(rows, ceiling, len(buffer.index))
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(copied)  # the stage's last content is on its way no more
        written.started, ended, written.ready = (torch.cuda.Event(enable_timing=i < 2) for i in range(3))
        written.previous_end = self._previous_end
        written.started.record(compute)
        for name in ("input_ids", "index", "lengths"):
            getattr(stage, name).copy_(getattr(buffer, name), non_blocking=True)
        self.extractor.run(stage)
        ended.record(compute)
        self._previous_end = ended
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
        while (work := self._work.get()) is not None:
            written, rows = work
            try:
                try:
                    complete = self._error is None and self._write(written, rows)
                finally:
                    self._give_back(written)
                if complete:  # the disk may take its time over it, and the buffer is of use meanwhile
                    self._commit(written.shard)
            except ShardGivenUp:
                pass  # the thread that could not write says why
            except BaseException as error:  # the first is kept for the main thread, which raises it
                self._error = self._error or error
            finally:
                self._work.task_done()

    def _give_back(self, written: Written) -> None:
        with self.totals.lock:
            written.parts -= 1
            last = not written.parts
        if last:
            self._free.put(written.buffer)

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
            with self.totals.lock:
                self._writing -= 1
                self._idle_since = time.monotonic()

    def _write(self, written: Written, rows: range) -> bool:
        """Write some rows of a batch; true when the shard has all of its own."""
        if written.ready is not None:
            written.ready.synchronize()
        batch, shard = written.batch, written.shard
        documents = batch.documents[rows.start : rows.stop]
        with self._at_work():
            bad = self._bad_rows(written, rows)
            lengths = written.buffer.lengths.numpy()[rows.start : rows.stop].astype(np.int32)
            for each in bad:
                lengths[each["row"] - batch.first - rows.start] = 0
            arrays = {name: array[rows.start : rows.stop] for name, array in written.buffer.numpy().items()}
            supervised, agreeing = self._agreement(documents, lengths, arrays)
            if "scale" in arrays:
                lost = written.buffer.lost[rows.start : rows.stop].numpy()
                place = slice(batch.first + rows.start, batch.first + rows.stop)
                shard.lost[place] = np.where(lengths[:, None, None] > 0, lost, 0)
            shard.writer.write(batch.first + rows.start, lengths, arrays)
        with self.totals.lock:
            self._count(lengths, len(bad), written if not rows.start else None)
            self.totals.supervised += supervised
            self.totals.agreeing += agreeing
            self._refuse_bad(bad)
            self.on_progress(int(lengths.sum()))
        return shard.done(len(documents), bad)

    def _commit(self, shard: OpenShard) -> None:
        with self._at_work():
            software = {"torch": torch.__version__, **transformers_version()}
            shard.writer.commit(shard.bad, self.device_name, software, shard.quantisation())
        shard.committed = True
        with self.totals.lock:
            self.totals.shards += 1

    def _count(self, lengths: np.ndarray, bad: int, first: Written | None) -> None:
        totals = self.totals
        totals.tokens += int(lengths.sum())
        totals.rows += len(lengths)
        totals.bad += bad
        if first is not None and first.previous_end is not None:  # once a batch
            totals.idle += max(0.0, first.previous_end.elapsed_time(first.started)) / 1000

    def _bad_rows(self, written: Written, rows: range) -> list[dict[str, Any]]:
        """One entry a row, with the first tap that is not finite."""
        finite, batch = written.buffer.finite.numpy(), written.batch
        found = []
        for row in rows:
            if not finite[row].all():
                tap = self.layout.checked[int(np.flatnonzero(~finite[row])[0])]
                source = source_of(self.store, batch.shard, batch.first + row)
                found.append({"row": batch.first + row, "source": source, "tap": tap})
        return found

    def _refuse_bad(self, bad: list[dict[str, Any]]) -> None:
        totals = self.totals
        if bad and (totals.bad > self.max_bad or (totals.bad > ALL_BAD_LIMIT and 2 * totals.bad > totals.rows)):
            raise DflashError(
                f"{totals.bad:,} documents gave states that are not finite, more than --max-bad allows (the last: "
                f"{bad[-1]['source']}, tap {bad[-1]['tap']}): try --dtype float32 or bfloat16, or raise --max-bad."
            )

    def _agreement(
        self, documents: tuple[int, ...], lengths: np.ndarray, arrays: dict[str, np.ndarray]
    ) -> tuple[int, int]:
        """Supervised tokens that have a label, and how many of them the target would have chosen itself."""
        supervised = agreeing = 0
        if "labels" in arrays:
            for row, document in enumerate(documents):
                tokens, mask = self.store.documents[document]
                counted = mask[1 : lengths[row]] == 1
                supervised += int(counted.sum())
                agreeing += int((counted & (arrays["labels"][row, 1 : lengths[row]] == tokens[1 : lengths[row]])).sum())
        return supervised, agreeing


def transformers_version() -> dict[str, str]:
    import transformers

    return {"transformers": transformers.__version__}
