"""Errors of stage two that need neither a run nor a GPU: drafters' folders, shapes, ranks, stores without rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_store import make_store
from raised import complaint
from test_checkpoint import KEYS, write
from test_drafter import small_config
from test_train_memory import need
from test_train_run import config

from dflash.checkpoint import Origin, check_origin, differences, read_config, read_drafter, write_drafter
from dflash.errors import DflashError
from dflash.evaluate.config import EvalConfig
from dflash.evaluate.stored import evaluate_store
from dflash.target import TargetSpec
from dflash.train import gate
from dflash.train.export import choose_checkpoint
from dflash.train.memory import forecast
from dflash.train.plan import open_store
from dflash.train.ranks import Ranks
from dflash.train.run import train
from dflash.train.setup import check_free
from dflash.train.shape import drafter_config

INNER: dict[str, Any] = KEYS["dflash_config"]  # type: ignore[assignment]
MINE = Origin(target="org/mine", num_target_layers=6, weights="a" * 64)


def drafter(folder: Path, config: Any) -> Any:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(KEYS | config))
    return read_config(folder)


def with_a_mask_of_its_own(folder: Path) -> Any:
    write(folder, small_config(), "z-lab")
    (folder / "mask_embedding.pt").touch()
    return read_drafter(folder)


def rounded_away(folder: Path) -> Any:
    """The final norm lies among the smallest numbers of float16: 1e-7 becomes 1.2e-7."""
    written = write(folder, small_config(), "z-lab", "float16")
    tensors = {name: tensor.detach() for name, tensor in written.items() if name != "embed"}
    tensors["norm.weight"] = torch.full((32,), 1e-7)
    write_drafter(folder, small_config(), tensors, "float16")
    rows, ends = gate.random_rows(small_config())
    return gate.check_export(folder, small_config(), tensors, "float16", rows, ends)


def shape(folder: Path, tokenizer: bool = True, **changes: Any) -> Any:
    """The drafter's shape, of a store whose target has 320 embedding rows, with or without a tokenizer."""
    store = make_store(folder / "store", documents=2, held_out=0, fill=False)
    if not tokenizer:
        (store.target_folder / "tokenizer_config.json").unlink()
    return drafter_config(config(folder, folder, **changes), store, TargetSpec.read(store.target_folder))


def nothing_extracted(folder: Path) -> Any:
    make_store(folder / "store", documents=2, held_out=0, fill=False)
    return train(config(folder / "store", folder / "run", partial=True))


def nothing_held_out(folder: Path) -> Any:
    make_store(folder / "store", documents=2, held_out=0, fill=False)
    return evaluate_store(EvalConfig(drafter="d", store=str(folder / "store")))


CASES: dict[str, Callable[[Path], Any]] = {
    # drafters' folders
    r"config\.json is not valid JSON": lambda f: drafter(f, "{"),
    r"config\.json is not a JSON object": lambda f: drafter(f, "[]"),
    "field rope_theta is missing": lambda f: drafter(f, {"rope_theta": None, "rope_parameters": None}),
    "block_size is 1; it must be": lambda f: drafter(f, {"block_size": 1, "dflash_config": INNER | {"block_size": 1}}),
    "field block_size is missing": lambda f: drafter(
        f, {"block_size": None, "dflash_config": INNER | {"block_size": None}}),
    "mask_embedding.pt replaces": with_a_mask_of_its_own,
    "for org/mine with the weights aaaaaaaaaaaa, but org/other has the weights bbbbbbbbbbbb; use it": lambda f: (
        check_origin(differences(MINE, "d/export", "org/other", weights="b" * 64), "use it with its own target")),
    "Stored as float16, the drafter's logits move by 1": rounded_away,
    "has no checkpoint; give a run folder": choose_checkpoint,
    # settings
    "--ema must lie between 0 and 1, like 0.999, not 1.5": lambda f: config(f, f, ema=1.5),
    "--weight-decay must not be negative, not 2.0 and 0.01": lambda f: config(f, f, warmup=2.0, weight_decay=0.01),
    # shapes and the mask token
    "--num-heads 3 is no multiple of --num-kv-heads 2": lambda f: shape(f, num_heads=3, num_kv_heads=2),
    "--head-dim 7 is odd": lambda f: shape(f, head_dim=7),
    "--mask-token '<mask>' is no token": lambda f: shape(f, mask_token="<mask>"),
    "--mask-token is 320, but .* rows 0 to 319": lambda f: shape(f, mask_token="320"),
    "No token is free to be the mask: .*--mask-token": lambda f: shape(f, False, mask_token=None),
    # stores
    "has no rows to train on": nothing_extracted,
    "has no held-out rows": nothing_held_out,
}  # fmt: skip


@pytest.mark.parametrize("words", CASES)
def test_what_stage_two_cannot_use_is_named(words: str, tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=words) as caught:
        CASES[words](tmp_path)
    assert complaint(str(caught.value)) is None


def test_a_target_that_is_not_the_stores_is_named(tiny_target: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "store", documents=2, held_out=0)
    with pytest.raises(
        DflashError, match=r"\(weights \w{12}\) is not the target of .*\(synthetic, weights w"
    ) as caught:
        open_store(config(tmp_path / "store", tmp_path, target=str(tiny_target)))
    assert complaint(str(caught.value)) is None


def test_a_rank_that_lost_another_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(tensor: torch.Tensor) -> None:
        raise RuntimeError("[pair.cc:534] Connection closed by peer. This may indicate a remote failure; look there")

    monkeypatch.setattr("torch.distributed.all_reduce", lost)
    with pytest.raises(
        DflashError, match=r"Rank 1 lost another rank \(.* closed by peer\); the same command"
    ) as caught:
        Ranks(1, 2).barrier()
    assert complaint(str(caught.value)) is None


def test_a_rank_at_another_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.add_(8))  # the other one's step
    Ranks(1, 2).check_step(8, "runs/a")
    with pytest.raises(DflashError, match="Rank 1 finds --run runs/a at step 0, others at another") as caught:
        Ranks(1, 2).check_step(0, "runs/a")
    assert complaint(str(caught.value)) is None


def test_a_card_that_something_else_fills_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = forecast(need())
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "H200")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (int(140e9), int(140e9)))
    check_free(found, torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (int(9e9), int(140e9)))
    with pytest.raises(DflashError, match=r"of H200, of whose 140\.0 GB only 9\.0 GB are free; stop") as caught:
        check_free(found, torch.device("cuda"))
    assert complaint(str(caught.value)) is None


@pytest.mark.parametrize(
    "read",
    [{"rms_norm_eps": 1e-3}, {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}],
)
def test_a_config_that_transformers_reads_otherwise_is_refused(read: dict[str, Any], tmp_path: Path) -> None:
    """Whatever our own reader makes of it."""
    ours = small_config()
    gate._check_config(tmp_path, KEYS, ours, ours)
    with pytest.raises(DflashError, match="transformers reads another RoPE or epsilon from") as caught:
        gate._check_config(tmp_path, KEYS | read, ours, ours)
    assert complaint(str(caught.value)) is None
