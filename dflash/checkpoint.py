"""Reading and writing a drafter in the public z-lab layout: config.json and model.safetensors.

The layout is what z-lab's class, vLLM and SGLang load: bfloat16 tensors without a prefix, model_type qwen3, the block
size in both places where servers look, rope parameters in the old and the new spelling (tests/test_checkpoint.py has
the whole table). A tap is the 0-based index of a decoder layer whose OUTPUT is tapped; the field is `target_layer_ids`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import DflashError
from dflash.files import replacing, write_atomically

ARCHITECTURE = "DFlashDraftModel"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the layout with its shape: 11 a layer and 3 besides."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (config.head_dim,),
            "self_attn.k_norm": (config.head_dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def config_to_json(config: DrafterConfig, dtype: str, token_ids: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json of the z-lab layout. `token_ids`: the target's bos, eos and pad ids."""
    scaling = config.rope_scaling
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
        },
        "num_target_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
        "layer_types": ["full_attention"] * config.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": config.num_layers,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **(token_ids or {}),
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def config_from_json(document: dict[str, Any], path: Path) -> DrafterConfig:
    """Parse config.json; every missing or unfit field is one sentence with the file and the field."""

    def need(field: str, source: dict[str, Any] = document, prefix: str = "") -> Any:
        if field not in source:
            raise DflashError(
                f"{path}: the field {prefix}{field} is missing; a DFlash drafter cannot be used without it."
            )
        return source[field]

    architecture = document.get("architectures") or [None]
    if architecture[0] != ARCHITECTURE:
        hint = (
            " (its labels are shifted by one, so its weights mean something else)"
            if "DSpark" in str(architecture)
            else ""
        )
        raise DflashError(
            f"{path}: architectures is {architecture}, not [{ARCHITECTURE!r}]{hint}; export it in that layout."
        )
    inner = need("dflash_config")
    if any(kind != "full_attention" for kind in document.get("layer_types", [])):
        raise DflashError(
            f"{path}: layer_types has sliding layers, which this version does not run; use full_attention."
        )
    parameters = dict(document.get("rope_parameters") or {})
    scaling = dict(document.get("rope_scaling") or parameters)
    scaling.pop("rope_theta", None)
    scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
    layers, block = need("num_hidden_layers"), inner.get("block_size", document.get("block_size"))
    if block is None:
        raise DflashError(f"{path}: the field block_size is missing; a DFlash drafter cannot be used without it.")
    theta = document.get("rope_theta", parameters.get("rope_theta"))
    if theta is None:
        raise DflashError(f"{path}: the field rope_theta is missing; copy it from the target's config.json.")
    return DrafterConfig(
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=layers,
        num_heads=need("num_attention_heads"),
        num_kv_heads=need("num_key_value_heads"),
        head_dim=need("head_dim"),
        rms_norm_eps=need("rms_norm_eps"),
        rope_theta=float(theta),
        rope_scaling=scaling if scaled else None,
        max_position_embeddings=need("max_position_embeddings"),
        vocab_size=need("vocab_size"),
        block_size=block,
        taps=tuple(need("target_layer_ids", inner, "dflash_config.")),
        num_target_layers=need("num_target_layers"),
        mask_token_id=need("mask_token_id", inner, "dflash_config."),
    )


def write_drafter(
    folder: Path,
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    dtype: str,
    token_ids: dict[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write config.json and model.safetensors (cast to `dtype`) into an existing folder; the config comes last.

    `metadata` goes into the safetensors header, where no loader minds it.
    """
    check_tensors(tensors, config, folder / "model.safetensors")
    with replacing(folder / "model.safetensors") as sibling:
        cast = {name: tensor.detach().to("cpu", DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
        save_file(cast, sibling, metadata={"format": "pt", **(metadata or {})})
    write_atomically(folder / "config.json", json.dumps(config_to_json(config, dtype, token_ids), indent=2) + "\n")


def read_drafter(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a drafter; names and shapes must be exactly those of `tensor_shapes`."""
    path = folder / "config.json"
    try:
        config = config_from_json(json.loads(path.read_text()), path)
    except FileNotFoundError:
        raise DflashError(f"{path} does not exist; give a folder that `dflash export` wrote.") from None
    except ValueError as error:
        raise DflashError(f"{path} is not valid JSON ({error}); export the drafter again.") from None
    weights = folder / "model.safetensors"
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise DflashError(f"{weights} cannot be read ({error}); export the drafter again.") from None
    check_tensors(tensors, config, weights)
    return config, tensors


def check_tensors(tensors: dict[str, Tensor], config: DrafterConfig, path: Path) -> None:
    """Refuse missing, unknown or misshapen tensors: servers skip unknown names silently, so we do not write or read
    any."""
    expected = tensor_shapes(config)
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise DflashError(f"{path}: the tensor {name} is missing; export the drafter again.")
        if name not in expected:
            raise DflashError(f"{path}: the tensor {name} is not of a DFlash drafter; export the drafter again.")
        if tuple(tensors[name].shape) != expected[name]:
            shape = list(tensors[name].shape)
            raise DflashError(f"{path}: {name} has shape {shape}, config.json asks for {list(expected[name])}.")


def load_drafter(folder: Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> Drafter:
    """A drafter ready to run, in evaluation mode."""
    config, tensors = read_drafter(folder)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    return drafter.requires_grad_(False).eval()
