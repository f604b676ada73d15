"""The processes of a run: torchrun's, or one alone; and the device of this one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dflash.errors import DflashError, cause
from dflash.threads import set_threads

LONGEST_WAIT = timedelta(hours=2)  # of a reduction: the first rank validates and saves while the others wait there


@dataclass(frozen=True)
class Ranks:
    """This process among those of torchrun; alone without it."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_reduce(self, *tensors: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.world > 1:
            try:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            except RuntimeError as error:  # what gloo and NCCL raise when a peer is gone
                raise DflashError(
                    f"Rank {self.rank} lost another rank ({cause(error)}); the same command resumes from the last "
                    "checkpoint."
                ) from None

    def total(self, value: int) -> int:
        """The sum of a number over the ranks. The host waits for it: with NCCL a reduction alone waits on the device
        only."""
        sum_ = torch.tensor(value, device="cuda" if torch.cuda.is_available() else "cpu")
        self.all_reduce(sum_)
        return int(sum_)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.total(0)

    def check_step(self, step: int, run: str) -> None:
        """Refuse ranks that found the run at different steps: its folder is not the same for all of them."""
        if self.total(step) != step * self.world:
            raise DflashError(
                f"Rank {self.rank} finds --run {run} at step {step}, others at another; every machine must see the "
                "same run folder, so put it on a shared file system."
            )

    def leave(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks() -> tuple[Ranks, torch.device]:
    """The ranks of this run and the device of this one."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda and local >= torch.cuda.device_count():
        raise DflashError(
            f"LOCAL_RANK is {local}, but this machine has {torch.cuda.device_count()} GPUs; give torchrun "
            "--nproc-per-node no more than it has."
        )
    if cuda:
        torch.cuda.set_device(device)
    else:
        set_threads()
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=LONGEST_WAIT)
    return Ranks(rank, world), device


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Meanwhile kernels whose result depends on the order of threads are refused, and none is chosen by its speed.

    A chosen kernel is what could differ between a run and its resumption: Inductor times some of its candidates.
    """
    if not wanted:
        yield
        return
    from torch._inductor import config as inductor

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # nothing here reads memory that it did not write
    try:
        with inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]
