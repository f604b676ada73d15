"""Rows of a store as a drafter reads them: tapped states in its own dtype, int8 scaled back."""

import json
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash.store import Store


def template_args(store: Store) -> dict[str, Any]:
    """The template arguments of most conversations: their lines' own, as `regenerate` writes, or --template-args."""
    own: dict[str, int] = store.meta.counts.get("template_args") or {}
    most = max(own, key=lambda text: (own[text], text), default="")
    return dict(json.loads(most)) if most else dict(store.meta.template_args)


def tap_rms(store: Store, device: torch.device | str = "cpu") -> Tensor | None:
    """The channels' RMS [K·H] by which an int8 store was divided; None for the others."""
    if store.meta.storage != "int8":
        return None
    (rms,) = load_file(store.root / "calib.safetensors").values()
    return rms.to(device)


def scaled_back(hidden: Tensor, scale: Tensor | None, rms: Tensor | None, dtype: torch.dtype) -> Tensor:
    """States [..., K·H] as they were extracted, in `dtype`; `scale` [..., K] and `rms` [K·H] belong to int8."""
    if scale is None:
        return hidden.to(dtype)
    assert rms is not None, "an int8 store brings its channels' RMS"
    wide = hidden.unflatten(-1, (scale.shape[-1], -1)).float() * scale[..., None]
    return (wide.flatten(-2) * rms).to(dtype)


def row_states(
    arrays: dict[str, np.ndarray], dtype: torch.dtype, device: torch.device | str, rms: Tensor | None
) -> Tensor:
    """The states [L, K·H] of one row as `Store.read_row` gives it."""
    hidden = torch.from_numpy(arrays["hidden"]).to(device)
    hidden = hidden.view(torch.bfloat16) if hidden.dtype == torch.uint16 else hidden
    scale = torch.from_numpy(arrays["scale"]).to(device) if "scale" in arrays else None
    return scaled_back(hidden, scale, rms, dtype)
