"""Work on a GPU by name: recorded once as a CUDA graph and replayed without Python, all in one memory pool.

What the work reads and writes between replays lives outside the pool at fixed addresses; what a graph leaves inside
the pool may be overwritten by the next. Warm-up and capture run on one side stream, or a backward's gradients would
belong to another stream. A failed capture is fatal: the pool of a half-captured graph cannot be trusted.
"""

import gc
import time
from collections.abc import Callable

import torch

WARM_UP = 3


class Graphs:
    """Work by name: captured, or kept as plain functions."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.plain: dict[str, Callable[[], None]] = {}
        self.seconds: dict[str, float] = {}
        self.measuring = False  # each peak for itself, which resets torch's own
        self.peaks: dict[str, int] = {}  # most bytes allocated until it was warm
        self.reserved: dict[str, int] = {}  # bytes behind its capture

    def prepare(self, name: str, work: Callable[[], None], capture: bool, warm_up: int = WARM_UP) -> None:
        """Warm `work` up (which compiles it) and record it. It reads and writes static tensors only."""
        self.warm_up(name, work, warm_up)
        self.keep(name, work, capture)

    def warm_up(self, name: str, work: Callable[[], None], times: int = WARM_UP) -> None:
        start = time.perf_counter()
        if self.measuring:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(times):
                work()
        self.stream.synchronize()
        self.peaks[name] = torch.cuda.max_memory_allocated(self.device)
        self.seconds[name] = time.perf_counter() - start

    def keep(self, name: str, work: Callable[[], None], capture: bool) -> None:
        """Record work that is warm, or keep it as it is."""
        start = time.perf_counter()
        if capture:
            gc.collect()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                work()
            self.graphs[name] = graph
        else:
            self.plain[name] = work
        torch.cuda.synchronize(self.device)
        self.reserved[name] = torch.cuda.memory_reserved(self.device)
        self.seconds[name] += time.perf_counter() - start

    def run(self, name: str) -> None:
        """Replay on the current stream; uncaptured work runs on the side stream, where its gradients belong."""
        if name in self.graphs:
            self.graphs[name].replay()
            return
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.plain[name]()
        current.wait_stream(self.stream)

    def close(self) -> None:
        """Graphs go before the process group, or NCCL hangs."""
        torch.cuda.synchronize(self.device)
        self.graphs.clear()
        self.plain.clear()


def waits_for_the_host(work: Callable[[], None]) -> bool:
    """Whether `work` synchronises with the host, which no graph can; it is run once to see."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False
