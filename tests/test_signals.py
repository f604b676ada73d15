"""A stop by signal: noticed, not taken twice for one that launchers send twice, and impatience is respected."""

import os
import signal
import subprocess
import sys

import pytest

from dflash import signals
from dflash.errors import Interrupted
from dflash.signals import catch_stop

TWICE = """
import os, signal
from dflash import signals
signals.SAME = {same}
with signals.catch_stop() as stop:
    os.kill(os.getpid(), signal.{first})
    assert stop
    os.kill(os.getpid(), signal.{second})
    print("still there", flush=True)
"""


def test_the_first_signal_is_a_flag_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with catch_stop() as stop:
        stop.check("nothing was asked")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="Stopped by SIGTERM: all is kept"):
            stop.check("all is kept")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_that_two_launchers_send_is_one_stop() -> None:
    """Slurm signals every process of a step, torchrun its own once more."""
    assert signals.SAME > 1
    with catch_stop() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("SIGINT", "SIGINT", 5.0), ("SIGTERM", "SIGINT", 5.0), ("SIGTERM", "SIGTERM", 0.0)],
)
def test_a_second_signal_of_an_impatient_user_ends_the_process_at_once(first: str, second: str, same: float) -> None:
    code = TWICE.format(first=first, second=second, same=same)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == -getattr(signal, second)
    assert "still there" not in ended.stdout
