"""Where a run stands, and how it is kept: what a resumption must share, loading and saving a checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import as_dict, to_toml
from dflash.errors import DflashError
from dflash.files import write_atomically
from dflash.train import folder as run_folder
from dflash.train.origin import origin_of
from dflash.train.plan import freeze_rows
from dflash.train.setup import Setup, token_ids

# What may differ between a run and its resumption: where things lie, how often it looks and how it goes about it, not
# what it computes.
FREE_TO_CHANGE = (
    "store", "run", "target", "eval_every", "save_every", "keep", "io", "memory", "wandb", "dry_run",
)  # fmt: skip


@dataclass
class Place:
    """Where a run stands: the steps done, how many of their updates were skipped, and the last figures."""

    step: int = 0
    skipped: int = 0
    best: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    line: dict[str, Any] | None = None


def identity(setup: Setup) -> dict[str, Any]:
    """What a resumption must share with the run."""
    plan, meta = setup.plan, setup.store.meta
    return {
        "store": {"plan": meta.fingerprints["plan"], "fingerprint": setup.store.fingerprint},
        "settings": {name: value for name, value in as_dict(setup.config).items() if name not in FREE_TO_CHANGE},
        "derived": {
            "steps": plan.steps,
            "micros_per_step": plan.micros_per_step,
            "anchors": {bucket.name: bucket.anchors for bucket in plan.order.buckets},
        },
    }


def begin(setup: Setup) -> None:
    """What stands in the run folder before the first step."""
    folder = Path(setup.config.run)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.toml", to_toml("train", setup.config))
    freeze_rows(setup.config, setup.rows)
    write_atomically(folder / "environment.json", json.dumps(run_folder.environment(setup.device), indent=1) + "\n")


def load(setup: Setup, checkpoint: run_folder.Checkpoint) -> Place:
    """Copy a checkpoint into the tensors of the run, whose addresses stay."""
    difference = run_folder.first_difference(checkpoint.state["identity"], identity(setup))
    if difference is not None:
        name, old, new = difference
        raise DflashError(
            f"{setup.config.run} was begun with {name} = {old}, now it is {new}; use the old value, or another --run."
        )
    for file, ours in _tensors(setup).items():
        theirs = checkpoint.tensors(file)
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])
    setup.parts.optimiser.flat.refresh()
    state = checkpoint.state
    return Place(checkpoint.step, state.get("skipped", 0), state["best"], state["validation"], state["line"])


def save(setup: Setup, place: Place) -> None:
    run, store = Path(setup.config.run), setup.store
    state = {
        "identity": identity(setup),
        "drafter": setup.shape.__dict__,
        "target": store.meta.target,
        "origin": origin_of(store).to_json(),
        "counts": store.meta.counts,
        "token_ids": token_ids(store),
        "store": str(Path(setup.config.store).resolve()),
        "skipped": place.skipped,
        "best": place.best,
        "validation": place.validation,
        "line": place.line,
    }
    run_folder.save_checkpoint(run, place.step, _tensors(setup), state)
    run_folder.prune(run, setup.config.keep, place.best["step"] if place.best else None)


def _tensors(setup: Setup) -> dict[str, dict[str, Any]]:
    """By file, the run's own tensors under their names."""
    optimiser = setup.parts.optimiser
    flat = optimiser.flat
    files = {"model": flat.views(flat.master), "optimizer": optimiser.state()}
    return files | ({"ema": flat.views(optimiser.ema)} if optimiser.ema is not None else {})
