"""The screen of eval: acceptance with its intervals, what it buys, and where it is won and lost."""

import io
from collections.abc import Iterable, Mapping
from typing import Any

from dflash.present.parts import Result, number, percent, rate, screen

WIDTH = 80
MOST_CATEGORIES = 8
BAR = 16  # columns of the longest bar


def eval(result: Result, config: Any) -> str:
    simulated = result.get("simulated")
    lossless = result.get("lossless")
    return screen(
        f"Drafter {'simulated' if simulated else 'evaluated'}: {config.drafter}",
        [
            ("store" if simulated else "prompts", _asked(result)),
            ("acceptance length", _length(result)),
            ("", "tokens a forward of the target, 95 % intervals" if _length(result) else ""),
            ("with the drafter", _speed(result)),
            ("without it", rate(result.get("baseline_tokens_per_second"))),
            ("output", _output(result)),
            ("repeated 8-grams", _repeated(result.get("repeated_ngrams"))),
            ("labels = data", _agreement(result)),
        ],
        [
            _side_by_side(_slots(result.get("per_slot")), _histogram(result.get("histogram"))),
            _side_by_side(_categories(result.get("by_category")), _contexts(result.get("by_context"))),
            _comparison(result),
        ],
        _next(config, lossless),
    )


def _next(config: Any, lossless: bool | None) -> str:
    if lossless:
        return f"serve the target with the drafter in {config.drafter}; its README.md has the commands"
    return ""


def _asked(result: Result) -> str:
    if result.get("simulated"):
        rows, answers = number(result.get("rows")), number(result.get("answers"))
        return f"{result.get('store')}: {rows} held-out rows, {answers} answers"
    if result.get("prompts") is None:
        return ""
    parts = [f"{result['prompts']:,}"]
    if result.get("answers") not in (None, result["prompts"]):
        parts.append(f"{result['answers']:,} answers")
    if result.get("tokens") is not None:
        parts.append(f"{result['tokens']:,} new tokens")
    if result.get("temperature") is not None:
        parts.append("greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}")
    return ", ".join(parts)


def _length(result: Result) -> str:
    """Both means with their 95 % intervals."""
    found, intervals = result.get("acceptance_length") or {}, result.get("acceptance_length_ci") or {}
    names = {"pooled": "pooled", "macro": "macro"}
    parts = [
        f"{found[key]:.2f} {name}{_between(intervals.get(key))}"
        for key, name in names.items()
        if found.get(key) is not None
    ]
    return ", ".join(parts)


def _between(interval: Iterable[float] | None) -> str:
    if not interval:
        return ""
    low, high = interval
    return f" ({low:.2f} to {high:.2f})"


def _speed(result: Result) -> str:
    speedup = result.get("speedup")
    return rate(result.get("tokens_per_second")) + (f", {speedup:.2f} times as fast" if speedup is not None else "")


def _output(result: Result) -> str:
    same = ", ".join(f"{key} {result[key]:,}" for key in ("identical", "ties", "wrong") if result.get(key) is not None)
    lossless = result.get("lossless")
    if lossless is None:
        return same
    verdict = "the target's own" if lossless else "NOT the target's own: see `wrong`"
    return f"{same}: {verdict}" if same else verdict


def _repeated(found: Mapping[str, Any] | None) -> str:
    if not found or found.get("share") is None:
        return ""
    loops = found.get("looping_answers") or 0
    return percent(found["share"]) + (f", {loops:,} answers loop and flatter the figure" if loops else "")


def _agreement(result: Result) -> str:
    if not result.get("simulated"):
        return ""
    share = "no labels in the store" if result.get("label_agreement") is None else percent(result["label_agreement"])
    return share + (
        ": indicative only, these are not the target's own answers"
        if result.get("indicative")
        else ": what a server would show"
    )


