"""Export: a checkpoint in the layout that servers load, checked by loading it again before anyone is told it is there.

The gate reads the written folder by the layout's own rules and compares its logits, exactly and in fp32, with those
of the trained weights rounded to the stored dtype: a lost RoPE, a swapped name or another epsilon cannot pass.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.attention import attend_rows, row_spans
from dflash.checkpoint import DTYPES, load_drafter, read_drafter, write_drafter
from dflash.drafter import Drafter, DrafterConfig, RopeTable, embed_blocks
from dflash.errors import DflashError
from dflash.files import fsync_path, write_atomically
from dflash.loss import Head
from dflash.store import Store
from dflash.target import read_frozen
from dflash.train.config import ExportConfig
from dflash.train.folder import Checkpoint, checkpoints, read_checkpoint
from dflash.train.step import Model, row_states, tap_rms

CHECK_TOKENS, CHECK_ANCHORS = 256, 8


def export(config: ExportConfig) -> dict[str, Any]:
    """Write, reload, compare; the result says which step was taken and why."""
    checkpoint, why = choose_checkpoint(Path(config.source))
    run = checkpoint.folder.parent.parent
    out = Path(config.out) if config.out else run / "export"
    if out.exists() and any(out.iterdir()) and not is_export(out):
        raise DflashError(f"--out {out} has files that are no export; choose another folder or empty it.")
    shape = shape_of(checkpoint)
    tensors = checkpoint.tensors("model")
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        metadata = {"target_weights": checkpoint.state["target"]["weights"], "step": str(checkpoint.step)}
        write_drafter(temporary, shape, tensors, config.dtype, checkpoint.state["token_ids"], metadata)
        write_atomically(temporary / "README.md", model_card(checkpoint, shape, config))
        checked = gate(temporary, checkpoint, shape, tensors, config.dtype)
        fsync_path(temporary)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
        fsync_path(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {
        "out": str(out),
        "step": checkpoint.step,
        "why": why,
        "layout": config.layout,
        "dtype": config.dtype,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "acceptance_length": validation_of(checkpoint).get("acceptance_length"),
        "block_size": shape.block_size,
        "target": checkpoint.state["target"]["name"],
        **checked,
    }


def choose_checkpoint(source: Path) -> tuple[Checkpoint, str]:
    """A run's best checkpoint by held-out acceptance, else its newest; or the very checkpoint that is named."""
    if (source / "state.json").exists():
        return read_checkpoint(source), "it was named"
    found = checkpoints(source)
    if not found:
        raise DflashError(
            f"{source} has no checkpoint; give a run folder of `dflash train`, or RUN/checkpoints/step-…."
        )
    best = found[-1].state["best"]
    for checkpoint in found:
        if best and checkpoint.step == best["step"]:
            length = best["acceptance_length"]["pooled"]
            return checkpoint, f"the best on held-out rows: acceptance length {length:.2f}"
    return found[-1], "the newest: no validation chose a better one"


def validation_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The validation of just this checkpoint; one saved between two validations has none of its own."""
    found = checkpoint.state.get("validation") or {}
    return found if found.get("step") == checkpoint.step else {}


def is_export(folder: Path) -> bool:
    try:
        read_drafter(folder)
    except DflashError:
        return False
    return True


def shape_of(checkpoint: Checkpoint) -> DrafterConfig:
    fields = dict(checkpoint.state["drafter"])
    return DrafterConfig(**(fields | {"taps": tuple(fields["taps"])}))


def gate(
    folder: Path, checkpoint: Checkpoint, shape: DrafterConfig, tensors: dict[str, torch.Tensor], dtype: str
) -> dict[str, Any]:
    """Compare the written drafter with the trained one on a stored row (random states where the store is gone)."""
    taps, ids, embed, factor, source = check_input(checkpoint, shape)
    with torch.device("meta"):
        trained = Drafter(shape)
    rounded = {name: tensor.to(DTYPES[dtype]).float() for name, tensor in tensors.items()}
    trained.load_state_dict(rounded, assign=True)
    reloaded = load_drafter(folder, torch.float32)
    config = reloaded.config
    if config != shape:
        different = [n for n in shape.__dataclass_fields__ if getattr(config, n) != getattr(shape, n)]
        raise DflashError(f"{folder}/config.json does not say what was trained: {', '.join(different)}; this is a bug.")
    ours, theirs = (outputs(drafter, taps, ids, embed, factor) for drafter in (trained, reloaded))
    if not torch.equal(ours, theirs):
        gap = (ours - theirs).abs().max().item()
        raise DflashError(
            f"{folder} gives other states than the trained drafter (by up to {gap:.3g}); nothing was exported."
        )
    trained.load_state_dict(tensors, assign=True)
    exact = outputs(trained, taps, ids, embed, factor)
    rounding = ((ours - exact).norm() / exact.norm()).item()
    return {"checked_on": source, "rounding": rounding}


@torch.no_grad()
def outputs(
    drafter: Drafter, taps: torch.Tensor, ids: torch.Tensor, embed: torch.Tensor, factor: float
) -> torch.Tensor:
    """The drafter's states [A, B, H] for a few blocks of one row, in fp32."""
    config, length = drafter.config, len(ids)
    rope = RopeTable(config, length + config.block_size, torch.float32, "cpu")
    anchors = torch.linspace(1, length - 1, min(CHECK_ANCHORS, length - 1)).long().unique()
    x = embed_blocks(embed, factor, ids[anchors], config.mask_token_id, config.block_size)
    slots = (anchors[:, None] + torch.arange(config.block_size)).flatten()
    attend = attend_rows(row_spans(anchors, 1, length), anchors, config.block_size)
    return drafter(taps, rope(torch.arange(length)), x.flatten(0, 1), rope(slots), attend).unflatten(
        0, (len(anchors), -1)
    )


