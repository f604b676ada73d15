"""Checkpoints on disk: in order, whole at every moment, pruned but for the newest and the best."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from dflash.train.folder import checkpoints, prune, save_checkpoint

FILES = {"model": {"w": torch.ones(2)}}


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints(run)]


def test_checkpoints_are_in_the_order_of_their_steps_whatever_their_names_length(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000, 10_000_000):
        save_checkpoint(tmp_path, step, FILES, {})
    assert steps(tmp_path) == [999_998, 999_999, 1_000_000, 10_000_000]
    prune(tmp_path, keep=2, best=999_998)
    assert steps(tmp_path) == [999_998, 1_000_000, 10_000_000]


def test_a_copy_of_a_checkpoint_under_another_name_is_left_alone(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, FILES, {})
    folder = tmp_path / "checkpoints"
    os.rename(folder / "step-000001", folder / "step-000001-before-the-change")
    assert steps(tmp_path) == [2]
    prune(tmp_path, keep=1, best=None)
    assert (folder / "step-000001-before-the-change").is_dir()


def test_a_step_that_is_saved_again_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop saves a step that may have been saved just before; a kill in between must not cost it."""
    final = save_checkpoint(tmp_path, 3, FILES, {"validation": None})
    rename = os.rename

    def killed(source: Path, target: Path) -> None:
        if Path(target) == final:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with suppress(KeyboardInterrupt):
        save_checkpoint(tmp_path, 3, FILES, {"validation": {"step": 3}})
    (found,) = checkpoints(tmp_path)
    assert found.state["validation"] == {"step": 3}
    assert torch.equal(found.tensors("model")["w"], torch.ones(2))
