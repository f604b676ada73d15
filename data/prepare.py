"""Conversations -> docs/ and plan.npz: what extraction needs to know before the target is loaded.

One pass over the data writes every document to disk as it comes; in memory stay some 30 bytes a document and 150 a
conversation (its digest, against duplicates). Every line that does not end up in a row is counted by cause, so that
lines = conversations + dropped, and so are tokens.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.data.config import DataConfig
from dflash.data.conversations import BadLineError
from dflash.data.render import NO_ANSWER, Renderer
from dflash.data.show import show_document
from dflash.data.sources import Source, combine_digests, open_source
from dflash.data.tokenise import CUT_OFF, TRUNCATED, Fitted, Job, Outcome, Tokeniser, chunks_of
from dflash.errors import DflashError
from dflash.progress import progress
from dflash.store import DocumentsWriter, Plan, PlanRows, Prepared, bucket_name

MIN_HELD_OUT, MAX_HELD_OUT = 8, 1024
DUPLICATE = "duplicate"


@dataclass
class Tally:
    """What is known of the rows to be, one entry a document; `keys` has one 16-byte entry a conversation."""

    conversation: array = field(default_factory=lambda: array("q"))
    file: array = field(default_factory=lambda: array("i"))
    line: array = field(default_factory=lambda: array("q"))
    length: array = field(default_factory=lambda: array("i"))
    supervised: array = field(default_factory=lambda: array("i"))
    keys: bytearray = field(default_factory=bytearray)
    seen: set[bytes] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_documents: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    template_args: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    lines: int = 0
    digests: list[str] = field(default_factory=list)

    @property
    def conversations(self) -> int:
        return len(self.keys) // 16

    def end_source(self, source: Source) -> None:
        self.lines += source.count
        self.digests.append(source.digest())


def prepare(
    config: DataConfig, tokenizer: Any, folder: Path, stop_ids: Iterable[int], vocab_size: int | None = None
) -> Prepared:
    """Write `folder`/docs and `folder`/plan.npz. `tokenizer` may be None where every line holds token ids.

    `vocab_size`, the rows of the target's embedding, lets token ids be checked.
    """
    renderer = Renderer(
        tokenizer=tokenizer,
        turns=config.turns,
        template_args=config.template_args,
        stop_ids=frozenset(stop_ids),
        vocab_size=vocab_size,
    )
    tally = Tally()
    writer = DocumentsWriter(folder / "docs")
    job = Job(renderer, max(config.buckets))
    try:
        with progress("preparing", None, "lines") as advance, Tokeniser(job) as tokeniser:
            for number, path in enumerate(config.data):
                source = open_source(path)
                for outcome in tokeniser.outcomes(chunks_of(source, number)):
                    _add(outcome, number, renderer, config, writer, tally)
                    advance(1)
                tally.end_source(source)
    finally:
        documents = writer.close()
    assert tally.lines == tally.conversations + sum(tally.dropped.values()), "a line is neither kept nor counted"
    if not tally.conversations:
        raise DflashError(_nothing_supervised(config, tally))
    held_out = choose_held_out(bytes(tally.keys), config.holdout)
    plan = Plan(files=tuple(config.data), rows=make_rows(tally, held_out, config.buckets, config.seed))
    plan.save(folder / "plan.npz")
    return Prepared(
        folder=folder,
        documents=documents,
        plan=plan,
        counts=_counts(tally, held_out),
        fingerprints={"data": combine_digests(tally.digests), **_tokenizer_fingerprints(tokenizer)},
        template_args=dict(config.template_args),
        sources=tuple(config.data),
    )


def _add(
    outcome: Outcome, file: int, renderer: Renderer, config: DataConfig, writer: DocumentsWriter, tally: Tally
) -> None:
    """Write the line's documents, or count why there are none."""
    place = f"{config.data[file]}, line {outcome.line}"
    if outcome.digest and outcome.digest in tally.seen:
        tally.dropped[DUPLICATE] += 1
        lost = sum(len(tokens) for tokens, *_ in outcome.documents) + outcome.beyond
        tally.dropped_tokens[DUPLICATE] += lost + sum(tokens for _, tokens in outcome.lost)
        return
    if outcome.digest:
        tally.seen.add(outcome.digest)
    if outcome.problem and not config.skip_bad:
        raise BadLineError(outcome.cause, outcome.problem).at(place)
    for cause, tokens in outcome.lost:
        tally.dropped_tokens[cause] += tokens
    if outcome.cause:
        tally.dropped[outcome.cause] += 1
        return
    tally.template_args[outcome.args] += 1
    tally.dropped_documents.update(cause for cause, _ in outcome.lost)
    tally.dropped_tokens[TRUNCATED] += outcome.beyond
    for document in outcome.documents:
        _write(file, outcome.line, document, writer, tally)
        if len(tally.length) <= config.show:
            show_document(len(tally.length) - 1, place, *document[:2], renderer.tokenizer)
    tally.keys += outcome.opening + outcome.digest[:8]


