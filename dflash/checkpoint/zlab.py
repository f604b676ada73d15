"""The z-lab layout, which z-lab's class, vLLM and SGLang load: un-prefixed names, model_type qwen3.

The block size stands in both places where servers look. A tap is the 0-based index of a decoder layer whose OUTPUT is
tapped; the field is `target_layer_ids`. Embedding and head are the target's, so an embedding factor has no field here:
the server's own embedding has to apply it (`dflash.embed_factor` says so).
"""

from pathlib import Path
from typing import Any

from dflash.checkpoint.body import drafter_of, need, qwen3_json
from dflash.checkpoint.origin import KEY, Origin
from dflash.drafter import DrafterConfig
from dflash.errors import DflashError

ARCHITECTURE = "DFlashDraftModel"


def config_to_json(
    config: DrafterConfig, dtype: str, token_ids: dict[str, Any] | None = None, origin: Origin | None = None
) -> dict[str, Any]:
    """config.json of the z-lab layout."""
    document = {
        "architectures": [ARCHITECTURE],
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
        },
        "num_target_layers": config.num_target_layers,
        **qwen3_json(config, dtype, token_ids),
    }
    if origin is not None:
        if origin.logit_scale != 1.0:
            document["logit_scale"] = origin.logit_scale  # vLLM reads it
        document[KEY] = origin.to_json()
    return document


def config_from_json(document: dict[str, Any], path: Path) -> DrafterConfig:
    """Parse config.json; every missing or unfit field is one sentence with the file and the field."""
    architecture = (document.get("architectures") or [None])[0]
    flat = "target_layer_ids" in document and "dflash_config" not in document
    if flat or "DSpark" in str(architecture):
        raise DflashError(
            f"{path} is a drafter of DeepSpec ({architecture}, taps {document.get('target_layer_ids')}): its labels "
            "are shifted by one, slot 0 predicts too, so its weights mean something else here; train one with dflash."
        )
    if architecture != ARCHITECTURE:
        raise DflashError(f"{path}: architectures is {[architecture]}, not [{ARCHITECTURE!r}]; give a DFlash drafter.")
    inner = need(document, "dflash_config", path)
    block = inner.get("block_size", document.get("block_size"))
    if block is None:
        raise DflashError(f"{path}: the field block_size is missing; add it as the drafter was trained.")
    if document.get("block_size", block) != block:
        raise DflashError(
            f"{path}: block_size is {document['block_size']}, dflash_config.block_size is {block}; make them equal."
        )
    for name in ("causal", "use_swa", "attention_sink_bias"):
        if inner.get(name):
            raise DflashError(
                f"{path}: dflash_config.{name} is set, which this version does not run; train one without it."
            )
    return drafter_of(
        document,
        path,
        block_size=block,
        taps=tuple(need(inner, "target_layer_ids", path, "dflash_config.")),
        mask_token_id=need(inner, "mask_token_id", path, "dflash_config."),
        num_target_layers=need(document, "num_target_layers", path),
    )
