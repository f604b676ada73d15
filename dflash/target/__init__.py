"""The target: what it is, its files, its fingerprints, and the running model. The one place that knows transformers."""

from dflash.target.files import (
    Frozen,
    as_dtype,
    load_tokenizer,
    read_frozen,
    resolve_target,
    stop_token_ids,
    target_folder_bytes,
    write_target_folder,
)
from dflash.target.fingerprints import (
    config_fingerprint,
    template_fingerprint,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from dflash.target.live import (
    check_conventions,
    decoder_layers,
    head_logits,
    head_weight,
    load_target,
    text_model,
)
from dflash.target.spec import TargetSpec, text_config
from dflash.target.taps import check_taps, default_taps

__all__ = [
    "Frozen",
    "TargetSpec",
    "as_dtype",
    "check_conventions",
    "check_taps",
    "config_fingerprint",
    "decoder_layers",
    "default_taps",
    "head_logits",
    "head_weight",
    "load_target",
    "load_tokenizer",
    "read_frozen",
    "resolve_target",
    "stop_token_ids",
    "target_folder_bytes",
    "template_fingerprint",
    "text_config",
    "text_model",
    "tokenizer_fingerprint",
    "weights_fingerprint",
    "write_target_folder",
]
