"""What dflash needs to know of a target, read from its config.json (the text part of a multimodal one).

Families differ in how logits follow from the normed last hidden state and how an embedding row enters the first layer:

    logits = softcap(x Wᵀ · logit_scale / logit_divisor)      softcap(z) = cap · tanh(z / cap)
    first layer's input = embed[id] · embed_factor

The factors are found by the names that families give them, not by a list of families. What a config cannot tell is
checked against the live model before an extraction (`dflash.target.live.check_conventions`).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.errors import DflashError, cause

if TYPE_CHECKING:
    import torch

ROPE_KINDS = ("linear", "llama3", "yarn")  # what a drafter copies; others keep theta only
# M-RoPE sections and partial factors describe the target's own attention; a drafter's rotary embedding is full.
ROPE_DROPPED = frozenset(
    {"rope_theta", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "mrope_axes"}
)
MOE_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EPS_NAMES = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """A target's shape and conventions. `tied` is what the config says; the weights decide (`read_frozen`)."""

    name: str
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embedding, which may exceed the tokenizer's length
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    plain_gqa: bool  # False for latent attention and the like, whose head shape is of no use to a drafter
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tied: bool
    dtype: str
    softcap: float | None = None
    logit_scale: float = 1.0
    logit_divisor: float = 1.0  # kept apart from the scale: x / 6 and x · (1/6) round differently
    embed_factor: float = 1.0
    is_moe: bool = False

    @classmethod
    def read(cls, folder: Path | str, name: str | None = None, trust_remote_code: bool = False) -> "TargetSpec":
        """Read `folder`/config.json; `name` is what errors and stores call the target."""
        folder = Path(folder)
        config = read_config(folder, trust_remote_code)
        text = text_config(config)
        return cls(name=name or folder.resolve().name, **_shape(text, folder), **_conventions(config, text, folder))

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return getattr(torch, self.dtype)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"architectures": list(self.architectures)}


def read_config_json(folder: Path) -> dict[str, Any]:
    """config.json as it lies there."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DflashError(f"{folder} has no config.json: --target needs a folder in Hugging Face layout.") from None
    except (ValueError, OSError) as error:
        raise DflashError(f"{path} cannot be read as JSON ({error}): restore the file.") from None
    if not isinstance(content, dict):
        raise DflashError(f"{path} is not a JSON object: restore the file.")
    return content


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The transformers config; a family that transformers does not know comes as a bare config with the same names."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig

    raw = read_config_json(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except StrictDataclassError as error:
        raise DflashError(
            f"{folder}/config.json is refused by transformers ({cause(error)}): correct it, or restore the file."
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        if not isinstance(raw.get("text_config", raw).get("hidden_size"), int):
            raise DflashError(
                f"{folder}/config.json (model_type {raw.get('model_type')!r}) is of no family that transformers knows: "
                "upgrade transformers, or pass --trust-remote-code if the folder carries its own code."
            ) from None
        nested = raw.get("text_config")
        config = PreTrainedConfig.from_dict(raw)
        if isinstance(nested, dict):
            config.text_config = PreTrainedConfig.from_dict(nested)
        return config


def text_config(config: Any) -> Any:
    """The part of a config that describes the decoder of text."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _shape(text: Any, folder: Path) -> dict[str, Any]:
    hidden = _whole(text, folder, "hidden_size")
    heads = _first(text, ("num_attention_heads",)) or max(1, hidden // 128)
    heads = max(heads) if isinstance(heads, list | tuple) else heads
    kv_heads = _first(text, ("num_key_value_heads",)) or heads
    kv_heads = max(kv_heads) if isinstance(kv_heads, list | tuple) else kv_heads
    wide = _first(text, ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")) or 4 * hidden
    latent = _first(text, ("kv_lora_rank", "q_lora_rank")) is not None
    return {
        "model_type": str(text.model_type),
        "hidden_size": hidden,
        "num_layers": _whole(text, folder, "num_hidden_layers"),
        "vocab_size": _whole(text, folder, "vocab_size"),
        "intermediate_size": int(max(wide) if isinstance(wide, list | tuple) else wide),
        "num_attention_heads": int(heads),
        "num_key_value_heads": int(kv_heads),
        "head_dim": int(_first(text, ("head_dim",)) or hidden // heads),
        "plain_gqa": not latent and heads % kv_heads == 0,
        "rms_norm_eps": float(_first(text, EPS_NAMES) or 1e-6),
        "max_position_embeddings": int(_first(text, ("max_position_embeddings",)) or 2048),
    }


def _conventions(config: Any, text: Any, folder: Path) -> dict[str, Any]:
    theta, scaling = _rope(text)
    tied = getattr(config, "tie_word_embeddings", None)
    divisor = _first(text, ("logits_scaling",))
    dtype = _dtype(config, text, folder)
    return {
        "architectures": tuple(getattr(config, "architectures", None) or ()),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied": bool(getattr(text, "tie_word_embeddings", False) if tied is None else tied),
        "dtype": dtype,
        "softcap": _positive(_first(text, ("final_logit_softcapping",))),
        "logit_scale": float(_first(text, ("logit_scale", "lm_head_multiplier")) or 1.0),
        "logit_divisor": float(divisor or 1.0),
        "embed_factor": _embed_factor(text, dtype),
        "is_moe": any((_first(text, (name,)) or 0) > 1 for name in MOE_NAMES),
    }


def _rope(text: Any) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling; where layer types have RoPEs of their own, the one of full attention."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if found and all(isinstance(value, dict) for value in found.values()):
        found = found.get("full_attention") or next(iter(found.values()))
    theta = float(found.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)
    kind = found.get("rope_type") or found.get("type")
    if kind not in ROPE_KINDS:
        return theta, None
    return theta, {"rope_type": kind} | {k: v for k, v in found.items() if k not in ROPE_DROPPED}


def _embed_factor(text: Any, dtype: str) -> float:
    multiplier = _first(text, ("embedding_multiplier", "scale_emb"))
    if multiplier is not None:
        return float(multiplier)
    if "gemma" in str(text.model_type) or getattr(text, "mup_enabled", False):
        import torch

        return torch.tensor(text.hidden_size**0.5, dtype=getattr(torch, dtype)).item()
    return 1.0


def _dtype(config: Any, text: Any, folder: Path) -> str:
    """The checkpoint's dtype: as the config says, else that of its embedding."""
    for source in (config, text):
        said = str(getattr(source, "dtype", None) or "").removeprefix("torch.")
        if said in DTYPES:
            return said
    from dflash.target.weights import embedding_dtype

    return embedding_dtype(folder) or "float32"


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _positive(value: Any) -> float | None:
    return float(value) if value else None


def _whole(config: Any, folder: Path, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise DflashError(
            f"{folder}/config.json gives {name} = {value!r}: a target needs a positive whole number there."
        )
    return value
