"""Look at a machine before a long run does: libraries, GPU, compilation, host memory, disk; about ten seconds.

Everything is tried for real and in small: a function is compiled and captured, pinned memory is taken and copied, a
file is written, read past the page cache and has a hole. `problem` is what will stop a stage, `note` what it will do
without or do slowly.
"""

import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dflash.doctor.config import DoctorConfig
from dflash.errors import DflashError
from dflash.progress import say
from dflash.store import disk
from dflash.store.direct import aligned

OK, NOTE, PROBLEM = "ok", "note", "problem"
AMPERE, HOPPER = (8, 0), (9, 0)
COPY_BYTES = 256 << 20
READ_BYTES = 64 << 20
PIECE = 4 << 20
SLOW_DISK = 0.5e9  # bytes a second: a gigabyte of states is some 25,000 tokens of an 8B target
FEW_FILES = 1024


@dataclass(frozen=True)
class Check:
    """One line of the screen."""

    name: str
    state: str  # ok | note | problem
    found: str
    advice: str = ""


def doctor(config: DoctorConfig) -> dict[str, Any]:
    """{ok, seconds, path, checks [{name, state, found, advice}]}; ok unless something is a problem."""
    start = time.monotonic()
    checks: list[Check] = []
    path = Path(config.path)
    if not path.is_dir():
        raise DflashError(f"{path} is no folder; name one on the disk that will hold the store.")
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("libraries", libraries), ("processor", processor), ("GPU", gpu), ("disk", lambda: storage(path)),
    ]  # fmt: skip
    for name, part in parts:
        say(f"Looking at {name} …")
        checks += part()
    return {
        "ok": all(check.state != PROBLEM for check in checks), "seconds": time.monotonic() - start,
        "path": str(path.absolute()), "checks": [asdict(check) for check in checks],
    }  # fmt: skip


# --- libraries


def libraries() -> Iterator[Check]:
    """The versions that dflash itself asks for, and what its extras would add."""
    from packaging.requirements import Requirement  # transformers needs it too

    yield Check("Python", OK, platform.python_version())
    missing: dict[str, list[str]] = {}
    for requirement in map(Requirement, metadata.requires("dflash") or ()):
        extra = _extra(requirement)
        found = _version(requirement.name)
        if extra == "dev" or (extra is None and requirement.marker and not requirement.marker.evaluate()):
            continue
        if found is None and extra is not None:
            missing.setdefault(extra, []).append(requirement.name)
        elif found is None or not requirement.specifier.contains(found, prereleases=True):
            needed, install = str(requirement.specifier), f"pip install '{requirement.name}{requirement.specifier}'"
            yield Check(requirement.name, PROBLEM, found or "missing", f"dflash needs {needed}: {install}")
        elif extra is None:
            yield Check(requirement.name, OK, found)
    if missing:
        names = "; ".join(f"{', '.join(names)} (dflash[{extra}])" for extra, names in sorted(missing.items()))
        yield Check("extras", NOTE, f"not installed: {names}", "none is needed by the two stages")


def _extra(requirement: Any) -> str | None:
    """The extra that a requirement belongs to."""
    return next(iter(str(requirement.marker).split('extra == "')[1:]), "").split('"')[0] or None


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


# --- processor and host memory


def processor() -> Iterator[Check]:
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count()
    yield Check("cores", OK, f"{cores} of {all_cores}" if cores != all_cores else str(cores))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check("host memory", OK, f"{total / 1e9:.1f} GB")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 1e6:.1f} MB"
    yield Check("locked memory", OK, f"{text} (ulimit -l)")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files < FEW_FILES
    yield Check("open files", NOTE if few else OK, f"{files:,} (ulimit -n)", f"ulimit -n {FEW_FILES}" if few else "")


# --- GPU


def gpu() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees none"
        advice = "both stages run on the CPU, by the same code without capture; a real target wants a GPU"
        yield Check("GPU", NOTE, f"none ({built})", advice)
        return
    for index in range(torch.cuda.device_count()):
        yield card(index)
    yield from compilation()
    yield from pinned_memory()


