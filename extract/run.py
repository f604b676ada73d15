"""The whole of stage 1: fingerprints, forecast, refuse or go on, the store, the missing shards, the summary.

Worker 0 tokenises and makes the store; the others wait for store.json. Shard number i of the extraction order belongs
to worker i mod n, so that any number of workers fills the same store without talking to one another.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash.errors import DflashError
from dflash.extract import calib, forecast, identity, workers
from dflash.extract.batches import largest_batch
from dflash.extract.config import ExtractConfig, parse_share
from dflash.extract.identity import DataFingerprint, DataSettings, Prepare
from dflash.extract.pipeline import Pipeline
from dflash.extract.states import Extractor, Layout
from dflash.extract.summary import summarise_run
from dflash.extract.totals import Totals
from dflash.progress import progress, say
from dflash.signals import Stop, catch_stop
from dflash.store import Prepared, Store, StoreMeta, acquire_lock, create_store, disk, recover
from dflash.store.paths import LAYOUT
from dflash.target import (
    TargetSpec,
    check_conventions,
    load_target,
    load_tokenizer,
    resolve_target,
    stop_token_ids,
    write_target_folder,
)
from dflash.threads import set_threads

PREPARING = ".preparing.partial"  # in the store's folder, so that what is made there is renamed into place
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command: its settings and what follows from them before anything is loaded."""

    config: ExtractConfig
    data: DataSettings
    prepare: Prepare
    data_fingerprint: DataFingerprint | None
    source: Path
    spec: TargetSpec
    tokenizer: Any
    root: Path
    worker: int
    workers: int
    device: torch.device


