"""Export: a checkpoint in the layout that servers load, checked by loading it again before anyone is told it is there.

The gate (train/gate.py) reads the written folder by the layout's own rules and compares its logits, exactly and in
fp32, with those of the trained weights rounded to the stored dtype: a lost RoPE, a swapped name or another epsilon
cannot pass. With --target the stored states are compared with the live target's tapped layers as well.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import Origin, check_origin, check_shape, differences, read_config, write_drafter
from dflash.checkpoint.speculators import copies
from dflash.drafter import DrafterConfig
from dflash.errors import DflashError
from dflash.files import fsync_path, write_atomically
from dflash.progress import say
from dflash.store import Store
from dflash.target import (
    Frozen,
    TargetSpec,
    load_target,
    read_frozen,
    resolve_target,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from dflash.train.card import model_card
from dflash.train.config import ExportConfig
from dflash.train.folder import Checkpoint, checkpoints, read_checkpoint
from dflash.train.gate import CheckRow, check_export, check_taps, ends_of, random_rows, stored_rows
from dflash.train.origin import origin_in

WRITTEN = {"config.json", "model.safetensors", "README.md"}


def export(config: ExportConfig) -> dict[str, Any]:
    """Write, reload, compare; the result says which step was taken and why."""
    checkpoint, why = choose_checkpoint(Path(config.source))
    run = Path(os.path.normpath(checkpoint.folder / ".." / ".."))  # also of a bare step-000400
    out = Path(config.out) if config.out else run / "export"
    if not is_free(out):
        raise DflashError(f"--out {out} has files that are no export; choose another folder or empty it.")
    store = store_of(checkpoint)
    origin, shape = origin_in(checkpoint, store), shape_of(checkpoint)
    rows, compared = stored_rows(store) if store is not None else [], {}
    if config.target is not None:
        compared = compare_with_target(config, checkpoint, shape, origin, store, rows)
    frozen = frozen_parts(config, store)
    final = out.resolve()
    temporary = final.with_name(f".{final.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        checked = write(temporary, config, checkpoint, shape, origin, frozen, rows)
        replace(final, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for note in notes(config, origin):
        say(f"Note: {note}")
    return {
        "out": str(out),
        "step": checkpoint.step,
        "why": why,
        "layout": config.layout,
        "dtype": config.dtype,
        "acceptance_length": validation_of(checkpoint).get("acceptance_length"),
        "block_size": shape.block_size,
        "target": origin.target,
        "checked_on": str(checkpoint.state["store"]) if rows else f"random states ({without_rows(store)})",
        **checked,
        **compared,
    }


def write(
    folder: Path, config: ExportConfig, checkpoint: Checkpoint, shape: DrafterConfig, origin: Origin,
    frozen: Frozen | None, rows: Sequence[CheckRow],
) -> dict[str, Any]:  # fmt: skip
    """Fill the folder and pass it through the gate."""
    tensors = checkpoint.served()
    copied = None
    if config.layout == "speculators":
        if frozen is None:
            raise DflashError(
                "The speculators layout holds the target's embedding and head, but the store of this run is gone; give "
                f"--target {origin.target}, or --layout z-lab."
            )
        copied = copies(frozen.embed, origin.embed_factor, frozen.head)
    write_drafter(folder, shape, tensors, config.dtype, checkpoint.state["token_ids"], origin, copied)
    validation = validation_of(checkpoint)
    card = model_card(origin, shape, checkpoint.state, validation, config.layout, config.dtype)
    write_atomically(folder / "README.md", card)
    made_up, ends = random_rows(shape)
    rows = rows or made_up
    ends = ends if frozen is None else ends_of(frozen)
    checked = check_export(folder, shape, tensors, config.dtype, rows, ends)
    return {"parameters": sum(tensor.numel() for tensor in tensors.values()), "checked_rows": len(rows), **checked}


def choose_checkpoint(source: Path) -> tuple[Checkpoint, str]:
    """A run's best checkpoint by held-out acceptance, else its newest; or the very checkpoint that is named."""
    if (source / "state.json").exists():
        return read_checkpoint(source), "it was named"
    found = checkpoints(source)
    if not found:
        raise DflashError(
            f"{source} has no checkpoint; give a run folder of `dflash train`, or RUN/checkpoints/step-…."
        )
    newest = found[-1]
    best = newest.state["best"]
    if not best:
        return newest, "the newest: no validation on held-out rows chose a better one"
    chosen = next((each for each in found if each.step == best["step"]), None)
    length = best["acceptance_length"]["pooled"]
    if chosen is None:
        return newest, f"the newest: step {best['step']}, the best with acceptance length {length:.2f}, is gone"
    last = (newest.state.get("validation") or {}).get("acceptance_length") or {}
    compared = f", the newest (step {newest.step}) has {last['pooled']:.2f}" if last.get("pooled") else ""
    return chosen, f"the best on held-out rows: simulated acceptance length {length:.2f}" + (
        compared if chosen is not newest else ", and the newest"
    )


