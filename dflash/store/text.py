"""Decode a row's tokens with the tokenizer that the store carries in target/."""

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dflash.errors import DflashError


def decode_row(target_folder: Path, tokens: np.ndarray, mask: np.ndarray) -> list[dict[str, Any]]:
    """The row's text as runs [{supervised, text, from, to}]; special tokens are shown."""
    if not len(tokens):
        return []
    tokenizer = load_tokenizer(target_folder)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    runs = []
    for start, end in pairwise(edges):
        ids = tokens[start:end].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        runs.append({"supervised": bool(mask[start]), "text": text, "from": start, "to": end})
    return runs


@lru_cache(maxsize=2)
def load_tokenizer(folder: Path) -> Any:
    """tokenizer.json straight through the `tokenizers` library where there is one (no torch, no code of a model);
    else through transformers, never with remote code."""
    try:
        if (folder / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the libraries raise bare Exceptions for malformed files
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise DflashError(f"The tokenizer in {folder} cannot be loaded ({why}); restore it from a copy.") from None
