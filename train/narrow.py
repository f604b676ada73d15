"""--precision fp8: what it needs, and switching a model's products over (dflash/fp8.py)."""

from dataclasses import replace

import torch

from dflash.drafter import DrafterConfig, use_fp8
from dflash.errors import DflashError
from dflash.fp8 import EVEN
from dflash.loss import NarrowHead
from dflash.train.step import Model

HOPPER = (9, 0)


def check_fp8(device: torch.device, shape: DrafterConfig) -> None:
    """Refuse a device or a shape whose products the card cannot make from e4m3."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < HOPPER:
        name = "a CPU" if capability is None else torch.cuda.get_device_name(device)
        raise DflashError(f"--precision fp8 needs a Hopper GPU or a newer one, not {name}; use --precision bf16.")
    sizes = {
        "the target's hidden size": shape.hidden_size, "the target's vocabulary": shape.vocab_size,
        "--intermediate-size": shape.intermediate_size, "--num-heads × --head-dim": shape.num_heads * shape.head_dim,
        "--num-kv-heads × --head-dim": shape.num_kv_heads * shape.head_dim,
    }  # fmt: skip
    for name, size in sizes.items():
        if size % EVEN:
            raise DflashError(
                f"--precision fp8 multiplies sizes that are multiples of {EVEN}, but {name} is {size}; "
                "use --precision bf16."
            )


def to_fp8(model: Model) -> Model:
    """The model with its training products in e4m3: the drafter's, whose weights `flatten` laid out, and the head's."""
    use_fp8(model.drafter)
    return replace(model, head=replace(model.head, narrow=NarrowHead.of(model.head.weight_VH)))
