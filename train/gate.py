"""The gate of an export: what was written is read by its layout's rules and must draft what was trained.

Two questions. Does the folder give the trained drafter's logits (exactly, with the weights rounded as stored)? And,
where the live target is at hand, are the stored states those of its tapped layers?

Axes: L tokens of a row, F = K·H, A anchors, B block, J = B-1 drafted slots, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.attention import attend_rows, row_spans
from dflash.checkpoint import DTYPES, load_drafter, read_copies, read_document
from dflash.drafter import Drafter, DrafterConfig, RopeTable, embed_blocks, rope_frequencies
from dflash.errors import DflashError
from dflash.loss import Head
from dflash.store import Store
from dflash.stored import row_states, tap_rms
from dflash.target import Frozen, decoder_layers

CHECK_ROWS, CHECK_TOKENS, CHECK_ANCHORS = 4, 256, 8
MOST_ROUNDING = 0.1  # relative change of the logits by the stored dtype; bfloat16 makes about 0.01
MOST_TAP_ERROR = {"bf16": 0.03, "lz4": 0.03, "int8": 0.06}  # relative L2; another layer is off by far more


@dataclass(frozen=True)
class CheckRow:
    """The beginning of a stored row, in fp32."""

    name: str
    taps_LF: Tensor
    ids_L: Tensor


@dataclass(frozen=True)
class Ends:
    """What stands before and behind the drafter: embedding with its factor, and head."""

    embed_VH: Tensor
    factor: float
    head: Head


def ends_of(frozen: Frozen) -> Ends:
    spec = frozen.spec
    return Ends(frozen.embed, spec.embed_factor, Head(frozen.head, spec.logit_scale / spec.logit_divisor, spec.softcap))


def stored_rows(store: Store) -> list[CheckRow]:
    """A few rows, held-out ones first."""
    buckets = sorted(store.buckets, key=lambda bucket: not bucket.held_out)
    places = ((b.name, row) for b in buckets for row in range(b.rows) if (store.length(b.name, row) or 0) > 2)
    rms, rows = tap_rms(store), []
    for (bucket, row), _ in zip(places, range(CHECK_ROWS), strict=False):
        arrays = {name: array[:CHECK_TOKENS] for name, array in store.read_row(bucket, row).items()}
        states = row_states(arrays, torch.float32, "cpu", rms)
        rows.append(CheckRow(f"{bucket} row {row}", states, torch.from_numpy(arrays["input_ids"]).long()))
    return rows


def random_rows(shape: DrafterConfig) -> tuple[list[CheckRow], Ends]:
    """Where the store is gone: random states, embedding and head."""
    generator = np.random.default_rng(0)

    def normal(*size: int) -> Tensor:
        return torch.from_numpy(generator.standard_normal(size, dtype=np.float32))

    embed = normal(shape.vocab_size, shape.hidden_size)
    ids = torch.from_numpy(generator.integers(shape.vocab_size, size=64))
    return [CheckRow("random states", normal(64, len(shape.taps) * shape.hidden_size), ids)], Ends(
        embed, 1.0, Head(embed)
    )


def check_export(
    folder: Path, shape: DrafterConfig, tensors: dict[str, Tensor], dtype: str, rows: Sequence[CheckRow], ends: Ends
) -> dict[str, Any]:
    """Refuse unless the folder drafts what was trained; returns how far rounding alone moved the logits."""
    document = read_document(folder)
    reloaded = load_drafter(folder, torch.float32)
    _check_config(folder, document, reloaded.config, shape)
    theirs, rounded_ends = ends, ends
    if "speculators_model_type" in document:  # it brings embedding (times its factor) and head of its own
        copied = {name: tensor.float() for name, tensor in read_copies(folder).items()}
        theirs = Ends(copied["embed_tokens.weight"], 1.0, replace(ends.head, weight_VH=copied["lm_head.weight"]))
        rounded_ends = Ends(
            _rounded(ends.embed_VH * ends.factor, dtype), 1.0,
            replace(ends.head, weight_VH=_rounded(ends.head.weight_VH, dtype)),
        )  # fmt: skip
    rounded = _loaded(shape, {name: _rounded(tensor, dtype) for name, tensor in tensors.items()})
    trained = _loaded(shape, tensors)
    moved, agreeing, drafts = 0.0, 0, 0
    for row in rows:
        exact = draft_logits(trained, row, ends)
        ours, back = draft_logits(rounded, row, rounded_ends), draft_logits(reloaded, row, theirs)
        _check_finite(exact, ours, row, dtype)
        if not torch.equal(ours, back):
            gap = (ours - back).abs().max().item()
            raise DflashError(
                f"{folder} gives other logits than the trained drafter on {row.name} (by up to {gap:.3g}); nothing was "
                "exported, so report it."
            )
        moved = max(moved, ((back - exact).norm() / exact.norm().clamp(min=1e-30)).item())
        agreeing += int((back.argmax(-1) == exact.argmax(-1)).sum())
        drafts += back[..., 0].numel()
    if moved > MOST_ROUNDING:
        raise DflashError(
            f"Stored as {dtype}, the drafter's logits move by {moved:.1%}; export it with --dtype bfloat16 or float32."
        )
    return {"rounding": moved, "same_drafts": agreeing / drafts}


def _check_finite(exact: Tensor, rounded: Tensor, row: CheckRow, dtype: str) -> None:
    if not exact.isfinite().all():
        raise DflashError(f"The checkpoint's own logits on {row.name} are not finite; export another checkpoint.")
    if not rounded.isfinite().all():
        raise DflashError(
            f"Stored as {dtype}, the drafter's logits on {row.name} are not finite; export it with --dtype bfloat16 or "
            "float32."
        )


def _rounded(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(DTYPES[dtype]).float()


def _loaded(shape: DrafterConfig, tensors: dict[str, Tensor]) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(shape)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return drafter


def _check_config(folder: Path, document: dict[str, Any], read: DrafterConfig, shape: DrafterConfig) -> None:
    """What config.json says must be what was trained, as we read it and as transformers reads it for the servers."""
    different = [name for name in shape.__dataclass_fields__ if getattr(read, name) != getattr(shape, name)]
    if different:
        raise DflashError(f"{folder}/config.json does not say what was trained: {', '.join(different)}; report it.")
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    served = Qwen3Config.from_dict(dict(document.get("transformer_layer_config", document)))
    rotary = Qwen3RotaryEmbedding(served)
    frequencies, factor = rope_frequencies(shape)
    same = torch.equal(rotary.inv_freq.float(), frequencies) and float(rotary.attention_scaling) == factor
    if not same or served.rms_norm_eps != shape.rms_norm_eps:
        raise DflashError(
            f"transformers reads another RoPE or epsilon from {folder}/config.json than was trained; report it."
        )


@torch.no_grad()
def draft_logits(drafter: Drafter, row: CheckRow, ends: Ends) -> Tensor:
    """Logits [A, J, V] of a few blocks of one row, in fp32."""
    config, length = drafter.config, len(row.ids_L)
    rope = RopeTable(config, length + config.block_size, torch.float32, "cpu")
    anchors = torch.linspace(1, length - 1, min(CHECK_ANCHORS, length - 1)).long().unique()
    x = embed_blocks(ends.embed_VH, ends.factor, row.ids_L[anchors], config.mask_token_id, config.block_size)
    slots = (anchors[:, None] + torch.arange(config.block_size)).flatten()
    attend = attend_rows(row_spans(anchors, 1, length), anchors, config.block_size)
    hidden = drafter(row.taps_LF, rope(torch.arange(length)), x.flatten(0, 1), rope(slots), attend)
    return ends.head.logits(hidden.unflatten(0, (len(anchors), -1))[:, 1:])


@torch.inference_mode()
def check_taps(model: Any, name: str, taps: Sequence[int], rows: Sequence[CheckRow], storage: str) -> float:
    """Refuse unless the live target's tapped layers give the stored states; returns the largest relative L2 error."""
    worst = 0.0
    for row in rows:
        layers = _layer_outputs(model, row.ids_L)
        for tap, stored_LH in zip(taps, row.taps_LF.chunk(len(taps), dim=-1), strict=True):
            errors = [((layer - stored_LH).norm() / stored_LH.norm().clamp(min=1e-30)).item() for layer in layers]
            if not errors[tap] <= MOST_TAP_ERROR[storage]:
                best = min(range(len(errors)), key=errors.__getitem__)
                hint = f"; they are nearest to layer {best} (off by {errors[best]:.1%})" if best != tap else ""
                raise DflashError(
                    f"The stored states of tap {tap} ({row.name}) are not what target {name} gives at layer {tap}: off "
                    f"by {errors[tap]:.1%} of their norm{hint}; extract from this target again, or name the right one."
                )
            worst = max(worst, errors[tap])
    return worst


def _layer_outputs(model: Any, ids_L: Tensor) -> list[Tensor]:
    """The output [L, H] of every decoder layer, fp32 on the host."""
    outputs: list[Tensor] = []

    def keep(module: Any, inputs: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden.reshape(len(ids_L), -1).float().cpu())

    hooks = [layer.register_forward_hook(keep) for layer in decoder_layers(model)]
    try:
        model(input_ids=ids_L[None].to(model.get_input_embeddings().weight.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs
