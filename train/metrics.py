"""Where a run's figures go: metrics.jsonl always, TensorBoard where its package is installed, wandb on request.

metrics.jsonl has a line a step and a line a validation, in order. The other two get the same figures under the same
names, with `/` between the levels and slots counted from 1: loss, accepted_slots/3,
validation/acceptance_length/pooled.
"""

import importlib.util
import json
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dflash.errors import DflashError
from dflash.files import errors_at, write_atomically

WANDB_ID = "wandb.id"  # in the run folder; its name alone would join two runs of the same name


class Sink(Protocol):
    """Takes figures by name."""

    def add(self, step: int, figures: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """metrics.jsonl and what else was asked for."""

    def __init__(self, run: Path, keep_until: int, sinks: list[Sink]) -> None:
        """Open for appending, after dropping torn lines and those of steps behind `keep_until`."""
        self.path, self.sinks = run / "metrics.jsonl", sinks
        kept = [line for line in _lines(self.path) if line["step"] <= keep_until]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = self.path.open("a")

    def write(self, line: dict[str, Any]) -> None:
        with errors_at(self.path):
            self.file.write(json.dumps(line) + "\n")
        for sink in self.sinks:
            sink.add(line["step"], dict(figures(line)))

    def sync(self) -> None:
        with errors_at(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        for sink in self.sinks:
            sink.close()


def step_line(about: dict[str, Any], outcome: list[float], times: dict[str, float]) -> dict[str, Any]:
    """The line of a step, of the tensor that its update left; what is not finite is null, as JSON has it."""
    norm, skipped, numerator, denominator, anchors, *slots = outcome
    n = len(slots) // 3
    scored, correct, prefix = slots[:n], slots[n : 2 * n], slots[2 * n :]
    return {
        **about,
        "loss": _finite(numerator / denominator) if denominator else None,
        "grad_norm": _finite(norm) if denominator else None,
        "skipped": bool(skipped),
        "anchors": int(anchors),
        "accuracy": sum(correct) / sum(scored) if sum(scored) else None,
        "accepted_slots": [round(p / s, 6) if s else None for p, s in zip(prefix, scored, strict=True)],
        **times,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line, by name; what is missing (null) has none."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in ("step", "slot"):  # the place of a figure, not one
                yield from figures(each, f"{name}/{key}".removeprefix("/"))
    elif isinstance(value, list):
        for number, each in enumerate(value, start=1):
            yield from figures(each, f"{name}/{number}")
    elif value is not None:
        yield name, float(value)


class TensorBoard:
    """RUN/tensorboard; figures of steps that come again are hidden by the newer ones."""

    def __init__(self, run: Path, keep_until: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=keep_until + 1 if keep_until else None)

    def add(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of the given project under the run folder's name; a resumed run goes on there, one begun anew does not."""

    def __init__(self, project: str, run: Path, settings: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise DflashError("--wandb needs the package wandb; install it with `pip install dflash[wandb]`.") from None
        path = run / WANDB_ID
        if not path.exists():
            write_atomically(path, secrets.token_hex(4))
        identity = path.read_text()
        self.run = wandb.init(project=project, name=run.name, id=identity, resume="allow", dir=run, config=settings)

    def add(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def close(self) -> None:
        self.run.finish()


def open_metrics(run: Path, keep_until: int, project: str | None, settings: dict[str, Any]) -> Metrics:
    """All that this run writes to."""
    sinks: list[Sink] = [Wandb(project, run, settings)] if project is not None else []
    if importlib.util.find_spec("tensorboard") is not None:
        sinks.append(TensorBoard(run, keep_until))
    return Metrics(run, keep_until, sinks)


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the torn last line of a killed run
            break
    return lines