def extract(
    config: ExtractConfig, data_config: DataSettings, prepare: Prepare, data_fingerprint: DataFingerprint | None = None
) -> dict[str, Any]:
    """Make, or complete, the store; return what the summary and --json need.

    `prepare` and `data_fingerprint` are those of the data stage, handed in by the command line. Without the latter an
    existing store is compared by tokenising again.
    """
    started = time.monotonic()
    worker, count = workers.this_worker(config.worker)
    device = workers.choose_device(config.device, worker)
    source = resolve_target(config.target)
    spec = TargetSpec.read(source, config.target, config.trust_remote_code)
    identity.chosen_taps(config, spec)  # refuse before anything slow
    identity.check_labels(config, spec)
    has_tokenizer = any((source / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(source, data_config.chat_template, config.trust_remote_code) if has_tokenizer else None
    job = Job(
        config=config, data=data_config, prepare=prepare, data_fingerprint=data_fingerprint, source=source, spec=spec,
        tokenizer=tokenizer, root=Path(config.store), worker=worker, workers=count, device=device,
    )  # fmt: skip
    with workers.disk_errors_named(job.root), catch_stop() as stop:
        if config.dry_run:
            return dry_run(job)
        if worker > 0:
            workers.wait_for(job.root / "store.json", "the store", job.root, stop)
        with claimed(job) as lock:
            store = open_or_create(job)
            result = fill(job, store, stop, lock)
    return result | {"seconds": time.monotonic() - started}


def dry_run(job: Job) -> dict[str, Any]:
    """The forecast alone. What is prepared for it lies in a temporary folder and goes."""
    if (job.root / "store.json").exists():
        store = Store.open(job.root)
        compare(job, store)
        return forecast_store(job, store.meta, store.plan, remaining_share(store))
    with tempfile.TemporaryDirectory(prefix="dflash-dry-run-") as folder:
        prepared = prepare_documents(job, Path(folder))
        meta = new_meta(job, prepared)
        return forecast_store(job, meta, prepared.plan, 1.0)


def open_or_create(job: Job) -> Store:
    if (job.root / "store.json").exists():
        store = Store.open(job.root)
        compare(job, store)
        if job.worker == 0 and job.data.show:
            say(f"--show prints documents while a store is made; `dflash inspect-shard {job.root} --text` shows these.")
        recover(store, job.worker)
        if store.missing():
            done, total = len(store.shards()) - len(store.missing()), len(store.shards())
            say(f"Store {job.root}: {done} of {total} shards are there; making the others.")
            forecast_store(job, store.meta, store.plan, remaining_share(store))
        return store
    assert job.worker == 0, "the others wait for store.json"
    folder = job.root / PREPARING
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        prepared = prepare_documents(job, folder)
        meta = new_meta(job, prepared)
        forecast_store(job, meta, prepared.plan, 1.0)
        template = getattr(job.tokenizer, "chat_template", None)
        write_target_folder(job.source, folder / "target", template if isinstance(template, str) else None)
        return create_store(job.root, meta, prepared, folder / "target")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare_documents(job: Job, folder: Path) -> Prepared:
    folder.mkdir(parents=True, exist_ok=True)
    with workers.stopping_at_once(
        f"the documents of {job.root} were not complete, so nothing is kept; run the same command again."
    ):
        prepared: Prepared = job.prepare(
            job.data, job.tokenizer, folder, stop_token_ids(job.source), vocab_size=job.spec.vocab_size
        )
    return prepared


def new_meta(job: Job, prepared: Prepared) -> StoreMeta:
    meta = identity.wanted_meta(
        job.config, job.data, job.source, job.spec, job.tokenizer, prepared.fingerprints["data"]
    )
    tokens = job.config.forward_tokens or forecast.FORWARD_TOKENS[job.device.type]
    buckets = forecast.make_buckets(prepared.plan, tokens)
    return replace(meta, buckets=buckets, counts=meta.counts | prepared.counts)


def compare(job: Job, store: Store) -> None:
    """Refuse a store that was made from anything else. Only worker 0 reads the data again."""
    if job.worker > 0:
        data = store.meta.data
    elif job.data_fingerprint is not None:
        data = job.data_fingerprint(job.data.data)
    else:
        with tempfile.TemporaryDirectory(prefix="dflash-compare-") as folder:
            data = prepare_documents(job, Path(folder)).fingerprints["data"]
    wanted = identity.wanted_meta(job.config, job.data, job.source, job.spec, job.tokenizer, data)
    identity.check_resume(store.meta, wanted, job.root, job.config.forward_tokens)


def remaining_share(store: Store) -> float:
    """Share of the padded rows whose shards are missing."""
    rows = sum(len(store.bucket(name).rows_of(number)) for name, number in store.missing())
    return rows / max(1, sum(bucket.rows for bucket in store.buckets))


def forecast_store(job: Job, meta: StoreMeta, plan: Any, remaining: float) -> dict[str, Any]:
    """Say what the store will take, refuse what does not fit, return the forecast's JSON."""
    holes = disk.keeps_holes(job.root)
    per_bucket, total = forecast.store_bytes(meta, plan, job.source, job.spec, holes)
    still = int(total * remaining)
    speed = disk.write_speed(job.root) if job.worker == 0 else None
    result = forecast.summarise(meta, plan, total, per_bucket) | {
        "store": str(job.root), "free": disk.free_bytes(job.root), "bucket_bytes": per_bucket, "holes": holes,
        "write_speed": speed, "write_seconds": still / speed if speed else None,
    }  # fmt: skip
    if job.worker == 0:
        forecast.say_forecast(result, meta.storage)
        if not holes:
            say(f"  The filesystem of {job.root} keeps no holes, so padding takes room there as well.")
    forecast.check_room(result, still, job.config.budget, meta, plan, job.root)
    return result


@contextmanager
def claimed(job: Job) -> Iterator[Any]:
    """Hold this worker's claim on the store; a folder that we made and that got no store.json goes again."""
    existed = job.root.exists()
    refuse_strangers(job.root)
    job.root.parent.mkdir(parents=True, exist_ok=True)
    ours = False
    try:
        with acquire_lock(job.root, job.worker, job.workers) as lock:
            ours = True
            yield lock
    finally:
        if ours and not existed and job.worker == 0 and not (job.root / "store.json").exists():
            shutil.rmtree(job.root, ignore_errors=True)


def refuse_strangers(root: Path) -> None:
    """Leave a folder alone that is neither a store nor empty, before anything is written into it."""
    if not root.is_dir() or (root / "store.json").exists():
        return
    strange = sorted(path.name for path in root.iterdir() if path.name not in (*LAYOUT, PREPARING))
    if strange:
        raise DflashError(
            f"{root} holds {strange[0]!r}, which is no part of a store: give --store a new or an empty folder."
        )


def own_shards(store: Store, worker: int, count: int) -> list[tuple[str, int]]:
    """The missing shards of this worker: those whose place in the extraction order is its number modulo the count."""
    missing = set(store.missing())
    return [shard for i, shard in enumerate(store.shards()) if i % count == worker and shard in missing]


def fill(job: Job, store: Store, stop: Stop, lock: Any) -> dict[str, Any]:
    """Make this worker's missing shards."""
    shards = own_shards(store, job.worker, job.workers)
    totals = Totals()
    if not shards and not (job.worker == 0 and calib.is_missing(store)):
        what = (
            "is complete" if not store.missing() else f"has no missing shard for worker {job.worker} of {job.workers}"
        )
        say(f"Store {job.root} {what}; nothing to do.")
    else:
        totals = run_target(job, store, shards, stop, lock)
    if job.worker == 0 and job.workers > 1 and job.config.worker is None:
        workers.wait_for_others(store, stop)
    return summarise_run(store, totals) | {"worker": job.worker, "workers": job.workers}


def run_target(job: Job, store: Store, shards: list[tuple[str, int]], stop: Stop, lock: Any) -> Totals:
    threads = set_threads(job.config.threads)
    where = f"{torch.cuda.get_device_name(job.device)}" if job.device.type == "cuda" else f"CPU, {threads} threads"
    say(f"Loading {job.spec.name} ({store.meta.target['dtype']}) on {where}.")
    model = load_target(job.source, store.meta.target["dtype"], str(job.device), job.config.trust_remote_code)
    check_live(job, store, model)
    layout = Layout(
        taps=store.meta.taps, hidden_size=store.meta.hidden_size, labels=store.meta.labels, storage=store.meta.storage
    )
    rms = channel_rms(job, store, model, layout, stop)
    extractor = Extractor(model, job.spec, layout, largest_batch(store)[1], rms)
    pipeline = Pipeline(store, extractor, layout, job.device, job.worker, parse_share(job.config.max_bad))
    whole = 0
    for name, number in shards:
        rows = store.bucket(name).rows_of(number)
        whole += int(store.plan.rows[name].length[rows.start : rows.stop].sum(dtype="int64"))
    try:
        with progress("extracting", whole, "tokens") as advance, out_of_memory_is_named(job), pipeline.running():
            pipeline.on_progress = advance
            for shard in shards:
                lock.check()
                pipeline.shard(shard, lambda: bool(stop))
                if stop:
                    break
    finally:
        extractor.close()
    store.reload_index()
    there = len(store.shards()) - len(store.missing())
    stop.check(f"{there} of {len(store.shards())} shards are in {job.root}; the same command makes the others.")
    return pipeline.totals


@contextmanager
def out_of_memory_is_named(job: Job) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise DflashError(
            f"{job.spec.name} ran out of memory on {job.device} at this store's tokens a forward, which never change "
            "silently: extract into a new store with a smaller --forward-tokens."
        ) from None


def check_live(job: Job, store: Store, model: nn.Module) -> None:
    """On a short real input: the last hidden state and the frozen head give the logits that the target returns."""
    tokens = store.documents[0][0][:64]
    check_conventions(model, job.spec, torch.tensor(tokens.tolist(), device=job.device)[None])
    longest = int(store.documents.lengths().max())
    if longest > job.spec.max_position_embeddings:
        say(
            f"Warning: the longest document has {longest:,} tokens, but {job.spec.name} was made for "
            f"{job.spec.max_position_embeddings:,}; its states beyond that may be of no use."
        )


def channel_rms(job: Job, store: Store, model: nn.Module, layout: Layout, stop: Stop) -> torch.Tensor | None:
    """int8 stores divide by it. Worker 0 measures it once, before the first shard."""
    if layout.storage != "int8":
        return None
    path = calib.calib_path(store)
    if not path.exists() and job.worker == 0:
        say("Measuring the channels for int8.")
        calib.write_calib(store, calib.measure_rms(model, store, layout, *largest_batch(store)))
    workers.wait_for(path, "the channel RMS", job.root, stop)
    return calib.read_calib(store, job.device)
