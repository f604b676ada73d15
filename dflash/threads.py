"""The number of CPU threads: set by us, since results depend on it and torchrun would set 1."""

import os
from pathlib import Path

import torch


def set_threads(given: int | None = None) -> int:
    """Use `given` threads, else the physical cores, which torchrun's processes on this machine share. Returns how
    many."""
    threads = given or max(1, physical_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    return threads


def physical_cores() -> int:
    """Cores that this process may use, counting a core's hardware threads once."""
    usable = os.sched_getaffinity(0)
    cores = set()
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(path.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))
