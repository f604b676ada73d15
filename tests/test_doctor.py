"""`dflash doctor` finds what this machine has, and says what will stop a run and what to do about it."""

import errno
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from raised import complaint

from dflash import present
from dflash.cli import cli
from dflash.doctor import checks
from dflash.doctor.checks import Check, card, compilation, direct_read, doctor, libraries, pinned_memory, storage
from dflash.doctor.config import DoctorConfig
from dflash.errors import DflashError
from dflash.store import disk


def by_name(found: Any) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_it_looks_at_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor", str(tmp_path), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    names = {check["name"] for check in found["checks"]}
    assert {
        "torch",
        "zarr",
        "cores",
        "host memory",
        "locked memory",
        "free space",
        "O_DIRECT",
        "holes in files",
    } <= names
    assert found["ok"]
    assert found["seconds"] < 60
    assert not list(tmp_path.iterdir())


def test_the_screen_fits_and_shows_what_to_do(tmp_path: Path) -> None:
    result = doctor(DoctorConfig(path=str(tmp_path)))
    result["checks"].append({
        "name": "durable writes", "state": "problem", "found": "cannot be written " * 8, "advice": "make room " * 12,
    })  # fmt: skip
    text = present.doctor(result, DoctorConfig())
    assert max(map(len, text.splitlines())) <= 80
    assert "one thing will stop a run" in text
    assert "  ! durable writes" in text
    assert "→ make room" in text
    assert "Next:" not in text


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="is no folder; name one on the disk") as caught:
        doctor(DoctorConfig(path=str(tmp_path / "nothing")))
    assert complaint(str(caught.value)) is None


def test_a_library_that_is_too_old_or_missing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version

    def version(name: str) -> str:
        if name == "wandb":
            raise metadata.PackageNotFoundError(name)
        return {"zarr": "2.18.0"}.get(name) or known(name)

    assert all(check.state != "problem" for check in libraries())
    monkeypatch.setattr(metadata, "version", version)
    found = by_name(libraries())
    assert found["zarr"].state == "problem"
    assert "pip install 'zarr<4,>=3.1'" in found["zarr"].advice
    assert "wandb (dflash[wandb])" in found["extras"].found


def test_a_disk_without_room_holes_or_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, real = by_name(storage(tmp_path)), os.open
    assert usual["free space"].state == "ok"

    def no_direct(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(disk, "keeps_holes", lambda path: False)
    monkeypatch.setattr(disk, "write_speed", lambda path: 1e8)
    poor = by_name(storage(tmp_path))
    assert {poor[name].state for name in ("O_DIRECT", "holes in files", "durable writes")} == {"note"}
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    assert by_name(storage(tmp_path))["disk speed"].state == "problem"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**named: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checks.tempfile, "NamedTemporaryFile", refuse)
    found = by_name(storage(tmp_path))["disk"]
    assert (found.state, found.found) == ("problem", "cannot be written (Read-only file system)")


def test_a_direct_read_takes_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(5 << 20))
    rate = direct_read(file)
    assert rate is None or rate > 0
    assert direct_read(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("capability", "free", "state", "words"),
    [((9, 0), 140e9, "ok", "bf16 and fp8"), ((8, 6), 140e9, "ok", "bf16,"), ((8, 6), 10e9, "note", "10.0 of 141.0 GB"),
     ((7, 5), 140e9, "problem", "no bf16")],
)  # fmt: skip
def test_a_card_is_told_by_what_it_multiplies_and_has_free(
    capability: tuple[int, int], free: float, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (int(free), int(141e9)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A Card")
    found = card(0)
    assert found.state == state
    assert words in found.found


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it works")
def test_what_a_card_cannot_do_is_a_problem_and_no_traceback() -> None:
    (found,) = compilation()
    assert found.state == "problem"
    assert "--graph off" in found.advice


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_card_compiles_captures_and_copies() -> None:
    assert [check.state for check in (*compilation(), *pinned_memory())] == ["ok", "ok"]
