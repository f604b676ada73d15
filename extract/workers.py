"""Who this process is among the workers of a store, where it runs, how it waits for worker 0, and how it stops."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from dflash.errors import DflashError, DiskFullError, Interrupted
from dflash.extract.config import parse_worker
from dflash.progress import say
from dflash.signals import STOP_SIGNALS, Stop
from dflash.store import Store
from dflash.store.lock import live_workers

POLL_SECONDS = 0.5
REMIND_SECONDS = 60.0


def this_worker(given: str | None) -> tuple[int, int]:
    """(number, how many): from --worker, else from torchrun's environment."""
    if given is not None:
        return parse_worker(given)
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(given: str | None, worker: int) -> torch.device:
    """A GPU where there is one: torchrun's local one, else the worker's number among those visible."""
    if given is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        local = int(os.environ.get("LOCAL_RANK", worker))
        return torch.device("cuda", local % torch.cuda.device_count())
    try:
        device = torch.device(given)
    except RuntimeError:
        raise DflashError(f"--device {given} is unknown: choose cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        raise DflashError(
            f"--device {given} is not there (GPUs that torch sees here: {torch.cuda.device_count()}); choose cpu or "
            "one of them."
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def wait_for(path: Path, what: str, root: Path, stop: Stop) -> None:
    """Wait until worker 0 has made `path`, saying so now and then; a worker 0 that was there and died is an error."""
    last, seen = float("-inf"), False
    while not path.exists():
        stop.check(f"this worker has written nothing to {root} yet; run the same command again.")
        alive = 0 in live_workers(root)
        if seen and not alive and not path.exists():
            raise DflashError(
                f"Worker 0 of store {root} ended before it had written {what}: start it again, then this one."
            )
        seen = alive
        if time.monotonic() - last >= REMIND_SECONDS:
            last = time.monotonic()
            say(f"Waiting for worker 0 to write {what} ({path}).")
        time.sleep(POLL_SECONDS)


def wait_for_others(store: Store, stop: Stop) -> None:
    """Under torchrun worker 0 speaks for all, so it waits until the others have ended, whether or not they are done."""
    others = live_workers(store.root, but=0)
    if others and store.missing():
        say(f"Waiting for {', '.join(f'worker {number}' for number in sorted(others))}.")
    while store.missing() and live_workers(store.root, but=0) and not stop:
        time.sleep(POLL_SECONDS)
        store.reload_index()


@contextmanager
def stopping_at_once(kept: str) -> Iterator[None]:
    """Leave at a signal without finishing anything, where nothing that is in hand is worth keeping."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(f"Stopped by {signal.Signals(signum).name}: {kept}", signum)

    before = {number: signal.signal(number, leave) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def disk_errors_named(root: Path) -> Iterator[None]:
    """A full or unwritable disk is the user's to mend, wherever it shows."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"No space is left for {where}: make room, then run the same command again.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DflashError(f"{where} cannot be written ({error.strerror}): give another --store.") from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise DflashError(f"{where} is not a folder: give another --store.") from error
        raise
