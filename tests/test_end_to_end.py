"""From prompts to a drafter with a measured acceptance length, through the commands themselves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_tasks import prompts

from dflash.cli import cli


def dflash(*words: str | Path) -> dict[str, Any]:
    """Run a command with --json and return its object; its stdout must be that object alone."""
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert result.exit_code == 0, f"{words[0]}: {result.stderr}"
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> Path:
    """200 answered conversations, extracted from a copy of tiny-chat that is deleted before training."""
    folder = tmp_path_factory.mktemp("end-to-end")
    asked = prompts(216, seed=0)
    for name, part in (("train", asked[:200]), ("eval", asked[200:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in part))
    shutil.copytree(tiny_chat, folder / "target")
    answers = dflash(
        "regenerate", "--data", folder / "train.jsonl", "--target", folder / "target",
        "--out", folder / "answers.jsonl", "--max-new-tokens", "160", "--batch-size", "100",
    )  # fmt: skip
    assert answers["responses"] == 200
    store = dflash(
        "extract", "--target", folder / "target", "--data", folder / "answers.jsonl", "--store", folder / "store",
        "--num-taps", "3", "--buckets", "96,128,192,256",
    )  # fmt: skip
    assert store["documents"] == 200
    assert store["label_agreement"] > 0.99
    shutil.rmtree(folder / "target")
    return folder


@pytest.mark.slow
def test_it_learns_what_the_target_would_say(work: Path, tiny_chat: Path) -> None:
    trained = dflash(
        "train", "--store", work / "store", "--run", work / "run", "--steps", "400", "--num-layers", "2",
        "--block-size", "8", "--lr", "2e-3", "--gamma", "2", "--clip", "0.3", "--token-budget", "4096",
        "--anchors", "448", "--anchor-density", "1", "--eval-every", "200",
    )  # fmt: skip
    assert trained["steps"] == 400
    exported = dflash("export", work / "run", "--out", work / "drafter", "--dtype", "float32")
    assert exported["checked_on"] == str(work / "store")
    served = dflash(
        "eval", "--drafter", work / "drafter", "--target", tiny_chat, "--prompts", work / "eval.jsonl",
        "--max-new-tokens", "160", "--batch-size", "16",
    )  # fmt: skip
    assert served["lossless"] is True
    assert served["identical"] == 16
    assert served["acceptance_length"]["pooled"] >= 4.0, served
    assert served["per_slot"][0]["acceptance"] > 0.7