def validation_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The validation of just this checkpoint; one saved between two validations has none of its own."""
    found = checkpoint.state.get("validation") or {}
    return found if found.get("step") == checkpoint.step else {}


def is_free(folder: Path) -> bool:
    """Whether nothing is there, or an export of ours and no file besides, which may be replaced."""
    if not folder.exists():
        return True
    if not folder.is_dir() or {file.name for file in folder.iterdir()} - WRITTEN:
        return False
    try:
        return not any(folder.iterdir()) or read_config(folder)[1] is not None
    except DflashError:
        return False


def replace(folder: Path, new: Path) -> None:
    """Rename `new` onto the folder; what was there is deleted afterwards, so that no half of it is ever seen."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    fsync_path(new)
    if folder.exists():
        folder.rename(gone)
    new.rename(folder)
    fsync_path(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def shape_of(checkpoint: Checkpoint) -> DrafterConfig:
    return DrafterConfig(**checkpoint.state["drafter"])


def store_of(checkpoint: Checkpoint) -> Store | None:
    """The store that the run read, where it is still there and still the same."""
    if not Path(checkpoint.state["store"]).is_dir():
        return None
    store = Store.open(checkpoint.state["store"])
    same = store.fingerprint == checkpoint.state["identity"]["store"]["fingerprint"]
    return store if same else None


def without_rows(store: Store | None) -> str:
    return "the run's store is gone" if store is None else "no row of the store holds states"


def frozen_parts(config: ExportConfig, store: Store | None) -> Frozen | None:
    """The target's embedding and head in fp32, from the store or else from --target."""
    if store is not None:
        return read_frozen(store.target_folder, dtype=torch.float32)
    return None if config.target is None else read_frozen(resolve_target(config.target), dtype=torch.float32)


def compare_with_target(
    config: ExportConfig, checkpoint: Checkpoint, shape: DrafterConfig, origin: Origin, store: Store | None,
    rows: Sequence[CheckRow],
) -> dict[str, Any]:  # fmt: skip
    """Refuse another target than the drafter's own, by its files and by its live states on stored rows."""
    assert config.target is not None, "asked only with --target"
    folder = resolve_target(config.target)
    spec = TargetSpec.read(folder, name=config.target, trust_remote_code=config.trust_remote_code)
    check_shape(shape, origin, spec, str(checkpoint.folder))
    tokenizer = tokenizer_fingerprint(folder) if origin.tokenizer and _has_tokenizer(folder) else ""
    found = differences(
        origin, str(checkpoint.folder), config.target, weights=weights_fingerprint(folder), tokenizer=tokenizer
    )
    check_origin(found, "name the target that the store was extracted from")
    if store is None or not rows:
        if config.layout == "speculators":  # needs the target's tensors all the same
            say(f"Note: the states in {checkpoint.state['store']} are gone; only files of --target were compared.")
            return {}
        raise DflashError(
            f"--target {config.target} cannot be compared: the states in {checkpoint.state['store']} are gone; leave "
            "the flag out."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = checkpoint.state["target"].get("dtype")
    model = load_target(folder, dtype, device, config.trust_remote_code)
    error = check_taps(model, config.target, shape.taps, rows, store.meta.storage)
    return {"taps_checked": {"target": config.target, "rows": len(rows), "relative_error": error}}


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer_config.json", "tokenizer.json"))


def notes(config: ExportConfig, origin: Origin) -> list[str]:
    """What the layout leaves to the server."""
    if config.layout == "z-lab" and origin.embed_factor != 1.0:
        return [
            f"{origin.target} multiplies its embedding by {origin.embed_factor:g}, for which the z-lab layout has no "
            "field: the server must do it, or take --layout speculators, which stores the product."
        ]
    return []
