"""A stop asked for by Ctrl-C or SIGTERM: the unit in hand is finished or dropped, then `Interrupted` is raised."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dflash.errors import Interrupted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME = 5.0  # seconds in which a second SIGTERM is the first once more: Slurm and torchrun both send it to a process


class Stop:
    """Whether a stop was asked for. Loops look at it between two units of work."""

    signum: int = 0

    def __bool__(self) -> bool:
        return self.signum != 0

    def check(self, kept: str) -> None:
        """Raise `Interrupted` with what is kept, once a stop was asked for."""
        if self.signum:
            raise Interrupted(f"Stopped by {signal.Signals(self.signum).name}: {kept}", self.signum)


@contextmanager
def catch_stop() -> Iterator[Stop]:
    """Turn the first SIGINT or SIGTERM into a flag; a second one, of an impatient user, takes its ordinary way."""
    stop, first = Stop(), 0.0
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        if not stop:
            stop.signum, first = signum, time.monotonic()
        elif signum == signal.SIGINT or time.monotonic() - first > SAME:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    for number in STOP_SIGNALS:
        signal.signal(number, remember)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
