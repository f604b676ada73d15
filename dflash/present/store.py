"""Screens of the commands that look at a store or copy it: inspect-shard, verify, pack."""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import click

from dflash.present.parts import Result, number, percent, screen, seconds, size, table

MOST_ROWS = 12  # of a table, so that a screen stays one screen; --json has all
BARS = " ▁▂▃▄▅▆▇█"


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
        (
            each["row"],
            each["length"],
            each.get("supervised", ""),
            each.get("anchors", ""),
            _short_source(each.get("source"), 40),
        )
        for each in documents[:MOST_ROWS]
    ]
    more = f"  and {len(documents) - MOST_ROWS:,} more (--row shows one)" if len(documents) > MOST_ROWS else ""
    return screen(
        f"Shard {result.get('shard', config.shard)} of {result.get('store', 'a store')}",
        [
            ("bucket", _bucket(result)),
            ("rows", number(result.get("rows"))),
            ("tokens, padding", _padding(padding)),
            ("anchors available", number(result.get("anchors"))),
            ("labels = data", percent(labels.get("agreement"))),
            ("checksums", _checksums(result.get("checksums"))),
            *(("not finite", _short_source(f"{each.get('source')}, tap {each.get('tap')}", 58))
              for each in (result.get("bad") or ())[:3]),
        ],
        [
            table(("array", "dtype", "shape", "on disk"), arrays),
            _taps(result.get("taps")),
            "\n".join(
                part for part in (table(("row", "tokens", "supervised", "anchors", "source"), rows), more) if part
            ),
            _problems((result.get("checksums") or {}).get("problems")),
            *(_text(each) for each in documents),
        ],
    )  # fmt: skip


def _bucket(result: Result) -> str:
    ceiling = f", ceiling {result['ceiling']:,}" if result.get("ceiling") else ""
    return f"{result['bucket']}{ceiling}{', held out' * bool(result.get('held_out'))}" if result.get("bucket") else ""


def _padding(about: Result) -> str:
    return f"{number(about['tokens'])} tokens, {percent(about['share'])} padding" if about.get("tokens") else ""


def _taps(taps: Iterable[Mapping[str, Any]] | None) -> str:
    """Size of each tap and its spread over documents; a tap that nothing can be learned from stands out in red."""
    taps = list(taps or ())
    int8 = any("int8_error" in tap for tap in taps)
    head = ("tap", "rms", "least", "most", "non-finite", "zero rows", *(("int8 error",) if int8 else ()), "")
    rows, marks = [], []
    for tap in taps:
        marks.append(_fault(tap))
        figures = (f"{tap[name]:.4g}" if tap.get(name) is not None else "" for name in ("rms", "rms_min", "rms_max"))
        error = (f"{tap.get('int8_error', 0):.2%}",) if int8 else ()
        rows.append((tap["layer"], *figures, tap["nonfinite"], tap["zero_rows"], *error, marks[-1]))
    top, *lines = table(head, rows).splitlines() or [""]
    shown = [click.style(line, fg="red", bold=True) if mark else line for line, mark in zip(lines, marks, strict=True)]
    return "\n".join([top, *shown]) if rows else ""


def _fault(tap: Mapping[str, Any]) -> str:
    """What is wrong with a tap, in two words."""
    if tap.get("repeats") is not None:
        return f"repeats {tap['repeats']}"
    if tap.get("rms") == 0:
        return "all zero"
    return "non-finite" if tap["nonfinite"] else "zero rows" if tap["zero_rows"] else ""


def _store(result: Result, config: Any) -> str:
    missing, sample = result.get("missing") or (), result.get("sample") or {}
    buckets = [
        (each["name"], number(each["rows"]), f"{each['shards']:,} of {each['of_shards']:,}", number(each["tokens"]),
         percent(each["padding"]), size(each["bytes"]))
        for each in result.get("buckets") or ()
    ]  # fmt: skip
    lengths = [line for each in result.get("buckets") or () if (line := _histogram(each))]
    checksums = result.get("checksums") or sample.get("checksums") or {}
    looked = (
        f"  over {sample['rows']:,} rows of {sample['shards']:,} of {sample['of_shards']:,} shards" if sample else ""
    )
    taps = _taps(sample.get("taps"))
    return screen(
        f"Store {result.get('store', config.shard)}",
        [
            ("target", _short_source(result.get("target"), 58)),
            ("taps", "" if taps else ", ".join(map(str, result.get("taps") or ()))),
            ("storage, labels", ", ".join(filter(None, (result.get("storage"), result.get("labels"))))),
            *_arrays_of_store(sample.get("arrays") or {}),
            ("documents", number(result.get("documents"))),
            *(("from", f"{_short_source(each['file'], 30)}, lines {each['first_line']:,} to {each['last_line']:,}")
              for each in (result.get("sources") or ())[:3]),
            ("tokens", number(result.get("tokens"))),
            ("supervised", number(result.get("supervised_tokens"))),
            ("anchors available", number(result.get("anchors"))),
            ("labels = data", percent((sample.get("labels") or {}).get("agreement"))),
            ("on disk", size(result.get("bytes"))),
            ("shards", number(result.get("shards")) + (f", {len(missing):,} missing" if missing else "")),
            ("not finite", number(len(result.get("bad") or ())) if result.get("bad") else ""),
            ("checksums", _checksums(checksums)),
        ],
        [
            table(("bucket", "rows", "shards", "tokens", "padding", "on disk"), buckets),
            "\n".join(["  Lengths, up to the ceiling of each bucket:", *lengths]) if lengths else "",
            f"{taps}\n{looked}" if taps else "",
            _problems(checksums.get("problems")),
        ],
        "" if missing else f"dflash train --store {result.get('store', config.shard)} --run runs/first",
    )  # fmt: skip


def _arrays_of_store(arrays: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names, types and values per token of the arrays, a few a line."""
    words = [
        f"{name} {each['dtype']}" + "".join(f" x{n:,}" for n in each["shape"][2:]) for name, each in arrays.items()
    ]
    lines = textwrap.wrap(", ".join(words), 57, break_long_words=False)
    return [("arrays, a token" if i == 0 else "", line) for i, line in enumerate(lines)]


def _histogram(bucket: Mapping[str, Any]) -> str:
    """One line of bars, from the shortest documents that the bucket could hold to the longest."""
    bars = bucket.get("lengths") or ()
    most = max((bar["rows"] for bar in bars), default=0)
    if not most:
        return ""
    shown = "".join(BARS[-(-bar["rows"] * (len(BARS) - 1) // most)] for bar in bars)
    top = max(bars, key=lambda bar: bar["rows"])
    return f"  {bucket['name']:<6} {shown}  at most {top['rows']:,} rows, of {top['from']:,} to {top['to']:,} tokens"


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
