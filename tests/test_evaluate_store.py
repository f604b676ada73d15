"""`dflash eval --store`: without a target the served figure, where the stored answers are the target's own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_tasks import prompts

from dflash.checkpoint import Origin, read_config, read_drafter, write_drafter
from dflash.cli import cli
from dflash.errors import DflashError
from dflash.evaluate.config import EvalConfig
from dflash.evaluate.stored import evaluate_store, label_agreement
from dflash.simulate import held_out_rows
from dflash.store import Store


def dflash(*words: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> Path:
    """tiny-chat's greedy answers, their store, a drafter trained for a moment, and the held-out prompts."""
    folder = tmp_path_factory.mktemp("simulated")
    asked = prompts(100, seed=0)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
    dflash(
        "regenerate", "--data", folder / "prompts.jsonl", "--target", tiny_chat, "--out", folder / "answers.jsonl",
        "--max-new-tokens", "100", "--batch-size", "100",
    )  # fmt: skip
    dflash(
        "extract", "--target", tiny_chat, "--data", folder / "answers.jsonl", "--store", folder / "store",
        "--num-taps", "3", "--buckets", "128,192", "--holdout", "0.1",
    )  # fmt: skip
    dflash(
        "train", "--store", folder / "store", "--run", folder / "run", "--steps", "120", "--num-layers", "1",
        "--block-size", "6", "--lr", "3e-3", "--gamma", "2", "--clip", "0.3", "--token-budget", "2048",
        "--anchors", "256", "--anchor-density", "1", "--eval-every", "120",
    )  # fmt: skip
    dflash("export", folder / "run", "--out", folder / "drafter", "--dtype", "float32", "--target", tiny_chat)
    dflash("export", folder / "run" / "checkpoints" / "step-000000", "--out", folder / "untrained")
    store = Store.open(folder / "store")
    lines = (folder / "answers.jsonl").read_text().splitlines()
    held_out = [lines[int(store.plan.rows[bucket].line[row]) - 1] for bucket, row in held_out_rows(store)]
    assert len(held_out) >= 8
    (folder / "held_out.jsonl").write_text("".join(f"{line}\n" for line in held_out))
    return folder


def test_it_predicts_the_served_figure_within_five_percent(work: Path, tiny_chat: Path) -> None:
    simulated = dflash("eval", "--drafter", work / "drafter", "--store", work / "store")
    served = dflash(
        "eval", "--drafter", work / "drafter", "--target", tiny_chat, "--prompts", work / "held_out.jsonl",
        "--max-new-tokens", "100",
    )  # fmt: skip
    assert served["lossless"] is True
    assert served["acceptance_length"]["pooled"] > 1.25, "the drafter has learnt too little to tell anything"
    for name in ("pooled", "macro"):
        assert simulated["acceptance_length"][name] == pytest.approx(served["acceptance_length"][name], rel=0.05)
    for ours, theirs in zip(simulated["per_slot"], served["per_slot"], strict=True):
        assert ours["acceptance"] == pytest.approx(theirs["acceptance"], abs=0.05)
    assert simulated["answers"] == served["answers"]
    assert simulated["label_agreement"] > 0.99
    assert (simulated["simulated"], simulated["indicative"]) == (True, False)


def test_it_predicts_the_served_figure_of_sliding_layers_too(work: Path, tiny_chat: Path) -> None:
    """Training's way of windows and decoding's are two pieces of code; here they must come to the same."""
    shutil.copytree(work / "drafter", work / "sliding")
    document = json.loads((work / "sliding" / "config.json").read_text())
    document |= {"layer_types": ["sliding_attention"], "sliding_window": 7, "use_sliding_window": True}
    (work / "sliding" / "config.json").write_text(json.dumps(document))
    simulated, full = (
        dflash("eval", "--drafter", work / name, "--store", work / "store") for name in ("sliding", "drafter")
    )
    served = dflash(
        "eval", "--drafter", work / "sliding", "--target", tiny_chat, "--prompts", work / "held_out.jsonl",
        "--max-new-tokens", "100",
    )  # fmt: skip
    assert simulated["histogram"] != full["histogram"], "the window must matter for the test to mean something"
    assert served["lossless"] is True
    for ours, theirs in zip(simulated["histogram"], served["histogram"], strict=True):
        assert ours["cycles"] == pytest.approx(theirs["cycles"], abs=3)


def test_it_is_the_validation_of_training(work: Path) -> None:
    state = json.loads((work / "run" / "checkpoints" / "step-000120" / "state.json").read_text())
    simulated = dflash("eval", "--drafter", work / "drafter", "--store", work / "store")
    assert simulated["acceptance_length"] == state["validation"]["acceptance_length"]
    assert simulated["per_slot"] == state["validation"]["per_slot"]


def test_two_drafters_are_paired_on_the_same_rows(work: Path) -> None:
    result = dflash(
        "eval", "--drafter", work / "drafter", "--compare", work / "untrained", "--store", work / "store"
    )  # fmt: skip
    difference = result["compare"]["difference"]
    gap = result["acceptance_length"]["pooled"] - result["compare"]["acceptance_length"]["pooled"]
    assert difference["pooled"] == pytest.approx(gap)
    assert 0 < difference["pooled_ci"][0] < gap < difference["pooled_ci"][1]


def test_the_screen_says_what_kind_of_figure_it_is(work: Path) -> None:
    words = ["eval", "--drafter", str(work / "drafter"), "--store", str(work / "store"), "--limit", "4"]
    screen = CliRunner().invoke(cli, words).stdout
    assert "Drafter simulated" in screen
    assert "4 held-out rows" in screen
    assert "what a server would show" in screen
    assert max(len(line) for line in screen.splitlines() if str(work) not in line) <= 80


def test_answers_that_are_not_the_targets_own_are_only_indicative(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(work / "store")
    rows = held_out_rows(store)
    whole, read_into = label_agreement(store, rows), store.read_into

    def other_answers(bucket: str, row: int, out: dict[str, np.ndarray]) -> int:
        n = read_into(bucket, row, out)
        out["labels"][:n:2] = 3
        return n

    monkeypatch.setattr(store, "read_into", other_answers)
    assert label_agreement(store, rows) == pytest.approx(whole / 2, abs=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": (0, 1, 2)}, r"taps layers \[0, 1, 2\], but store .* holds layers"),
        ({"hidden_size": 64}, r"hidden size 64, but target .* has 128"),
        ({"tokenizer": "0" * 64}, r"the tokenizer 000000000000, but .*tiny-chat in store"),
        ({"weights": "0" * 64}, r"the weights 000000000000, but .*tiny-chat in store"),
        ({"template_args": {"enable_thinking": True}}, r'"enable_thinking": true\}, but here they are \{\}'),
    ],
)
def test_a_drafter_of_other_states_is_refused(
    work: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config, origin = read_config(work / "drafter")
    assert origin is not None
    _, tensors = read_drafter(work / "drafter")
    if set(changes) & set(Origin.__dataclass_fields__):
        write_drafter(tmp_path, config, tensors, "float32", origin=replace(origin, **changes))
    else:
        write_drafter(tmp_path, config, tensors, "float32", origin=origin)
        document = json.loads((tmp_path / "config.json").read_text())
        document["dflash_config"]["target_layer_ids"] = list(changes.get("taps", config.taps))
        document["hidden_size"] = changes.get("hidden_size", config.hidden_size)
        (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(DflashError, match=message):
        evaluate_store(EvalConfig(drafter=str(tmp_path), store=str(work / "store")))
