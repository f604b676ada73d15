"""The run folder: configuration, metrics and checkpoints, each whole or not there.

    RUN/config.toml  environment.json  metrics.jsonl  tensorboard/
        checkpoints/step-000400/  model.safetensors  optimizer.safetensors  state.json  (with --ema: ema.safetensors)

Masters and moments are stored in fp32 under the parameters' names. A checkpoint is written in a sibling folder,
fsynced and renamed, so a killed run leaves the last whole one.
"""

import json
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dflash
from dflash.errors import DflashError
from dflash.files import errors_at, fsync_path, write_atomically

STATE_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk and its state.json."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def tensors(self, name: str) -> dict[str, Tensor]:
        path = self.folder / f"{name}.safetensors"
        try:
            return load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise DflashError(
                f"{path} cannot be read ({error}); delete {self.folder} to resume from an earlier one."
            ) from None

    def served(self) -> dict[str, Tensor]:
        """The weights that validation judged and an export takes: the average where the run keeps one."""
        return self.tensors("ema" if (self.folder / "ema.safetensors").exists() else "model")


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def read_checkpoint(folder: Path) -> Checkpoint:
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
        if state["format"] != STATE_FORMAT:
            raise DflashError(
                f"{path} has format {state['format']}, this version reads {STATE_FORMAT}; use the one that wrote it."
            )
        return Checkpoint(folder, state)
    except FileNotFoundError:
        raise DflashError(
            f"{folder} is no checkpoint: it has no state.json; give a run folder or RUN/checkpoints/step-…."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DflashError(
            f"{path} is damaged ({error!r}); delete {folder} to resume from an earlier checkpoint."
        ) from None


def checkpoints(run: Path) -> list[Checkpoint]:
    """All checkpoints of a run, oldest first; a folder of another name (somebody's copy) is none."""
    folders = [folder for folder in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", folder.name)]
    # by number: as texts, step 1,000,000 would stand before step 999,999
    return [read_checkpoint(folder) for folder in sorted(folders, key=lambda folder: int(folder.name[5:]))]


def save_checkpoint(run: Path, step: int, files: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write checkpoints/step-…/ whole: temporary sibling, fsync of every file and folder, rename.

    `files`: tensors by the name of their file. A step that is there already has the same tensors, so only its state is
    written again: at no time is the step not there.
    """
    parent = run / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"format": STATE_FORMAT, "step": step, **state}, indent=1) + "\n"
    final, temporary = parent / checkpoint_name(step), parent / f".{checkpoint_name(step)}.partial"
    if final.exists():
        write_atomically(final / "state.json", content)
        return final
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with errors_at(final):
            for name, tensors in files.items():
                host = {key: tensor.detach().to("cpu").contiguous().clone() for key, tensor in tensors.items()}
                save_file(host, temporary / f"{name}.safetensors")
            (temporary / "state.json").write_text(content)
            for file in temporary.iterdir():
                fsync_path(file)
            fsync_path(temporary)
            os.rename(temporary, final)
            fsync_path(parent)
    finally:  # on a full disk, what was written of it must not stay
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def retire(folder: Path) -> None:
    """Delete a checkpoint so that no half of it is ever seen."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def prune(run: Path, keep: int, best: int | None) -> None:
    """Delete all checkpoints but the newest `keep` and the best."""
    found = checkpoints(run)
    for checkpoint in found[:-keep]:
        if checkpoint.step != best:
            retire(checkpoint.folder)
    for rest in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(rest, ignore_errors=True)


def first_difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first leaf in which two JSON values differ: its dotted name and both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(old.keys() - new.keys())]:
            found = first_difference(old.get(key), new.get(key), f"{name}.{key}".removeprefix("."))
            if found is not None:
                return found
        return None
    return None if old == new else (name, old, new)


def environment(device: torch.device) -> dict[str, str]:
    """Versions and device: nothing of the user or the machine's name."""
    import numpy
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "dflash": dflash.__version__, "python": platform.python_version(), "torch": str(torch.__version__),
        "transformers": transformers.__version__, "numpy": numpy.__version__, "device": name,
        "threads": str(torch.get_num_threads()),
    }  # fmt: skip
