"""Progress: a bar on a terminal, few lines in a log file, one process of a machine; and Ctrl-C says what is kept."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_store import make_store

from dflash import progress as module
from dflash.progress import progress, say


class Time:
    """A clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def lines_of(hours: float, capsys: pytest.CaptureFixture[str], clock: Time) -> list[str]:
    total = round(hours * 3600)
    with progress("Training", total, "steps") as advance:
        for _ in range(total):
            clock.now += 1
            advance(1)
    return capsys.readouterr().err.splitlines()


def test_a_log_file_gets_a_line_every_five_seconds_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], clock: Time
) -> None:
    lines = lines_of(1 / 60, capsys, clock)
    assert len(lines) == 13  # one every five seconds, and the end
    assert lines[0] == "Training: 5 of 60 steps, 1.0/s, 55 s left"
    assert lines[-1] == "Training: 60 of 60 steps, 1.0/s"


def test_a_day_floods_no_log_file_and_is_never_silent_for_long(capsys: pytest.CaptureFixture[str], clock: Time) -> None:
    lines = lines_of(24, capsys, clock)
    assert len(lines) < 1800
    done = [int(line.split()[1].replace(",", "")) for line in lines]
    assert max(after - before for before, after in zip([0, *done], done, strict=False)) <= 61


def test_what_takes_a_moment_prints_nothing(capsys: pytest.CaptureFixture[str], clock: Time) -> None:
    with progress("Reading", 3, "files") as advance:
        clock.now += 1
        advance(3)
    assert capsys.readouterr().err == ""


def test_what_was_there_before_counts_for_the_amount_and_not_for_the_rate(
    capsys: pytest.CaptureFixture[str], clock: Time
) -> None:
    with progress("Training", 100, "steps", done=80) as advance:
        clock.now += 10
        advance(5)
    assert capsys.readouterr().err.splitlines()[0] == "Training: 85 of 100 steps, 2.0 s each, 30 s left"


def test_one_process_of_a_machine_speaks(
    capsys: pytest.CaptureFixture[str], clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, said in (("0", ["Warning: x"]), ("1", [])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        say("Warning: x")
        assert capsys.readouterr().err.splitlines() == said
    assert lines_of(1 / 60, capsys, clock) == []


@pytest.mark.parametrize(
    ("rate", "text"), [(0.25, "4.0 s each"), (3.14159, "3.1/s"), (1234.5, "1,234/s"), (0.0, "0.0/s")]
)
def test_rates_are_written_as_people_read_them(rate: float, text: str) -> None:
    assert module._speed(rate) == text


def in_terminal(command: list[str], look: Callable[[str], bytes | None]) -> tuple[int, str]:
    """Run a command in a terminal of 80 columns; `look` sees what it has printed and may answer with keys."""
    parent, child = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C goes to it
    )  # fmt: skip
    os.close(child)
    text = ""
    try:
        while True:
            try:
                text += os.read(parent, 65536).decode(errors="replace")
            except OSError:  # the terminal's last user has gone
                break
            if keys := look(text):
                os.write(parent, keys)
    finally:
        os.close(parent)
    return process.wait(timeout=60), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_terminal_shows_a_bar_and_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    make_store(tmp_path / "store", documents=12, held_out=3)
    words = f"--store {tmp_path}/store --run {tmp_path}/run --num-layers 1 --block-size 4 --steps 100000 --mask-token 7"
    pressed: list[float] = []

    def look(text: str) -> bytes | None:
        if pressed or not re.search(r"[1-9]\d* of 100,000 steps, [\d.]+(/s| s each), [\dhmins ]+ left", text):
            return None
        pressed.append(time.monotonic())
        return b"\x03"

    code, text = in_terminal([sys.executable, "-m", "dflash", "train", *words.split()], look)
    assert pressed, text
    assert code == 130
    assert "━" in text
    last = " ".join(text[-300:].split())
    kept = re.search(r"Stopped by SIGINT: step (\d+) of 100000 is kept in .*; the same command resumes", last)
    assert kept, text[-500:]
    assert (tmp_path / "run" / "checkpoints" / f"step-{int(kept[1]):06d}").is_dir()
    assert "Traceback" not in text
    bars = [line for part in text.split("\n") for line in part.split("\r") if "━" in line]
    assert max(map(len, bars)) <= 80
