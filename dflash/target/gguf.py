"""A GGUF file as a target: unpacked once into an ordinary model folder, which serves from then on.

Quantised weights become the float32 values that they stand for, so every output is that of the model which transformers
loads from the file; F16 and BF16 files keep their type. The folder lies in the cache ($DFLASH_CACHE, else
~/.cache/dflash) under a name made from the file's content, not its path. Needs the extra `gguf`.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from dflash.errors import DflashError, cause
from dflash.files import fsync_path
from dflash.progress import say

EXACT = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAMPLES, SAMPLE_BYTES = 64, 64 << 10


def gguf_folder(path: Path) -> Path:
    """The model folder that stands for the file; made at the first use."""
    folder = cache_folder() / f"{path.stem}-{content_key(path)}"
    if (folder / "config.json").is_file():
        return folder
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise DflashError(
            f"--target {path} is a GGUF file, for which {missing[0]} is missing: pip install dflash[gguf]."
        )
    partial = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
        partial.chmod(0o755)  # mkdtemp's is for one user only
        unpack(path, partial)
        for file in partial.iterdir():
            fsync_path(file)
        if not folder.exists():  # another worker may have been quicker
            os.rename(partial, folder)
        fsync_path(folder.parent)
    except OSError as error:
        if not (folder / "config.json").is_file():
            raise DflashError(
                f"{path} cannot be unpacked into {folder} ({error.strerror}): set DFLASH_CACHE."
            ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    own = os.environ.get("DFLASH_CACHE")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash"
    return base / "gguf"


def content_key(path: Path) -> str:
    """Over size, beginning and pieces spread evenly: a whole hash of a large file takes minutes."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def unpack(path: Path, out: Path) -> int:
    """Write the file's model and tokenizer into the folder `out`; returns the number of parameters."""
    import torch
    import transformers
    from transformers.utils import logging as transformers_logging

    kinds, pre = _types_and_tokenizer(path)
    dtype = EXACT.get(next(iter(kinds)), "float32") if len(kinds) == 1 else "float32"
    note = "" if dtype != "float32" or kinds == {"F32"} else "; --dtype bfloat16 runs them faster"
    say(f"Unpacking {path} ({', '.join(sorted(kinds))}) to {dtype} weights in {out.parent}{note}.")
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Newer releases can run packed blocks; we want what they stand for.
    config = getattr(transformers, "GgufConfig", None)
    packed = {"quantization_config": config(dequantize=True)} if config else {}
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype), **packed
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # readers of damaged or unknown files raise anything
        raise DflashError(
            f"{path} cannot be loaded by transformers ({cause(error)}): use the original checkpoint."
        ) from None
    # Some releases tag the model as quantised, and then refuse to save it; the file's title is no path.
    model.hf_quantizer = None
    for name in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(name, None)
    model.save_pretrained(out)
    if pre == "smollm":
        split_digits(tokenizer)
    tokenizer.save_pretrained(out)
    return int(model.num_parameters())


def _types_and_tokenizer(path: Path) -> tuple[set[str], str]:
    """The types of the matrices, and the name of the tokenizer's first step."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        found = {str(tensor.tensor_type.name) for tensor in reader.tensors if len(tensor.shape) > 1}
        pre = reader.get_field("tokenizer.ggml.pre")
        return found or {"F32"}, str(pre.contents()) if pre else ""
    except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
        raise DflashError(f"{path} is no GGUF file that can be read ({cause(error)}): fetch it again.") from None


def split_digits(tokenizer: Any) -> None:
    """transformers drops this step of SmolLM's tokenizer; the published tokenizer.json has it."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
