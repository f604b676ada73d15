"""The speculators layout, which vLLM's speculators loader reads: nested configs, and copies of embedding and head.

Its layer ids count from 1 (`aux_hidden_state_layer_ids` = tap + 1). The embedding is stored times the target's factor,
so a server needs no rule for it. vLLM derives the drafter's `causal` from the opposite of `sliding_window_non_causal`
and applies it to EVERY layer: it is true without sliding layers, false with nothing else, and a mixture cannot be said.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.checkpoint.body import drafter_of, need, qwen3_json
from dflash.checkpoint.origin import KEY, Origin
from dflash.drafter import FULL, SLIDING, DrafterConfig
from dflash.errors import DflashError

ARCHITECTURE = "DFlashSpeculator"
VERSION = "0.5.0"  # of the speculators package whose format this is
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def copied_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The copies of the target's tensors."""
    shape = (config.vocab_size, config.hidden_size)
    return {EMBEDDING: shape, HEAD: shape}


def copies(embed_VH: Tensor, factor: float, head_VH: Tensor) -> dict[str, Tensor]:
    return {EMBEDDING: embed_VH * factor if factor != 1.0 else embed_VH, HEAD: head_VH}


def config_to_json(
    config: DrafterConfig, dtype: str, token_ids: dict[str, Any] | None = None, origin: Origin | None = None
) -> dict[str, Any]:
    """config.json of the speculators layout; what it cannot say is refused."""
    last = config.num_target_layers - 1
    if last in config.taps:
        raise DflashError(
            f"The speculators layout cannot express tap {last}, the target's last layer: its ids stop before the last "
            "state; export with --layout z-lab, or extract other taps."
        )
    kinds = set(config.layer_types)
    if kinds == {FULL, SLIDING}:
        raise DflashError(
            "The speculators layout cannot express full and sliding layers together: servers apply its one "
            "`causal` to every layer; export with --layout z-lab."
        )
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    document: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": origin.target if origin else None,
                "architectures": list(origin.architectures) if origin else [],
            },
        },
        "transformer_layer_config": qwen3_json(config, dtype, token_ids),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.hidden_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not kinds,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return document | ({KEY: origin.to_json()} if origin is not None else {})


def config_from_json(document: dict[str, Any], path: Path) -> DrafterConfig:
    """Parse config.json. The layout does not say how many layers the target has; 0 is "not known"."""
    kind = document["speculators_model_type"]
    if kind != "dflash":
        raise DflashError(f"{path}: speculators_model_type is {kind!r}, not 'dflash'; give a DFlash drafter.")
    if document.get("sample_from_anchor"):
        raise DflashError(
            f"{path}: sample_from_anchor is true, so its labels are shifted by one (slot 0 predicts too) and its "
            "weights mean something else here; train one with dflash."
        )
    layer = need(document, "transformer_layer_config", path)
    vocabulary, drafted = layer.get("vocab_size"), document.get("draft_vocab_size")
    if drafted not in (None, vocabulary):
        raise DflashError(
            f"{path}: draft_vocab_size is {drafted} of {vocabulary} tokens; this version drafts from the target's "
            "whole vocabulary only; export it with that."
        )
    hidden, of_target = layer.get("hidden_size"), document.get("target_hidden_size")
    if of_target not in (None, hidden):
        raise DflashError(
            f"{path}: target_hidden_size is {of_target}, the drafter's hidden_size {hidden}; they must be equal here."
        )
    if SLIDING in (layer.get("layer_types") or ()) and document.get("sliding_window_non_causal"):
        raise DflashError(
            f"{path}: sliding_window_non_causal is true, but must be false for this version's sliding layers."
        )
    ids = need(document, "aux_hidden_state_layer_ids", path)
    return drafter_of(
        layer,
        path,
        prefix="transformer_layer_config.",
        block_size=need(document, "block_size", path),
        taps=tuple(number - 1 for number in ids),
        mask_token_id=need(document, "mask_token_id", path),
        num_target_layers=(document.get(KEY) or {}).get("num_target_layers", 0),
    )
