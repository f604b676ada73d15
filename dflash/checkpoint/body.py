"""What every layout shares: the drafter's tensors, and the Qwen3 fields of its decoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.drafter import FULL, SLIDING, DrafterConfig
from dflash.errors import DflashError

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter with its shape: 11 a layer and 3 besides."""
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


def check_shapes(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuse missing, unknown or misshapen tensors: servers skip unknown names silently, so we neither write nor read
    any."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise DflashError(f"{path}: the tensor {name} is missing; export the drafter again.")
        if name not in expected:
            raise DflashError(f"{path}: the tensor {name} is not of a DFlash drafter; export the drafter again.")
        if found[name] != expected[name]:
            raise DflashError(
                f"{path}: {name} has shape {list(found[name])}, config.json asks for {list(expected[name])}; export "
                "the drafter again."
            )


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected, path)


def qwen3_json(config: DrafterConfig, dtype: str, token_ids: dict[str, Any] | None = None) -> dict[str, Any]:
    """The drafter's decoder as a Qwen3 config. RoPE stands in the old and in the new spelling, as loaders read either.

    `token_ids`: the target's bos, eos and pad ids.
    """
    scaling, sliding = config.rope_scaling, config.sliding_window is not None
    return {
        "model_type": "qwen3",
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
        "layer_types": list(config.layer_types) or [FULL] * config.num_layers,
        "sliding_window": config.sliding_window,
        "use_sliding_window": sliding,
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


def need(document: Mapping[str, Any], field: str, path: Path, prefix: str = "") -> Any:
    """A field of config.json; a missing one is one sentence with the file and the field."""
    if field not in document or document[field] is None:
        raise DflashError(f"{path}: the field {prefix}{field} is missing; add it as the drafter was trained.")
    return document[field]


def drafter_of(
    document: Mapping[str, Any],
    path: Path,
    *,
    prefix: str = "",
    block_size: int,
    taps: tuple[int, ...],
    mask_token_id: int,
    num_target_layers: int,
) -> DrafterConfig:
    """The drafter that a Qwen3 config and the method's own fields describe."""

    def field(name: str) -> Any:
        return need(document, name, path, prefix)

    _check_plain(document, path, prefix)
    theta, scaling = _rope(document, path, prefix)
    config = DrafterConfig(
        hidden_size=field("hidden_size"),
        intermediate_size=field("intermediate_size"),
        num_layers=field("num_hidden_layers"),
        num_heads=field("num_attention_heads"),
        num_kv_heads=field("num_key_value_heads"),
        head_dim=field("head_dim"),
        rms_norm_eps=field("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=field("max_position_embeddings"),
        vocab_size=field("vocab_size"),
        block_size=block_size,
        taps=taps,
        num_target_layers=num_target_layers,
        mask_token_id=mask_token_id,
        sliding_window=document.get("sliding_window"),
        layer_types=tuple(document.get("layer_types") or ()),
    )
    _check_ranges(config, path)
    return config


def _check_plain(document: Mapping[str, Any], path: Path, prefix: str) -> None:
    """What this version cannot run is refused by its field, not run otherwise."""
    kinds = document.get("layer_types") or ()
    if document.get("use_sliding_window") and document.get("sliding_window"):
        need(document, "layer_types", path, prefix)  # transformers would guess them from max_window_layers
    if set(kinds) - {FULL, SLIDING} or (kinds and len(kinds) != document.get("num_hidden_layers")):
        raise DflashError(f"{path}: {prefix}layer_types is {list(kinds)}; give {FULL} or {SLIDING} for each layer.")
    if SLIDING in kinds:
        need(document, "sliding_window", path, prefix)
    causal = {kind == SLIDING for kind in kinds or (FULL,)}  # what is_causal sets for all layers, here each kind has
    if document.get("is_causal") is not None and causal != {document["is_causal"]}:
        raise DflashError(
            f"{path}: {prefix}is_causal is {document['is_causal']!r} for every layer, but here sliding layers are "
            "causal and full ones are not; leave the field out if the drafter was trained so."
        )
    only = {"hidden_act": "silu", "attention_bias": False, "is_neox_style": True}
    for name, allowed in only.items():
        if document.get(name, allowed) not in (allowed, None):
            raise DflashError(
                f"{path}: {prefix}{name} is {document[name]!r}, but this version runs {allowed!r} only; give another "
                "drafter."
            )


def _rope(document: Mapping[str, Any], path: Path, prefix: str) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling from either spelling; two that differ are refused, since loaders read one or the other."""
    parameters = dict(document.get("rope_parameters") or {})
    thetas = [theta for theta in (document.get("rope_theta"), parameters.pop("rope_theta", None)) if theta is not None]
    if not thetas:
        raise DflashError(f"{path}: the field {prefix}rope_theta is missing; copy it from the target's config.json.")
    if len({float(theta) for theta in thetas}) > 1:
        raise DflashError(
            f"{path}: {prefix}rope_theta is {thetas[0]}, rope_parameters.rope_theta is {thetas[1]}; make them equal."
        )
    given = [_spelled(each) for each in (document.get("rope_scaling"), parameters) if each]
    for each in given:
        if each["rope_type"] not in ROPE_KINDS or "mrope_section" in each or "partial_rotary_factor" in each:
            raise DflashError(
                f"{path}: its RoPE ({each['rope_type']}) must be one that this version runs: full rotary, "
                f"{', '.join(ROPE_KINDS)}."
            )
    if given and given[0] != given[-1]:
        raise DflashError(f"{path}: {prefix}rope_scaling is {given[0]}, rope_parameters {given[1]}; make them equal.")
    return float(thetas[0]), None if not given or given[0]["rope_type"] == "default" else given[0]


def _spelled(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE scaling in one spelling: `rope_type`, its numbers, and nothing that says "as usual"."""
    found = {name: value for name, value in scaling.items() if name not in ("type", "rope_theta")}
    if found.get("partial_rotary_factor") == 1.0:
        del found["partial_rotary_factor"]
    return found | {"rope_type": found.get("rope_type") or scaling.get("type") or "default"}


def _check_ranges(config: DrafterConfig, path: Path) -> None:
    if config.block_size < 2:
        raise DflashError(f"{path}: block_size is {config.block_size}; it must be at least 2, an anchor and a draft.")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise DflashError(
            f"{path}: mask_token_id is {config.mask_token_id}, but must be below {config.vocab_size}, the "
            "embedding's rows."
        )
    layers = config.num_target_layers
    if not config.taps or len(set(config.taps)) != len(config.taps) or min(config.taps) < 0:
        raise DflashError(f"{path}: the taps {list(config.taps)} must be different layers counted from 0.")
    if layers and max(config.taps) >= layers:
        raise DflashError(
            f"{path}: tap {max(config.taps)} must be one of the target's {layers} layers, counted from 0."
        )
