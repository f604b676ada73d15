"""Screens of the commands that look at a store or copy it: inspect-shard, verify, pack."""

from collections.abc import Iterable, Mapping
from typing import Any

import click

from dflash.present.parts import Result, number, percent, screen, seconds, size, table

MOST_ROWS = 12  # of a table, so that a screen stays one screen; --json has all


def inspect_shard(result: Result, config: Any) -> str:
    return _shard(result, config) if {"shard", "arrays"} & set(result) else _store(result, config)


def _shard(result: Result, config: Any) -> str:
    padding, labels = result.get("padding") or {}, result.get("labels") or {}
    arrays = [
        (name, each["dtype"], "x".join(map(str, each["shape"])), size(each.get("bytes")))
        for name, each in (result.get("arrays") or {}).items()
    ]
    documents = result.get("documents") or ()
    rows = [
        (each["row"], each["length"], each.get("supervised", ""), _short_source(each.get("source")))
        for each in documents[:MOST_ROWS]
    ]
    more = f"  and {len(documents) - MOST_ROWS:,} more (--row shows one)" if len(documents) > MOST_ROWS else ""
    return screen(
        f"Shard {result.get('shard', config.shard)} of {result.get('store', 'a store')}",
        [
            ("bucket", result.get("bucket")),
            ("rows", number(result.get("rows"))),
            ("tokens", number(padding.get("tokens"))),
            ("padding", percent(padding.get("share"))),
            ("labels = data", percent(labels.get("agreement"))),
            ("checksums", _checksums(result.get("checksums"))),
            ("not finite", ", ".join(str(each.get("source")) for each in result.get("bad") or ())),
        ],
        [
            table(("array", "dtype", "shape", "on disk"), arrays),
            table(("tap", "rms", "non-finite", "zero rows"), _taps(result)),
            "\n".join(part for part in (table(("row", "tokens", "supervised", "source"), rows), more) if part),
            _problems((result.get("checksums") or {}).get("problems")),
            *(_text(each) for each in documents),
        ],
    )


def _taps(result: Result) -> list[tuple[Any, ...]]:
    return [
        (each["layer"], f"{each['rms']:.4g}", each["nonfinite"], each["zero_rows"]) for each in result.get("taps") or ()
    ]


def _store(result: Result, config: Any) -> str:
    missing = result.get("missing") or ()
    buckets = [
        (each["name"], number(each["rows"]), f"{each['shards']:,} of {each['of_shards']:,}", number(each["tokens"]),
         percent(each["padding"]), size(each["bytes"]))
        for each in result.get("buckets") or ()
    ]  # fmt: skip
    return screen(
        f"Store {result.get('store', config.shard)}",
        [
            ("target", result.get("target")),
            ("taps", ", ".join(map(str, result.get("taps") or ()))),
            ("storage, labels", ", ".join(filter(None, (result.get("storage"), result.get("labels"))))),
            ("documents", number(result.get("documents"))),
            ("tokens", number(result.get("tokens"))),
            ("supervised", number(result.get("supervised_tokens"))),
            ("on disk", size(result.get("bytes"))),
            ("shards", number(result.get("shards")) + (f", {len(missing):,} missing" if missing else "")),
            ("not finite", number(len(result.get("bad") or ())) if result.get("bad") else ""),
            ("checksums", _checksums(result.get("checksums"))),
        ],
        [
            table(("bucket", "rows", "shards", "tokens", "padding", "on disk"), buckets),
            _problems((result.get("checksums") or {}).get("problems")),
        ],
        "" if missing else f"dflash train --store {result.get('store', config.shard)} --run runs/first",
    )


def _short_source(source: str | None, most: int = 44) -> str:
    source = source or ""
    return source if len(source) <= most else "…" + source[1 - most :]


def _checksums(about: Mapping[str, Any] | None) -> str:
    if not about:
        return ""
    checked = f" ({about['checked']} read)" if about.get("checked") else ""
    return ("all right" if about.get("ok") else f"{len(about.get('problems') or ()):,} problems") + checked


def _text(document: Mapping[str, Any]) -> str:
    """A row's text; the supervised part is in colour, and between « and » for a file or eyes that see none."""
    if not document.get("text"):
        return ""
    runs = [
        click.style(f"«{_visible(run['text'])}»", fg="green") if run["supervised"] else _visible(run["text"])
        for run in document["text"]
    ]
    return f"row {document['row']}, supervised between « and »:\n" + "".join(runs)


def _visible(text: str) -> str:
    """Control characters of the data must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _problems(problems: Iterable[Mapping[str, Any]] | None) -> str:
    problems = list(problems or ())
    rows = [
        (each.get("shard") or "", each.get("array") or "", "" if each.get("row") is None else each["row"],
         _short_problem(each.get("problem")))
        for each in problems[:MOST_ROWS]
    ]  # fmt: skip
    rest = len(problems) - MOST_ROWS
    return table(("shard", "array", "row", "problem"), rows) + (
        f"\n  and {rest:,} more (--json has all)" if rest > 0 else ""
    )


def _short_problem(text: str | None, most: int = 40) -> str:
    return "" if text is None else text if len(text) <= most else text[: most - 1] + "…"


def verify(result: Result, config: Any) -> str:
    problems, missing = result.get("problems") or (), result.get("missing") or ()
    if not result.get("ok"):
        title = f"Store has {len(problems):,} problem{'s' if len(problems) != 1 else ''}: {config.store}"
        following = f"dflash verify {config.store} --repair   (then `dflash extract` again)"
    else:
        title = f"Store is sound: {config.store}"
        following = f"dflash train --store {config.store} --run runs/first"
    if result.get("retired") or (result.get("ok") and missing):
        following = "the `dflash extract` line that made the store: it makes what is missing"
    return screen(
        title,
        [
            ("shards looked at", number(result.get("shards"))),
            ("missing", number(len(missing)) if missing else ""),
            ("retired", number(len(result["retired"])) if result.get("retired") else ""),
            ("taken into the index", number(len(result["rebuilt"])) if result.get("rebuilt") else ""),
            ("time", seconds(result)),
        ],
        [_problems(problems)],
        following,
    )


def pack(result: Result, config: Any) -> str:
    missing, packed = result.get("missing") or (), result.get("packed")
    out = result.get("out") or config.out
    return screen(
        f"Store packed: {out}",
        [
            ("from", result.get("store")),
            ("shards", number(result.get("shards")) + (f", {len(missing):,} missing in the source" if missing else "")),
            ("packed now", number(packed)),
            ("size of its files", size(result.get("file_bytes"))),
            ("with holes filled", f"{size(result['source_file_bytes'])} (what plain tar takes of the source)"
             if result.get("source_file_bytes") else ""),
            ("time", seconds(result) if packed else ""),
        ],
        next_command=f"dflash verify {out}",
    )  # fmt: skip
