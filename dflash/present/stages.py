"""Screens of the commands that make something: extract, train, export, eval, regenerate."""

import textwrap
from typing import Any

from dflash.present.parts import (
    LABEL,
    Result,
    counts,
    length,
    number,
    percent,
    rate,
    screen,
    seconds,
    size,
    table,
)
from dflash.progress import clock

LIMITS = {"gpu": "the target's forward", "disk": "the disk", "data": "preparing the batches"}


def extract(result: Result, config: Any, data: Any) -> str:
    forecast = config.dry_run
    documents, tokens = result.get("documents"), result.get("tokens")
    supervised = result.get("supervised_tokens")
    share = f" ({percent(supervised / tokens)} supervised)" if tokens and supervised is not None else ""
    made = result.get("made") != 0  # nothing was left to do: no speed to speak of
    buckets = [
        (each["ceiling"], number(each["rows"]), number(each["tokens"]), size(each.get("bytes")))
        for each in result.get("buckets", ())
    ]
    writing = (
        f"{clock(result['write_seconds'])} at {size(result['write_speed'])}/s" if result.get("write_speed") else ""
    )
    lost = counts(result.get("dropped_tokens"))
    workers = [
        (each["worker"], *(number(each[name]) for name in ("shards", "documents", "tokens")), size(each["bytes"]))
        for each in result.get("by_worker", ())
    ]
    return screen(
        _extract_title(result, config),
        [
            ("lines read", number(result.get("lines"))),
            ("documents", number(documents)),
            ("tokens", number(tokens) + share if tokens is not None else ""),
            ("rows", number(result.get("rows"))),
            ("dropped", counts(result.get("dropped"))),
            ("dropped tokens", f"{lost} of {number(result['tokens_in'])}" if lost else ""),
            ("on disk", size(result.get("bytes"))),
            ("writing takes", writing if forecast else ""),
            ("shards", number(result.get("shards"))),
            ("time", seconds(result) if made else ""),
            ("speed", rate(result.get("tokens_per_second")) if made else ""),
            ("limited by", LIMITS.get(result.get("limited_by", ""), "") if made else ""),
            ("waited", _waits(result) if made else ""),
            ("labels = data", percent(result.get("label_agreement"))),
        ],
        [
            table(("bucket", "rows", "tokens", "on disk"), buckets),
            table(("worker", "shards", "documents", "tokens", "on disk"), workers if len(workers) > 1 else ()),
        ],
        "the same line without --dry-run" if forecast else f"dflash train --store {config.store} --run runs/first",
    )


def _waits(result: Result) -> str:
    target, disk = result.get("gpu_wait"), result.get("disk_wait")
    if target is None or disk is None:
        return ""
    return f"the target {percent(target)} of the time for the disk, the disk {percent(disk)} for the target"


def _extract_title(result: Result, config: Any) -> str:
    if config.dry_run:
        return "Forecast; nothing was written"
    if result.get("missing"):
        return f"{result['missing']:,} shards of other workers are still missing: {config.store}"
    return f"Store complete: {config.store}"


def train(result: Result, config: Any) -> str:
    if result.get("dry_run"):
        return _dry_run(result, config)
    loss, wait, ranks = result.get("loss"), result.get("data_wait"), result.get("ranks", 1)
    return screen(
        f"Drafter trained: {config.run}",
        [
            ("steps", number(result.get("steps")) + _skipped(result.get("skipped"))),
            ("loss", f"{loss:.4f}" if loss is not None else ""),
            ("acceptance length", length(result.get("acceptance_length"))),
            ("", "simulated on held-out rows" if length(result.get("acceptance_length")) else ""),
            ("best", _best(result)),
            ("checkpoint", result.get("checkpoint")),
            ("time", seconds(result)),
            ("speed", rate(result.get("tokens_per_second")) + (f" on each of {ranks} processes" if ranks > 1 else "")),
            ("waited for data", percent(wait)),
        ],
        next_command=f"dflash export {config.run} --out drafter",
    )


def _skipped(count: int | None) -> str:
    return f", {count:,} updates skipped (nothing to learn, or not finite)" if count else ""


def _dry_run(result: Result, config: Any) -> str:
    rows = [
        (
            each["bucket"],
            f"{each['rows']} x {each['ceiling']}",
            number(each["anchors"]),
            f"{each['ms']:.1f}",
            size(each["peak"]),
            size(each["forecast"]),
        )
        for each in result["buckets"]
    ]
    forecast = result["forecast"]
    return screen(
        "Every bucket ran; nothing was written",
        [
            ("ready after", f"{result['ready_seconds']:.1f} s"),
            ("update", f"{result['update_ms']:.1f} ms"),
            ("memory", f"{size(result['peak'])}, forecast {size(forecast['device'])}"),
            ("given up", result["economy"]),
            ("pinned", size(forecast["pinned"]) if forecast["pinned"] else ""),
        ],
        [table(("bucket", "rows", "anchors", "ms", "memory", "forecast"), rows)],
        f"the same line without --dry-run trains into {config.run}",
    )


def _best(result: Result) -> str:
    best = result.get("best")
    return f"{length(best['acceptance_length'])}, at step {best['step']:,}" if best else ""


def export(result: Result, config: Any) -> str:
    out = result.get("out") or getattr(config, "out", None) or "drafter"
    return screen(
        f"Drafter exported: {out}",
        [
            ("layout", ", ".join(filter(None, (result.get("layout"), result.get("dtype"))))),
            *_from_step(result),
            ("target", result.get("target")),
            ("parameters", number(result.get("parameters"))),
            ("acceptance length", length(result.get("acceptance_length"))),
            ("checked", f"reloaded, logits compared on {on}" if (on := result.get("checked_on")) else ""),
            ("live target", _live(result.get("taps_checked"))),
        ],
        next_command=f"dflash eval --drafter {out} --target {result.get('target') or 'MODEL'} --prompts prompts.jsonl",
    )


def _live(checked: Result | None) -> str:
    return f"its taps are the stored states (off by {percent(checked['relative_error'])})" if checked else ""


def _from_step(result: Result) -> list[tuple[str, str]]:
    """Which step and why, on as many lines as it takes."""
    if result.get("step") is None:
        return []
    why = f" ({result['why']})" if result.get("why") else ""
    first, *rest = textwrap.wrap(f"step {result['step']:,}{why}", 80 - LABEL - 3)
    return [("from", first), *(("", line) for line in rest)]


def regenerate(result: Result, config: Any) -> str:
    kept = result.get("resumed")
    return screen(
        f"Answers written: {config.out}",
        [
            ("prompts", number(result.get("prompts"))),
            ("responses", number(result.get("responses")) + (f" ({kept:,} were there from before)" if kept else "")),
            ("new tokens", number(result.get("new_tokens"))),
            ("dropped", counts(result.get("dropped"))),
            ("time", seconds(result)),
            ("speed", rate(result.get("tokens_per_second"))),
        ],
        next_command=f"dflash extract --target {config.target or 'MODEL'} --data {config.out} --store store",
    )