def _write(file: int, line: int, document: Fitted, writer: DocumentsWriter, tally: Tally) -> None:
    tokens, mask, cut = document
    writer.add(tokens, mask)
    tally.conversation.append(tally.conversations)
    tally.file.append(file)
    tally.line.append(line)
    tally.length.append(len(tokens))
    tally.supervised.append(int(mask.sum()))
    tally.truncated += cut


def choose_held_out(keys: bytes, share: float) -> NDArray[np.bool_]:
    """Which conversations are held out: those with the smallest hashes, whatever their order in the data.

    The hash of what comes before the first answer leads, so that several answers to one prompt stay on one side.
    """
    hashes = np.frombuffer(keys, dtype=">u8").reshape(-1, 2)
    count = len(hashes)
    chosen = np.zeros(count, np.bool_)
    if share > 0:
        number = min(max(round(share * count), MIN_HELD_OUT), MAX_HELD_OUT, count // 10)
        chosen[np.lexsort((hashes[:, 1], hashes[:, 0]))[:number]] = True
    return chosen


def make_rows(tally: Tally, held_out: NDArray[np.bool_], buckets: tuple[int, ...], seed: int) -> dict[str, PlanRows]:
    """The rows of every bucket that has some, in an order that depends on seed, bucket and document only."""
    ceilings = np.array(sorted(buckets), np.int64)
    length, conversation = np.array(tally.length, np.int32), np.array(tally.conversation, np.int64)
    bucket = np.searchsorted(ceilings, length)
    held = held_out[conversation]
    rows = {}
    for number, ceiling in enumerate(ceilings.tolist()):
        for is_held in (False, True):
            documents = np.flatnonzero((bucket == number) & (held == is_held)).astype(np.int64)
            if not len(documents):
                continue
            documents = documents[np.argsort(hash_documents(seed, ceiling, documents), kind="stable")]
            rows[bucket_name(ceiling, is_held)] = PlanRows(
                document=documents,
                conversation=conversation[documents],
                file=np.array(tally.file, np.int32)[documents],
                line=np.array(tally.line, np.int64)[documents],
                length=length[documents],
                supervised=np.array(tally.supervised, np.int32)[documents],
            )
    return rows


def hash_documents(seed: int, ceiling: int, documents: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A stateless hash (splitmix64's finaliser, chained), the same on every machine."""
    state = splitmix64(np.array([seed], np.uint64))
    state = splitmix64(state ^ np.array([ceiling], np.uint64))
    return splitmix64(state ^ documents.astype(np.uint64))


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _counts(tally: Tally, held_out: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        "lines": tally.lines,
        "conversations": tally.conversations,
        "documents": len(tally.length),
        "tokens": sum(tally.length),
        "supervised_tokens": sum(tally.supervised),
        "truncated": tally.truncated,
        "dropped": dict(sorted(tally.dropped.items())),
        "dropped_documents": dict(sorted(tally.dropped_documents.items())),  # of conversations that are kept
        "template_args": _own_args(tally),
        "dropped_tokens": {cause: n for cause, n in sorted(tally.dropped_tokens.items()) if n},
        "held_out": {
            "conversations": int(held_out.sum()),
            "documents": int(held_out[np.array(tally.conversation, np.int64)].sum()),
        },
    }


def _own_args(tally: Tally) -> dict[str, int]:
    """Conversations by template arguments (as JSON) that their lines brought; "" for those of --template-args alone."""
    return dict(tally.template_args.most_common()) if set(tally.template_args) - {""} else {}


def _tokenizer_fingerprints(tokenizer: Any) -> dict[str, str]:
    if tokenizer is None:
        return {"tokenizer": "", "template": ""}
    from dflash.target import template_fingerprint, tokenizer_fingerprint

    return {"tokenizer": tokenizer_fingerprint(tokenizer), "template": template_fingerprint(tokenizer)}


def _nothing_supervised(config: DataConfig, tally: Tally) -> str:
    names = ", ".join(config.data)
    if not tally.lines:
        return f"{names} holds no lines; give --data a file with a conversation on each line."
    causes = ", ".join(f"{cause} {number:,}" for cause, number in sorted(tally.dropped.items()))
    if tally.dropped[NO_ANSWER]:
        advice = "have the target answer the prompts first with `dflash regenerate`."
    elif tally.dropped[CUT_OFF]:
        advice = f"the answers begin beyond {max(config.buckets):,} tokens, so give --buckets a larger ceiling."
    else:
        advice = "look at what the chat template makes of them."
    return f"Nothing in {names} is supervised ({tally.lines:,} lines, dropped: {causes}); {advice}"
