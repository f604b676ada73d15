"""Progress of anything over two seconds: a bar on a terminal, a line every few seconds elsewhere; always stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_SECONDS = 5.0


def say(message: str) -> None:
    """One line for people; stdout stays free for results."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield `advance(n)`; shows how much of `total` is done, the rate in `unit`/s and the time left."""
    if sys.stderr.isatty():
        with _bar(label, total, unit) as advance:
            yield advance
    else:
        yield from _lines(label, total, unit)


@contextmanager
def _bar(label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.fields[whole]} " + unit),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    start = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(label, total=total, whole="?" if total is None else f"{total:,}", rate="")
        done = 0

        def advance(n: int) -> None:
            nonlocal done
            done += n
            rate = done / max(time.monotonic() - start, 1e-9)
            bar.update(task, advance=n, rate=_speed(rate))

        yield advance


def _lines(label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    start = last = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= LINE_EVERY_SECONDS:
            last = now
            say(_line(label, done, total, unit, now - start))

    yield advance
    if last != start:  # a line was printed, so print the end as well
        say(_line(label, done, total, unit, time.monotonic() - start))


def _line(label: str, done: int, total: int | None, unit: str, seconds: float) -> str:
    rate = done / max(seconds, 1e-9)
    text = f"{label}: {done:,}" + (f" of {total:,}" if total is not None else "") + f" {unit}, {_speed(rate)}"
    if total is not None and 0 < done < total:
        text += f", {clock((total - done) / rate)} left"
    return text


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
