"""Show a document as text with its supervised part in colour, or between brackets where there is no colour."""

from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from dflash.data.render import Mask, Tokens

SUPERVISED_STYLE, CONTEXT_STYLE = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"


def supervised_runs(mask: Mask) -> list[tuple[int, int, bool]]:
    """(start, end, supervised) of the document's stretches."""
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(start, end, bool(mask[start])) for start, end in pairwise(borders)]


def document_text(tokens: Tokens, mask: Mask, tokenizer: Any, coloured: bool) -> Text:
    """The document, special tokens included."""
    text = Text()
    for start, end, supervised in supervised_runs(mask):
        part = tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False)
        if supervised and not coloured:
            part = OPEN + part + CLOSE
        text.append(part, style=SUPERVISED_STYLE if supervised else CONTEXT_STYLE)
    return text


def show_document(number: int, place: str, tokens: Tokens, mask: Mask, tokenizer: Any) -> None:
    """Print one document to stderr under a line that says where it comes from."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(
        f"--- document {number} ({place}): {len(tokens):,} tokens, {int(mask.sum()):,} supervised", markup=False
    )
    if tokenizer is None:
        console.print(" ".join(map(str, tokens[:200])), markup=False)
    else:
        console.print(document_text(tokens, mask, tokenizer, console.is_terminal))