# --- tables, as (head, rows)

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _slots(slots: Iterable[Mapping[str, Any]] | None) -> Table:
    rows: list[tuple[str, ...]] = [
        (str(each["slot"]), percent(each.get("acceptance")), percent(each.get("conditional"))) for each in slots or ()
    ]
    return ("slot", "accepted", "if all before"), rows


def _histogram(bins: Iterable[Mapping[str, Any]] | None) -> Table:
    bins = list(bins or ())
    top = max((each["share"] for each in bins), default=0) or 1
    rows: list[tuple[str, ...]] = [
        (str(each["length"]), percent(each["share"]), "█" * round(BAR * each["share"] / top)) for each in bins
    ]
    return ("tokens", "cycles", ""), rows


def _categories(found: Iterable[Mapping[str, Any]] | None) -> Table:
    parts = [each for each in found or () if each.get("pooled") is not None]
    rows: list[tuple[str, ...]] = [
        (_short(each["category"]), f"{each['pooled']:.2f}", _between(each.get("pooled_ci")).strip(" ()"))
        for each in parts[:MOST_CATEGORIES]
    ]
    if len(parts) > MOST_CATEGORIES:
        rows.append((f"and {len(parts) - MOST_CATEGORIES} more", "", ""))
    return ("category", "pooled", "95 %"), rows if len(parts) > 1 else []


def _contexts(found: Iterable[Mapping[str, Any]] | None) -> Table:
    parts = list(found or ())
    rows: list[tuple[str, ...]] = [
        (f"{each['from']:,} to {each['to']:,}", f"{each['pooled']:.2f}", number(each["cycles"])) for each in parts
    ]
    return ("tokens before", "pooled", "cycles"), rows if len(parts) > 1 else []


def _comparison(result: Result) -> str:
    """Two drafters on the same prompts: what differs, with its interval."""
    other = result.get("compare")
    if not other:
        return ""
    difference = other.get("difference") or {}
    rows: list[tuple[str, ...]] = [("this one", *_row(result)), (_short(str(other.get("drafter")), 24), *_row(other))]
    gaps = [
        f"{gap} {key}"
        for key in ("pooled", "macro")
        if (gap := _signed(difference.get(key), difference.get(f"{key}_ci")))
    ]
    counts = [f"{name} on {difference[name]:,}" for name in ("better", "equal", "worse") if name in difference]
    table = _side_by_side((("drafter", "pooled", "macro", "speed"), rows))
    lines = [f"difference {', '.join(gaps)}"] if gaps else []
    lines += [f"{', '.join(counts)} prompts"] if counts else []
    return "\n  ".join([table, *lines])


def _row(result: Result) -> tuple[str, str, str]:
    found = result.get("acceptance_length") or {}
    lengths = [f"{found[key]:.2f}" if found.get(key) is not None else "" for key in ("pooled", "macro")]
    return lengths[0], lengths[1], rate(result.get("tokens_per_second"))


def _signed(value: float | None, interval: Iterable[float] | None) -> str:
    if value is None:
        return ""
    low_high = f" ({' to '.join(f'{each:+.2f}' for each in interval)})" if interval else ""
    return f"{value:+.2f}{low_high}"


def _short(text: str, most: int = 18) -> str:
    return text if len(text) <= most else "…" + text[1 - most :]


def _side_by_side(*tables: Table) -> str:
    """Tables beside one another as plain text, those without rows left out."""
    shown = [table for table in tables if table[1]]
    if not shown:
        return ""
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as RichTable

    grid = RichTable.grid(padding=(0, 3))
    made = []
    for head, rows in shown:
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for place, name in enumerate(head):
            table.add_column(name, justify="left" if (place == 0 and not rows[0][0].isdigit()) or not name else "right")
        for row in rows:
            table.add_row(*row)
        made.append(table)
        grid.add_column()
    grid.add_row(*made)
    out = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
    out.print(Padding(grid, (0, 0, 0, 2)))
    assert isinstance(out.file, io.StringIO)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines()).strip("\n")
