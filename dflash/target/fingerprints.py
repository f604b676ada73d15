"""Fingerprints of a target: equal where the content is equal, whatever its path, sharding or file times."""

import hashlib
import json
from pathlib import Path
from typing import Any

from dflash.files import canonical_json, sha256_json
from dflash.target.spec import read_config_json
from dflash.target.weights import checkpoint_files, safetensors_header

# Who saved a config, and from where, changes no state.
CONFIG_IGNORED = ("transformers_version", "_name_or_path")
SAMPLE_BYTES = 64 << 10
SAMPLE_PIECES = 4


def config_fingerprint(folder: Path | str) -> str:
    """sha256 of config.json without the marks of the software that wrote it."""
    return sha256_json({k: v for k, v in read_config_json(Path(folder)).items() if k not in CONFIG_IGNORED})


def weights_fingerprint(folder: Path | str) -> str:
    """sha256 over every tensor's name, dtype and shape, and 64 KiB of it in four pieces spread evenly.

    A whole hash of a large checkpoint takes minutes; a fine-tune that a sample misses would have to leave all four
    pieces of every tensor as they were.
    """
    tensors = {}
    for path in checkpoint_files(Path(folder)):
        header, start = safetensors_header(path)
        for name, entry in header.items():
            tensors[name] = (path, start, entry)
    digest = hashlib.sha256(config_fingerprint(folder).encode())
    for name in sorted(tensors):
        path, start, entry = tensors[name]
        digest.update(canonical_json([name, entry["dtype"], entry["shape"]]).encode())
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            for offset, count in _pieces(end - begin):
                file.seek(start + begin + offset)
                digest.update(file.read(count))
    return digest.hexdigest()


def _pieces(size: int) -> list[tuple[int, int]]:
    if size <= SAMPLE_BYTES:
        return [(0, size)]
    piece = SAMPLE_BYTES // SAMPLE_PIECES
    return [((size - piece) * i // (SAMPLE_PIECES - 1), piece) for i in range(SAMPLE_PIECES)]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 of what decides the ids of a text. Takes a tokenizer, or a folder that it loads one from."""
    if isinstance(tokenizer, str | Path):
        from dflash.target.files import load_tokenizer

        tokenizer = load_tokenizer(Path(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        # Calls with padding or truncation leave their settings in the object.
        content.pop("padding", None)
        content.pop("truncation", None)
    else:
        content = tokenizer.get_vocab()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return sha256_json({"tokenizer": content, "special": special})


def template_fingerprint(tokenizer: Any) -> str:
    """sha256 of the chat template in use; that of null where there is none."""
    return sha256_json(getattr(tokenizer, "chat_template", None))
