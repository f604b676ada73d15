"""metrics.jsonl and what repeats it under the same names."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from helpers_store import make_store
from test_train_run import config

from dflash.errors import DflashError
from dflash.train.metrics import Metrics, figures, open_metrics
from dflash.train.run import train

LINE = {
    "step": 3, "lr": 0.1, "loss": None, "skipped": True, "accepted_slots": [0.5, None],
    "validation": {"step": 3, "acceptance_length": {"pooled": 1.5}, "per_slot": [{"slot": 1, "acceptance": 0.25}]},
}  # fmt: skip
NAMES = {
    "lr": 0.1, "skipped": 1.0, "accepted_slots/1": 0.5, "validation/acceptance_length/pooled": 1.5,
    "validation/per_slot/1/acceptance": 0.25,
}  # fmt: skip


def test_the_names_of_figures_are_the_keys_of_the_lines() -> None:
    assert dict(figures(LINE)) == NAMES


def test_lines_behind_a_checkpoint_and_torn_ones_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics = Metrics(tmp_path, keep_until=2, sinks=[])
    metrics.write({"step": 3, "loss": 1.0})
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0}]


def expected(run: Path) -> dict[str, list[tuple[int, float]]]:
    """metrics.jsonl, by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for name, value in figures(line):
            found.setdefault(name, []).append((line["step"], value))
    return found


def test_tensorboard_reads_what_metrics_jsonl_has_also_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    # Files of one second are read in the order of their names: a process's tenth writer comes before its ninth.
    files = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(files, "_global_uid", files.AtomicCounter(0))
    make_store(tmp_path / "store")
    run = tmp_path / "run"
    train(config(tmp_path / "store", run, steps=6, eval_every=3))
    newest = run / "checkpoints" / "step-000006"
    newest.rename(newest.with_name(".step-000006.partial"))
    train(config(tmp_path / "store", run, steps=6, eval_every=3))  # steps 4 to 6 come again
    read = accumulator.EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    wanted = expected(run)
    assert "loss" in wanted
    assert set(read.Tags()["scalars"]) == set(wanted)
    for name, values in wanted.items():
        shown = [(event.step, event.value) for event in read.Scalars(name)]
        assert [step for step, _ in shown] == [step for step, _ in values], name
        assert [value for _, value in shown] == pytest.approx([value for _, value in values], rel=1e-6), name


def fake_wandb(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[dict[str, list[tuple[int, float]]], list[dict[str, Any]]]:
    """What is logged, by name, and with what each run was begun."""
    logged: dict[str, list[tuple[int, float]]] = {}
    begun: list[dict[str, Any]] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                logged.setdefault(name, []).append((step, value))

        def finish(self) -> None:
            begun[-1]["finished"] = True

    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: begun.append(settings) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return logged, begun


def test_wandb_gets_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged, begun = fake_wandb(monkeypatch)
    make_store(tmp_path / "store", documents=12)
    train(config(tmp_path / "store", tmp_path / "run", steps=2, wandb="drafters"))
    assert begun[0]["project"] == "drafters"
    assert begun[0]["config"]["block_size"] == 4
    assert begun[0]["finished"]
    assert logged == expected(tmp_path / "run")


def test_wandb_goes_on_with_a_resumed_run_and_never_joins_two_runs_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, begun = fake_wandb(monkeypatch)
    for folder in ("a", "a", "b"):
        (tmp_path / folder / "run").mkdir(parents=True, exist_ok=True)
        open_metrics(tmp_path / folder / "run", 0, "drafters", {}).close()
    first, again, other = (settings["id"] for settings in begun)
    assert first == again
    assert first != other
    assert {settings["name"] for settings in begun} == {"run"}


def test_wandb_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    make_store(tmp_path / "store", documents=12)
    with pytest.raises(DflashError, match=r"pip install dflash\[wandb\]"):
        train(config(tmp_path / "store", tmp_path / "run", wandb="drafters"))
