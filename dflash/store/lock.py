"""Who is writing: one file per worker in lock/, with a heartbeat, so that two extractions never fill one store at once.

A holder is dead at once when it ran on this machine and its process is gone, or the machine was started again since;
otherwise after 120 s without a heartbeat. The whole decision runs under flock on the folder, and the file itself is
made with O_EXCL, so that of two who find a dead holder only one takes its place.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dflash.errors import DflashError
from dflash.store.paths import LOCK, open_inside, read_inside

STALE_SECONDS = 120.0
HEARTBEAT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A lock file's content."""

    worker: int
    workers: int
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_start: int  # in clock ticks since boot: tells a process from a later one with the same pid
    run_id: str
    since: float
    heartbeat: float

    def is_alive(self, now: float) -> bool:
        here = this_machine()
        if self.host == here["host"]:
            if self.boot_id != here["boot_id"]:
                return False
            if self.pid_namespace == here["pid_namespace"]:
                return process_start(self.pid) == self.process_start
        return now - self.heartbeat < STALE_SECONDS

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, worker {self.worker} of {self.workers}, since {since}"


@dataclass
class Lock:
    """A lock that is held; `check` between two units of work tells when somebody has taken it over."""

    root: Path
    holder: Holder
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return lock_name(self.holder.worker)

    def is_ours(self) -> bool:
        found = read_holder(self.root, self.name)
        return isinstance(found, Holder) and found.run_id == self.holder.run_id

    def check(self) -> None:
        if not self.is_ours():
            raise DflashError(
                f"The claim on store {self.root} was lost ({LOCK}/{self.name} is not ours any more); start again."
            )

    def beat(self) -> None:
        """Refresh the heartbeat, unless the file has become somebody else's. A full disk or a lost network must not
        kill the writer; the next beat may work."""
        content = json.dumps(asdict(self.holder) | {"heartbeat": time.time()})
        sibling = self.root / LOCK / f".{self.name}.{self.holder.run_id}"
        with contextlib.suppress(OSError, DflashError), guard(self.root):
            if self.is_ours():
                sibling.write_text(content)
                os.replace(sibling, self.root / LOCK / self.name)

    def beat_for_ever(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self.beat()

    def release(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError), guard(self.root):
            if self.is_ours():
                (self.root / LOCK / self.name).unlink()


def lock_name(worker: int) -> str:
    return f"w{worker:03d}.json"


@contextlib.contextmanager
def acquire_lock(root: str | Path, worker: int, workers: int) -> Iterator[Lock]:
    """Hold worker `worker`'s claim on a store, refusing while a live holder has the same number or divides the work
    among another number of workers."""
    root, now = Path(root), time.time()
    holder = Holder(
        worker=worker, workers=workers, pid=os.getpid(), process_start=process_start(os.getpid()) or 0,
        run_id=secrets.token_hex(8), since=now, heartbeat=now, **this_machine(),
    )  # fmt: skip
    try:
        (root / LOCK).mkdir(parents=True, exist_ok=True)
        with guard(root):
            _refuse_or_clear(root, holder)
            _claim(root, holder)
    except OSError as error:
        raise DflashError(
            f"Store {root} cannot be written to ({os.strerror(error.errno or 0)}): give one that can be."
        ) from error
    lock = Lock(root, holder)
    threading.Thread(target=lock.beat_for_ever, name="dflash-heartbeat", daemon=True).start()
    try:
        yield lock
    finally:
        lock.release()


def _claim(root: Path, holder: Holder) -> None:
    flags, name = os.O_WRONLY | os.O_CREAT | os.O_EXCL, lock_name(holder.worker)
    try:
        descriptor = open_inside(root, (LOCK, name), flags)
    except FileExistsError:
        raise DflashError(
            f"Another process has just claimed worker {holder.worker} of store {root}; wait for it to end."
        ) from None
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(holder), file)


def _refuse_or_clear(root: Path, mine: Holder) -> None:
    """Raise when a live holder is in the way; remove the file of a dead one with our number."""
    now = time.time()
    for name, holder in holders(root).items():
        alive = holder.is_alive(now) if isinstance(holder, Holder) else now - holder < STALE_SECONDS
        ours = name == lock_name(mine.worker)
        if alive and not isinstance(holder, Holder):
            if ours:
                raise DflashError(
                    f"{LOCK}/{name} of store {root} is unreadable and younger than {STALE_SECONDS:.0f} s;"
                    " wait, or remove it."
                )
        elif alive and isinstance(holder, Holder) and (ours or holder.workers != mine.workers):
            raise DflashError(f"Store {root} is being written to by {holder}; wait for it to end, or stop it.")
        elif not alive:
            (root / LOCK / name).unlink(missing_ok=True)
            for half in (root / LOCK).glob(f".{name}.*"):  # of a heartbeat that was cut short
                half.unlink(missing_ok=True)


def live_workers(root: Path, but: int | None = None) -> set[int]:
    """Numbers of the workers that are alive; an unreadable young claim counts."""
    now, alive = time.time(), set()
    for name, holder in holders(root).items():
        if holder.is_alive(now) if isinstance(holder, Holder) else now - holder < STALE_SECONDS:
            alive.add(int(name[1:].partition(".")[0]))
    return alive - {but}


def holders(root: Path) -> dict[str, Holder | float]:
    """Per lock file its holder, or its age's start (mtime) where the content is unreadable."""
    try:
        names = sorted(os.listdir(root / LOCK))
    except FileNotFoundError:
        return {}
    found = {name: read_holder(root, name) for name in names if re.fullmatch(r"w[0-9]{3,6}\.json", name)}
    return {name: holder for name, holder in found.items() if holder is not None}


HOLDER_TYPES: dict[str, type] = {
    f.name: {"int": int, "str": str, "float": float}[f.type if isinstance(f.type, str) else f.type.__name__]
    for f in fields(Holder)
}


def read_holder(root: Path, name: str) -> Holder | float | None:
    """The holder in a lock file; its mtime when the content is not a holder; None when there is no file."""
    try:
        value: Any = json.loads(read_inside(root, (LOCK, name), limit=1 << 16))
        known = type(value) is dict and value.keys() == HOLDER_TYPES.keys()
        if known and all(type(value[key]) is kind for key, kind in HOLDER_TYPES.items()):
            return Holder(**value)
    except FileNotFoundError:
        return None
    except (DflashError, ValueError, RecursionError, OSError):
        pass
    try:
        return (root / LOCK / name).lstat().st_mtime
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def guard(root: Path) -> Iterator[None]:
    """One at a time in lock/. Where the filesystem knows no flock, O_EXCL alone has to do."""
    descriptor = open_inside(root, (LOCK,), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def this_machine() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _link("/proc/self/ns/pid"),
    }


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process (or it is a zombie).
    Where there is no /proc, 0 for a process that exists."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
