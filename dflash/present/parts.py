"""The parts that screens are put together from: labelled lines, tables, numbers as people read them."""

from collections.abc import Iterable, Mapping
from typing import Any

from dflash.progress import clock

Result = Mapping[str, Any]
LABEL = 20  # width of the left column


def screen(title: str, lines: Iterable[tuple[str, Any]], tables: Iterable[str] = (), next_command: str = "") -> str:
    """A title, labelled lines (those without a value are left out), tables, the next command."""
    shown = [f"  {label:<{LABEL}} {value}" for label, value in lines if value not in (None, "", {}, [])]
    blocks = ["\n".join([title, *shown]), *(table for table in tables if table)]
    if next_command:
        blocks.append(f"Next:\n  {next_command}")
    return "\n\n".join(blocks)


def table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    """Columns as wide as they must be, numbers to the right; empty without rows."""
    texts = [tuple(str(cell) for cell in row) for row in rows]
    if not texts:
        return ""
    widths = [max(len(row[column]) for row in [head, *texts]) for column in range(len(head))]
    lines = []
    for row in [head, *texts]:
        cells = [f"{row[0]:<{widths[0]}}"] + [f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def size(count: float | None) -> str:
    """Bytes in decimal units, as disks are sold and `--budget` counts."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"


def number(value: float | None) -> str:
    """A count or a rate with thousands separated; small ones keep a decimal."""
    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) and abs(value) < 100 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def rate(value: float | None) -> str:
    return "" if value is None else f"{number(value)} tokens/s"


def length(pair: Mapping[str, float | None] | None) -> str:
    """An acceptance length with its two ways of averaging."""
    if not pair or pair.get("pooled") is None:
        return ""
    macro = pair.get("macro")
    return f"{pair['pooled']:.2f} pooled" + (f", {macro:.2f} mean over responses" if macro is not None else "")


def counts(by_cause: Mapping[str, int] | None) -> str:
    return ", ".join(f"{cause} {n:,}" for cause, n in (by_cause or {}).items() if n)


def seconds(result: Result) -> str:
    return clock(result["seconds"]) if result.get("seconds") is not None else ""