def check_input(
    checkpoint: Checkpoint, shape: DrafterConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, str]:
    """(taps, ids, embedding, factor, where from) of the first stored row, or random ones where the store is gone."""
    path = Path(checkpoint.state["store"])
    if path.is_dir():
        store = Store.open(path)
        frozen = read_frozen(store.target_folder, dtype=torch.float32)
        bucket = next(bucket for bucket in store.buckets if bucket.rows)
        row = next(row for row in range(bucket.rows) if (store.length(bucket.name, row) or 0) > 2)
        arrays = {name: array[:CHECK_TOKENS] for name, array in store.read_row(bucket.name, row).items()}
        model = Model(
            drafter=Drafter(shape), rope=RopeTable(shape, 1, torch.float32, "cpu"), embed_VH=frozen.embed,
            embed_factor=frozen.spec.embed_factor, head=Head(frozen.head), tap_rms=tap_rms(store),
        )  # fmt: skip
        states = row_states(arrays, model)
        return states, torch.from_numpy(arrays["input_ids"]).long(), frozen.embed, frozen.spec.embed_factor, str(path)
    generator = np.random.default_rng(0)
    states = torch.from_numpy(generator.standard_normal((64, len(shape.taps) * shape.hidden_size), dtype=np.float32))
    embed = torch.from_numpy(generator.standard_normal((shape.vocab_size, shape.hidden_size), dtype=np.float32))
    ids = torch.from_numpy(generator.integers(shape.vocab_size, size=64))
    return states, ids, embed, 1.0, f"random states ({path} is gone)"


def model_card(checkpoint: Checkpoint, shape: DrafterConfig, config: ExportConfig) -> str:
    """README.md of the export: what it is, of which target, how good, how to serve it."""
    state = checkpoint.state
    target, validation = state["target"], validation_of(checkpoint)
    length = validation.get("acceptance_length") or {}
    drafts = shape.block_size - 1
    lines = [
        f"# DFlash drafter for {target['name']}",
        "",
        f"Block size {shape.block_size}, {shape.num_layers} layers, taps {list(shape.taps)} (outputs of these 0-based "
        f"decoder layers), mask token {shape.mask_token_id}. Trained with dflash, step {checkpoint.step}.",
        "",
        f"- Target weights fingerprint: `{target['weights']}`",
        f"- Settings: `{json.dumps(state['identity']['settings'], sort_keys=True)}`",
        "- Licence: to be chosen by who publishes it; the target's own may bind you.",
        "",
    ]
    if length.get("pooled"):
        lines += [
            "## Acceptance",
            "",
            f"Simulated on held-out rows, greedy, bonus token included: {length['pooled']:.3f} pooled (tokens over "
            f"cycles), {length['macro']:.3f} macro (mean of the answers' means).",
            "",
            "| slot | accepted | given all before |",
            "|---|---|---|",
        ]
        for slot in validation["per_slot"]:
            shares = [f"{slot[key]:.3f}" if slot[key] is not None else "" for key in ("acceptance", "conditional")]
            lines.append(f"| {slot['slot']} | {shares[0]} | {shares[1]} |")
        lines.append("")
    speculative = json.dumps({"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": drafts})
    lines += [
        "## Serving",
        "",
        "```",
        f"vllm serve {target['name']} --speculative-config '{speculative}'",
        f"python -m sglang.launch_server --model-path {target['name']} --speculative-algorithm DFLASH \\",
        "    --speculative-draft-model-path THIS_FOLDER",
        "```",
        "",
        f"Use exactly {drafts} speculative tokens: the block size less one.",
        "",
    ]
    return "\n".join(lines)
