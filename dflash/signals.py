"""A stop asked for by Ctrl-C or SIGTERM: the unit in hand is finished or dropped, then `Interrupted` is raised."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dflash.errors import Interrupted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
    """Turn the first SIGINT or SIGTERM into a flag; a second one takes its ordinary, immediate way."""
    stop = Stop()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def remember(signum: int, frame: FrameType | None) -> None:
        stop.signum = signum
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        signal.signal(number, remember)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
