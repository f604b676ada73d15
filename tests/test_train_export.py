"""Export: the best checkpoint, checked by loading it again; the card says only what was measured of it."""

from pathlib import Path

import pytest
from helpers_store import make_store

from dflash.checkpoint import read_drafter
from dflash.errors import DflashError
from dflash.train.config import ExportConfig, TrainConfig
from dflash.train.export import export
from dflash.train.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    make_store(folder / "store")
    train(
        TrainConfig(
            store=str(folder / "store"), run=str(folder / "run"), num_layers=1, block_size=4, steps=4, mask_token="7",
            token_budget=192, eval_every=2, save_every=1, keep=9,
        )
    )  # fmt: skip
    return folder / "run"


def test_a_run_gives_its_best_checkpoint_in_the_layout(run: Path, tmp_path: Path) -> None:
    result = export(ExportConfig(source=str(run), out=str(tmp_path / "out")))
    assert "best" in result["why"]
    assert result["acceptance_length"]["pooled"] >= 1
    config, tensors = read_drafter(tmp_path / "out")
    assert (config.block_size, config.taps, config.mask_token_id) == (4, (1, 2, 3), 7)
    assert result["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert "## Acceptance" in (tmp_path / "out" / "README.md").read_text()
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_between_validations_claims_no_acceptance(run: Path, tmp_path: Path) -> None:
    result = export(ExportConfig(source=str(run / "checkpoints" / "step-000003"), out=str(tmp_path / "out")))
    assert (result["step"], result["acceptance_length"]) == (3, None)
    assert "## Acceptance" not in (tmp_path / "out" / "README.md").read_text()


def test_a_folder_with_other_files_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(DflashError, match="no export"):
        export(ExportConfig(source=str(run), out=str(tmp_path)))
    assert (tmp_path / "mine.txt").read_text() == "keep"
