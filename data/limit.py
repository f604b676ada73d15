"""A time limit on Python code that may never end, such as a chat template's loops."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, late: Callable[[], Exception], call: Callable[[], Result]) -> Result:
    """`call()`, or `late()` raised out of it after `seconds`.

    By the alarm signal, which only a process's main thread can take: elsewhere there is no limit. A limit that is
    running already (a test's, say) goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()

    def ring(signum: int, frame: FrameType | None) -> None:
        raise late()

    handler = signal.signal(signal.SIGALRM, ring)
    outer, started = signal.setitimer(signal.ITIMER_REAL, seconds), time.monotonic()
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)
        if outer[0]:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer[0] - (time.monotonic() - started)), outer[1])
