"""The long benches (bench/half_hour.py, bench/ablation.py) with their commands run in this process: quicker."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash.cli import cli

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.append(str(BENCH))  # behind everything else: bench has a store.py and an extract.py

import ablation  # noqa: E402
import half_hour  # noqa: E402
from _stages import Stages  # noqa: E402

__all__ = ["ablation", "half_hour", "in_this_process"]


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the stages whose commands are run from here on."""
    called: list[str] = []

    def call(stages: Stages, name: str, words: Sequence[str]) -> tuple[int, str]:
        called.append(name)
        result = CliRunner().invoke(cli, [*words, "--json"])
        (stages.out / f"{name}.log").write_text(result.stderr)
        return result.exit_code, result.stdout

    monkeypatch.setattr(Stages, "call", call)
    return called
