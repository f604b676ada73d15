"""What a run folder and a store hold, as arrays and plain values for the charts and tables.

A run may still be going: the torn last line of metrics.jsonl is left out. Steps are averaged in at most `BINS` bins, so
that a chart of a million steps is as small as one of a thousand.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import toml_value
from dflash.errors import DflashError
from dflash.store import Store, inspect
from dflash.store.paths import STORE_JSON
from dflash.store.reader import OpenShard
from dflash.store.taps import TapFigures

BINS = 240
TAP_ROWS = 8  # of a store, from which the taps' RMS is taken
SERIES = ("loss", "lr", "tokens_per_second", "data_wait", "grad_norm")


@dataclass(frozen=True)
class Series:
    """A value over the steps, in bins: its mean, least and largest."""

    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Run:
    """A run folder."""

    name: str
    folder: Path
    series: dict[str, Series]  # by name of SERIES
    slots: list[Series]  # share of blocks accepted up to slot 1, 2, …, in training
    validations: list[dict[str, Any]]  # {step, acceptance_length {pooled, macro}, per_slot}
    evaluations: dict[str, dict[str, Any]]  # name of the set -> result of `dflash eval --json`
    config: dict[str, str]
    environment: dict[str, str]
    last: dict[str, Any]  # the newest step's line
    drafter: dict[str, Any]  # its shape, from the newest checkpoint; empty before the first one

    @property
    def best(self) -> dict[str, Any] | None:
        scored = [each for each in self.validations if each["acceptance_length"].get("pooled") is not None]
        return max(scored, key=lambda each: (each["acceptance_length"]["pooled"], each["step"]), default=None)


@dataclass(frozen=True)
class StoreView:
    """A store: what `dflash inspect-shard STORE` shows, every document's length, the taps of a few rows."""

    name: str
    about: dict[str, Any]
    lengths: np.ndarray
    taps: list[dict[str, Any]]


def read_sources(sources: tuple[str, ...]) -> tuple[list[Run], list[StoreView]]:
    """Runs and stores in the order given; a run's store comes along where it is still there."""
    runs: list[Run] = []
    stores: dict[Path, None] = {}
    for source in sources:
        path = Path(source)
        if (path / STORE_JSON).exists():
            stores[path.resolve()] = None
        elif (path / "metrics.jsonl").exists():
            runs.append(read_run(path))
            store = Path(tomllib.loads((path / "config.toml").read_text())["train"].get("store", ""))
            if (store / STORE_JSON).exists():
                stores[store.resolve()] = None
        else:
            raise DflashError(
                f"{path} is neither a run (metrics.jsonl) nor a store (store.json); name a folder that is."
            )
    return _apart(runs), [read_store(path) for path in stores]


def _apart(runs: list[Run]) -> list[Run]:
    """Names that tell the runs apart: the folder's own, or its whole path where two are the same."""
    names = [run.name for run in runs]
    return [Run(**run.__dict__ | {"name": str(run.folder)}) if names.count(run.name) > 1 else run for run in runs]


def read_run(folder: Path) -> Run:
    lines = _metrics(folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    numbers = np.array([line["step"] for line in steps], dtype=np.float64)
    width = max((len(line["accepted_slots"]) for line in steps), default=0)
    slots = np.array([line["accepted_slots"] for line in steps], dtype=np.float64).reshape(len(steps), width)
    states = (folder / "checkpoints").glob("step-*/state.json")
    newest = max(states, key=lambda path: (len(path.parent.name), path.parent.name), default=None)  # as numbers
    state = _json(newest) if newest else {}
    config = tomllib.loads((folder / "config.toml").read_text())["train"]
    return Run(
        name=folder.resolve().name,
        folder=folder,
        series={name: _binned(numbers, _column(steps, name)) for name in SERIES},
        slots=[_binned(numbers, slots[:, slot]) for slot in range(width)],
        validations=[line["validation"] for line in lines if "validation" in line],
        evaluations={path.stem: read_evaluation(path) for path in sorted((folder / "eval").glob("*.json"))},
        config={key: toml_value(value) for key, value in config.items()},
        environment={key: str(value) for key, value in _json(folder / "environment.json").items()},
        last=steps[-1] if steps else {},
        drafter=state.get("drafter", {}),
    )


def read_evaluation(path: Path) -> dict[str, Any]:
    """The result of `dflash eval --json`."""
    result = _json(path)
    length = result.get("acceptance_length")
    if not isinstance(length, dict) or not isinstance(length.get("pooled"), int | float):
        raise DflashError(f"{path} is no result of `dflash eval --json`; write it again or move it away.")
    return result


def read_store(root: Path) -> StoreView:
    store = Store.open(root)
    lengths = [rows.length for rows in store.plan.rows.values()]
    return StoreView(
        name=root.name,
        about=inspect(root),
        lengths=np.concatenate(lengths) if lengths else np.zeros(0, np.int32),
        taps=tap_figures(store),
    )


def tap_figures(store: Store) -> list[dict[str, Any]]:
    """RMS and faults of every tap over the first row of a few shards, spread over the store."""
    there = sorted(store.index.entries)
    figures = TapFigures(store)
    for shard in there[:: max(1, -(-len(there) // TAP_ROWS))]:
        opened = OpenShard(store, shard)
        n = opened.lengths[0]
        arrays = {
            name: np.empty((n, *spec.token_shape), spec.dtype)
            for name, spec in opened.specs.items()
            if name in ("hidden", "scale")
        }
        opened.read_into(0, arrays)
        figures.add(arrays)
    return figures.result() if there else []


def _metrics(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the torn last line of a run that is going on, or was killed
            break
    return lines


def _column(lines: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([line.get(name) for line in lines], dtype=np.float64)  # None becomes NaN


def _binned(step: np.ndarray, value: np.ndarray) -> Series:
    """Means over bins of equally many steps; what is not finite does not count, a bin without values is left out."""
    keep = np.isfinite(value)
    step, value = step[keep], value[keep]
    parts = min(BINS, len(step))
    if not parts:
        none = np.zeros(0)
        return Series(none, none, none, none)
    edges = np.linspace(0, len(step), parts, endpoint=False).astype(np.int64)
    count = np.diff(np.append(edges, len(step)))
    return Series(
        step=np.add.reduceat(step, edges) / count,
        mean=np.add.reduceat(value, edges) / count,
        low=np.minimum.reduceat(value, edges),
        high=np.maximum.reduceat(value, edges),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DflashError(f"{path} is not valid JSON ({error}); restore it, or move it away.") from None
    return value if isinstance(value, dict) else {}
