"""Progress of anything over two seconds: a bar on a terminal, a line every few seconds elsewhere; always stderr.

Lines come every five seconds at first and every minute in the end, so that a log of a week stays short. Under torchrun
one process of a machine speaks for the others.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_SECONDS = 5.0
RARER_AFTER = 100  # from five seconds times this on, a line comes whenever the time has grown by a hundredth …
AT_LEAST_EVERY = 60.0  # … and at least so often
BAR_WIDTH = 16  # a line of 80 columns has room for the figures, and for the ^C that a terminal echoes behind it


def speaks() -> bool:
    """Whether this process is the one of its machine that says things."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def say(message: str) -> None:
    """One line for people; stdout stays free for results."""
    if speaks():
        print(message, file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int | None, unit: str, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield `advance(n)`; shows how much of `total` is done, the rate in `unit`/s and the time left.

    `done` is what was there before; it counts for the amount and not for the rate.
    """
    if not speaks():
        yield lambda n: None
    elif sys.stderr.isatty():
        with _bar(label, total, unit, done) as advance:
            yield advance
    else:
        yield from _lines(label, total, unit, done)


@contextmanager
def _bar(label: str, total: int | None, unit: str, done: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        TextColumn("{task.fields[figures]}"),
    )
    start, before = time.monotonic(), done
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(label, total=total, completed=done, figures=_amount(done, total, unit))

        def advance(n: int) -> None:
            nonlocal done
            done += n
            bar.update(task, advance=n, figures=_figures(before, done, total, unit, time.monotonic() - start))

        yield advance


def _lines(label: str, total: int | None, unit: str, done: int) -> Iterator[Callable[[int], None]]:
    start = last = time.monotonic()
    before = done

    def advance(n: int) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= min(max(LINE_EVERY_SECONDS, (now - start) / RARER_AFTER), AT_LEAST_EVERY):
            last = now
            say(f"{label}: {_figures(before, done, total, unit, now - start)}")

    yield advance
    if last != start:  # a line was printed, so print the end as well
        say(f"{label}: {_figures(before, done, total, unit, time.monotonic() - start)}")


def _figures(before: int, done: int, total: int | None, unit: str, seconds: float) -> str:
    rate = (done - before) / max(seconds, 1e-9)
    text = f"{_amount(done, total, unit)}, {_speed(rate)}"
    if total is not None and before < done < total:
        text += f", {clock((total - done) / rate)} left"
    return text


def _amount(done: int, total: int | None, unit: str) -> str:
    return f"{done:,}" + (f" of {total:,}" if total is not None else "") + f" {unit}"


def _speed(rate: float) -> str:
    """A rate as people read it; what takes seconds each is said in seconds."""
    if 0 < rate < 1:
        return f"{1 / rate:,.1f} s each"
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"


def clock(seconds: float) -> str:
    """Seconds as people read them: `8 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