def card(index: int) -> Check:
    capability = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    kinds = "bf16 and fp8" if capability >= HOPPER else "bf16" if capability >= AMPERE else "no bf16"
    found = f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, {kinds}, CUDA {torch.version.cuda}"
    if capability < AMPERE:
        return Check(f"GPU {index}", PROBLEM, found, "training is written for Ampere and newer; use --device cpu")
    busy = free < total / 2
    return Check(f"GPU {index}", NOTE if busy else OK, found, "something else holds its memory" if busy else "")


def compilation() -> Iterator[Check]:
    """One small function compiled and captured: what every bucket of a run does with a large one."""
    try:
        start = time.monotonic()
        compiled = torch.compile(
            lambda x: (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).sin(), dynamic=False
        )
        x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            expected = compiled(x)
        stream.synchronize()
        taken, graph = time.monotonic() - start, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = compiled(x)
        graph.replay()
        torch.cuda.synchronize()
        same = torch.equal(out, expected)
    except Exception as error:  # whatever a compiler, a driver or a graph can raise is what is looked for here
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        yield Check("compile and capture", PROBLEM, said, "train with --graph off, or mend the CUDA toolchain")
        return
    if not same:
        yield Check(
            "compile and capture", PROBLEM, "a replay gave other numbers", "update the driver, or use --graph off"
        )
        return
    yield Check("compile and capture", OK, f"{taken:.1f} s for a small function, its replay gives the same numbers")


def pinned_memory() -> Iterator[Check]:
    """What a copy to the card costs from pinned and from ordinary memory."""
    rates = {}
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    for name, pin in (("pinned", True), ("pageable", False)):
        try:
            source = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=pin)
        except RuntimeError as error:
            said = str(error).splitlines()[0][:100]
            yield Check("pinned memory", PROBLEM, said, "free host memory, or raise the container's limit")
            return
        target.copy_(source)
        torch.cuda.synchronize()
        start = time.monotonic()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates[name] = COPY_BYTES / (time.monotonic() - start) / 1e9
    yield Check("copies to the GPU", OK, ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in rates.items()))


# --- disk


def storage(path: Path) -> Iterator[Check]:
    free = disk.free_bytes(path)
    yield Check("free space", OK, f"{free / 1e9:,.1f} GB in {path.absolute()}")
    try:
        with tempfile.NamedTemporaryFile(dir=path) as file:
            content = os.urandom(1 << 20) * (READ_BYTES >> 20)
            if free < 2 * len(content):
                yield Check("disk speed", PROBLEM, "too little space to try it", "make room, or name another folder")
                return
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            read = direct_read(Path(file.name))
    except OSError as error:
        yield Check("disk", PROBLEM, f"cannot be written ({error.strerror})", "name a folder that can be, or make room")
        return
    speed = disk.write_speed(path)
    if speed is not None:
        slow = speed < SLOW_DISK
        advice = "extraction will wait for it; prefer a local NVMe" if slow else ""
        yield Check("durable writes", NOTE if slow else OK, f"{speed / 1e9:.2f} GB/s", advice)
    if read is None:
        yield Check("O_DIRECT", NOTE, "not on this filesystem", "`train --io mmap` (the default) does not need it")
    else:
        yield Check("O_DIRECT", OK, f"reads at {read / 1e9:.2f} GB/s past the page cache")
    holes = disk.keeps_holes(path)
    advice = "" if holes else "a store takes its padding's room as well; `extract --dry-run` counts it"
    yield Check("holes in files", OK if holes else NOTE, "kept" if holes else "not kept on this filesystem", advice)


def direct_read(path: Path) -> float | None:
    """Bytes a second of one thread that reads a file past the page cache; None where the filesystem refuses."""
    buffer, start, done = aligned(PIECE), time.monotonic(), 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        while n := os.preadv(descriptor, [buffer.data], done):
            done += n
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return done / (time.monotonic() - start)
