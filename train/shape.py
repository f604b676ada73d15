"""From the target and the flags to the drafter's shape (design section 5), and the choice of the mask token."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dflash.drafter import FULL, SLIDING, DrafterConfig
from dflash.errors import DflashError
from dflash.progress import say
from dflash.store import Store
from dflash.target import TargetSpec, load_tokenizer, stop_token_ids
from dflash.train.config import TrainConfig

MAX_CANDIDATES_NAMED = 5


def drafter_config(config: TrainConfig, store: Store, spec: TargetSpec) -> DrafterConfig:
    """Heads and MLP are the target's where they are of a plain kind; each has a flag."""
    hidden = spec.hidden_size
    if spec.plain_gqa:
        heads, kv_heads, head_dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    else:
        heads, head_dim = max(1, hidden // 128), 128
        kv_heads = max(1, heads // 4)
    heads = config.num_heads or heads
    kv_heads = config.num_kv_heads or min(kv_heads, heads)
    if heads % kv_heads:
        raise DflashError(f"--num-heads {heads} is no multiple of --num-kv-heads {kv_heads}; give a pair that divides.")
    head_dim = config.head_dim or head_dim
    if head_dim % 2:
        raise DflashError(f"--head-dim {head_dim} is odd, but rotary embeddings turn pairs; give an even one.")
    inner = spec.intermediate_size if not spec.is_moe else -(-3 * hidden // 256) * 256
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=config.intermediate_size or inner,
        num_layers=config.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        rope_scaling=spec.rope_scaling,
        max_position_embeddings=spec.max_position_embeddings,
        vocab_size=spec.vocab_size,
        block_size=config.block_size,
        taps=store.meta.taps,
        num_target_layers=spec.num_layers,
        mask_token_id=mask_token(config.mask_token, store, spec),
        sliding_window=config.sliding_window,
        layer_types=layer_types(config),
    )


def layer_types(config: TrainConfig) -> tuple[str, ...]:
    """With --sliding-window the first layers slide and the last --full-layers see everything."""
    if config.sliding_window is None:
        return ()
    full = min(config.full_layers, config.num_layers)
    return (SLIDING,) * (config.num_layers - full) + (FULL,) * full


def mask_token(asked: str | None, store: Store, spec: TargetSpec) -> int:
    """--mask-token > the tokenizer's own > first unused embedding row > lowest spare special token > refuse.

    Never pad, eos or bos by itself: their embeddings mean something to the target.
    """
    if asked is not None and asked.isdigit():
        return _inside(int(asked), spec, "--mask-token")
    tokenizer = _tokenizer(store.target_folder)
    if asked is not None:
        if tokenizer is None or asked not in tokenizer.get_vocab():
            raise DflashError(f"--mask-token {asked!r} is no token of the target's tokenizer; give its id.")
        return _inside(tokenizer.get_vocab()[asked], spec, "--mask-token")
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None:
        say(f"Mask token: {own}, the tokenizer's own.")
        return _inside(own, spec, "the tokenizer's mask token")
    used = len(tokenizer) if tokenizer is not None else spec.vocab_size
    if used < spec.vocab_size:
        say(f"Mask token: {used}, the first embedding row behind the tokenizer's {used} tokens.")
        return used
    spare = _spare_specials(tokenizer, store)
    if not spare:
        raise DflashError(
            "No token is free to be the mask: the tokenizer has none, every embedding row is used and every special "
            f"token occurs in the data; pick one with --mask-token, for example one of {_named(tokenizer)}."
        )
    name = tokenizer.convert_ids_to_tokens(spare[0])
    say(f"Mask token: {spare[0]} ({name}), a special token that the data never uses.")
    return spare[0]


def _inside(token: int, spec: TargetSpec, what: str) -> int:
    if not 0 <= token < spec.vocab_size:
        raise DflashError(
            f"{what} is {token}, but the target's embedding has rows 0 to {spec.vocab_size - 1} only; give one of them."
        )
    return token


def _tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder) if (folder / "tokenizer_config.json").exists() else None


def _spare_specials(tokenizer: Any, store: Store) -> list[int]:
    """Special tokens that are not bos, eos, pad or unk, not in the template's output and not in the data."""
    if tokenizer is None:
        return []
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    taken |= set(stop_token_ids(store.target_folder))
    template = str(getattr(tokenizer, "chat_template", None) or "")
    specials = sorted(set(tokenizer.all_special_ids) | {
        token for token, added in tokenizer.added_tokens_decoder.items() if added.special
    })  # fmt: skip
    present = set(np.unique(store.documents.tokens).tolist())
    return [
        token
        for token in specials
        if token not in taken and token not in present and tokenizer.convert_ids_to_tokens(token) not in template
    ]


def _named(tokenizer: Any) -> str:
    if tokenizer is None:
        return "the ids below the vocabulary size"
    specials = sorted(tokenizer.added_tokens_decoder)[:MAX_CANDIDATES_NAMED]
    return ", ".join(json.dumps(f"{token} {tokenizer.convert_ids_to_tokens(token)}") for token in specials)
