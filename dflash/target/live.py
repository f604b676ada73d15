"""The running target: load it, find its layers, and turn its last hidden state into the logits that it returns.

Axes: R rows, C ceiling, H hidden, V vocabulary.
"""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash.errors import DflashError, cause
from dflash.progress import say
from dflash.target.files import as_dtype
from dflash.target.spec import TargetSpec, read_config_json, text_config

#: Kind of layer -> the packages that carry its kernels, and the modules that they bring.
KERNELS = {
    "linear_attention": {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"},
    "mamba": {"mamba-ssm": "mamba_ssm", "causal-conv1d": "causal_conv1d"},
}


def load_target(
    folder: Path | str,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> nn.Module:
    """The target in its checkpoint's dtype (or `dtype`), frozen, in eval mode, on `device`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    # device_map puts weights straight onto the device, but transformers needs accelerate for it.
    direct = device != "cpu" and importlib.util.find_spec("accelerate") is not None
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kept = as_dtype(dtype) or TargetSpec.read(folder, trust_remote_code=trust_remote_code).torch_dtype
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=kept,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **({"device_map": device} if direct else {}),
        )
        module: nn.Module = model.to(device)
    except torch.OutOfMemoryError:
        raise DflashError(
            f"The target {folder} does not fit into the memory of {device}: use a larger device."
        ) from None
    except Exception as error:  # transformers, safetensors and a target's own code raise anything
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            named = (read_config_json(Path(folder)).get("auto_map") or {}).get("AutoModelForCausalLM", "config.json")
            raise DflashError(
                f"The target {folder} needs code of its own ({named}): look at it, then pass --trust-remote-code to "
                "run it."
            ) from None
        raise DflashError(
            f"The target {folder} cannot be loaded by transformers ({cause(error)}): restore its files, or try a newer "
            "transformers."
        ) from None
    if slow := slow_layers(model.config):
        say(f"Warning: {slow}")
    return module.eval().requires_grad_(False)


def slow_layers(config: Any) -> str:
    """Which layers run without the kernels made for them, what that costs and what to install; empty if none does."""
    text = text_config(config)
    types = list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    for kind, packages in KERNELS.items():
        missing = [name for name, module in packages.items() if importlib.util.find_spec(module) is None]
        if (count := types.count(kind)) and missing:
            return (
                f"{count} of {len(types)} layers are {kind.replace('_', ' ')} and run in plain PyTorch, since "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: on a GPU these layers "
                f"take several times as long and need more memory (pip install {' '.join(missing)})."
            )
    return ""


def text_model(model: Any) -> nn.Module:
    """The module whose forward gives `last_hidden_state` after the final norm."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else None
    if found is None or found is model:
        found = getattr(model, "model", None) or getattr(model, "base_model", None)
    if found is None or found is model:
        raise DflashError(f"`{type(model).__name__}` has no decoder that dflash can find: use another target.")
    return found


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of the text model, in order."""
    wanted = text_config(model.config).num_hidden_layers
    lists = [
        (name.count("."), name, module)
        for name, module in text_model(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    if not lists:
        raise DflashError(
            f"`{type(model).__name__}` has no list of {wanted} decoder layers to tap: use another target."
        )
    return list(min(lists, key=lambda found: found[:2])[2])


def head_weight(model: Any) -> torch.Tensor:
    """The output head's weight [V, H] as the live model holds it."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        raise DflashError(
            f"`{type(model).__name__}` has no plain output head (it may be quantised): use the original checkpoint."
        )
    if getattr(head, "bias", None) is not None:
        raise DflashError(f"`{type(model).__name__}` has an output head with a bias: use a target without.")
    return weight


def head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, spec: TargetSpec, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [..., V] from normed states [..., H], as the target returns them. With `out`: in place, no grad."""
    if out is not None:
        torch.mm(hidden, weight.t(), out=out)
        if spec.logit_scale != 1.0:
            out.mul_(spec.logit_scale)
        if spec.logit_divisor != 1.0:
            out.div_(spec.logit_divisor)
        if spec.softcap is not None:
            out.div_(spec.softcap).tanh_().mul_(spec.softcap)
        return out
    logits = nn.functional.linear(hidden, weight)
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    if spec.logit_divisor != 1.0:
        logits = logits / spec.logit_divisor
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    return logits


@torch.inference_mode()
def check_conventions(model: Any, spec: TargetSpec, input_ids: torch.Tensor) -> None:
    """Compare our logits and embedding with the model's own on `input_ids` [1, C]; refuse a family that we misread."""
    seen: dict[str, torch.Tensor] = {}

    def remember_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["first"] = args[0] if args else kwargs["hidden_states"]

    def remember_last(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen["last"] = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]

    handles = [
        decoder_layers(model)[0].register_forward_pre_hook(remember_input, with_kwargs=True),
        text_model(model).register_forward_hook(remember_last),
    ]
    try:
        theirs = model(input_ids=input_ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    ours = head_logits(seen["last"], head_weight(model), spec)
    _compare_logits(type(model).__name__, ours.float(), theirs.float())
    _compare_embedding(type(model).__name__, spec, model.get_input_embeddings().weight[input_ids], seen["first"])


def _compare_logits(family: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if not torch.isfinite(theirs).all():
        return  # a matter for the count of documents that are not finite
    worst = (ours - theirs).abs().max() if ours.shape == theirs.shape else torch.tensor(torch.inf)
    if worst > 0.02 * theirs.abs().max() + 1e-6:
        raise DflashError(
            f"`{family}` makes its logits in a way that dflash does not know (they differ by {worst.item():.3g}), "
            "so labels would be wrong: use another target."
        )


def _compare_embedding(family: str, spec: TargetSpec, rows: torch.Tensor, first: torch.Tensor) -> None:
    """Where the first layer's input is the embedding times a number, that number must be `embed_factor`."""
    if first.shape != rows.shape:
        raise DflashError(
            f"`{family}` feeds its first layer {tuple(first.shape)} for {tuple(rows.shape)}: use another target."
        )
    x, y = rows.float().flatten(), first.float().flatten()
    factor = ((x @ y) / (x @ x).clamp_min(1e-30)).item()
    if (y - factor * x).norm() > 0.02 * y.norm():
        return  # positions or a norm come in between; the drafter has its own
    if abs(factor - spec.embed_factor) > 0.01 * abs(spec.embed_factor):
        raise DflashError(
            f"`{family}` multiplies its embedding by {factor:.4g} where its config tells {spec.embed_factor:.4g}: "
            "use another target."
        )
