"""The page: tiles, charts and tables in one HTML file that opens without a network, in light and dark, at any width.

Every text from outside goes through `escape`; the charts' SVG comes from matplotlib, which escapes its own. There is no
script, and the page's own policy forbids any and every request.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dflash.present.parts import number, percent, size
from dflash.report.charts import Chart
from dflash.report.read import Run, StoreView

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --card: #f6f8fa; --ink: #1f2328; --faint: #59636e;
  --grid: #d9dee3; --mark: #fff3cd; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f1318; --card: #181d24; --ink: #e6e9ed; --faint: #9aa4af;
  --grid: #333b45; --mark: #4a3f1a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px 20px 48px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
p { margin: 0 0 12px; color: var(--faint); overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0 0; }
.tile, figure { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; }
.tile, figure { margin: 0; padding: 12px 14px; }
.tile b { display: block; font-size: 22px; line-height: 1.3; overflow-wrap: anywhere; }
.tile span, figcaption small { color: var(--faint); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px; }
figcaption { font-weight: 600; margin-bottom: 6px; overflow-wrap: anywhere; }
figcaption small { display: block; font-weight: 400; }
svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; margin: 0 0 16px; }
table { border-collapse: collapse; font-size: 14px; }
caption { text-align: left; font-weight: 600; padding: 0 0 6px; }
th, td { text-align: left; padding: 4px 20px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--faint); font-weight: 500; white-space: nowrap; }
td { font-variant-numeric: tabular-nums; max-width: 460px; overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right; white-space: nowrap; }
tr.differs td, tr.differs th { background: var(--mark); }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: list[Run], stores: list[StoreView], charts: list[Chart], made: str) -> str:
    """The whole document; `made` says when and by what."""
    names = [run.name for run in runs] or [store.name for store in stores]
    title = ("Runs " if len(runs) > 1 else "Run " if runs else "Store ") + ", ".join(names)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(made)}</p>",
        *([] if len(runs) != 1 else [_tiles(runs[0])]),
        *([_section("Side by side", _comparison(runs))] if len(runs) > 1 else []),
        _section("Charts", f'<div class="charts">{"".join(map(_figure, charts))}</div>' if charts else ""),
        _section("Evaluation sets", _evaluations(runs)),
        *(_section(f"Store {store.about['store']}", _store(store)) for store in stores),
        _section("Configuration", _settings("setting", {run.name: run.config for run in runs})),
        _section("Drafter", _settings("field", {run.name: _texts(run.drafter) for run in runs})),
        _section("Environment", _settings("", {run.name: run.environment for run in runs})),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(part for part in body if part) + "\n</body>\n</html>\n"


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _figure(chart: Chart) -> str:
    note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
    svg = chart.svg.replace("<svg ", f'<svg aria-label="{escape(chart.title)}" ', 1)
    return f"<figure><figcaption>{escape(chart.title)}{note}</figcaption>{svg}</figure>\n"


def _figures(run: Run) -> dict[str, str]:
    """What one looks for first."""
    best, loss = run.best, run.last.get("loss")
    length = best["acceptance_length"] if best else {}
    speed = run.series["tokens_per_second"].mean
    wait = run.series["data_wait"].mean
    return {
        "acceptance length, pooled": f"{length['pooled']:.2f}" if length else "",
        "mean over responses": f"{length['macro']:.2f}" if length.get("macro") is not None else "",
        "best at step": number(best["step"]) if best else "",
        "steps": number(run.last.get("step")),
        "loss of the last step": f"{loss:.3f}" if loss is not None else "",
        "tokens/s, typical": number(_middle(speed)),
        "waited for data": percent(_middle(wait)),
    }


def _middle(values: Any) -> float | None:
    return float(sorted(values)[len(values) // 2]) if len(values) else None


def _tiles(run: Run) -> str:
    tiles = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in _figures(run).items()
        if value
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _comparison(runs: list[Run]) -> str:
    figures = {run.name: _figures(run) for run in runs}
    head = next(iter(figures.values()))
    return _table(("run", *head), [(name, *each.values()) for name, each in figures.items()], numbers=True)


def _evaluations(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        for name, result in run.evaluations.items():
            length, speedup = result["acceptance_length"], result.get("speedup")
            verdicts = [f"{result[key]} {key}" for key in ("identical", "ties", "wrong") if result.get(key) is not None]
            rows.append((
                f"{name} · {run.name}" if len(runs) > 1 else name, f"{length['pooled']:.2f}",
                f"{length['macro']:.2f}" if length.get("macro") is not None else "",
                number(result.get("answers")), f"{speedup:.2f}" if speedup is not None else "",
                str(result.get("temperature", "")), ", ".join(verdicts),
            ))  # fmt: skip
    head = ("set", "pooled", "macro", "answers", "speed-up", "temperature", "output")
    return _table(head, rows, numbers=True)


def _store(store: StoreView) -> str:
    about = store.about
    facts = {
        "target": about["target"], "taps": ", ".join(map(str, about["taps"])), "hidden size": about["hidden_size"],
        "storage, labels": f"{about['storage']}, {about['labels']}", "documents": number(about["documents"]),
        "tokens": number(about["tokens"]), "supervised tokens": number(about["supervised_tokens"]),
        "on disk": size(about["bytes"]), "shards": number(about["shards"]),
        "shards missing": number(len(about["missing"])) if about["missing"] else "",
        "documents not finite": number(len(about["bad"])) if about["bad"] else "",
    }  # fmt: skip
    buckets = [
        (each["name"], number(each["rows"]), f"{each['shards']:,} of {each['of_shards']:,}", number(each["tokens"]),
         percent(each["padding"]), size(each["bytes"]))
        for each in about["buckets"]
    ]  # fmt: skip
    taps = [
        (each["layer"], f"{each['rms']:.4g}", f"{each['rms_min']:.4g}", f"{each['rms_max']:.4g}", each["nonfinite"],
         each["zero_rows"], "" if each["repeats"] is None else f"layer {each['repeats']}")
        for each in store.taps
    ]  # fmt: skip
    tap_head = ("layer", "RMS", "least row", "largest row", "non-finite", "zero rows", "repeats")
    return (
        _table((), [(name, str(value)) for name, value in facts.items() if value not in ("", None)])
        + _table(("bucket", "rows", "shards", "tokens", "padding", "on disk"), buckets, "Buckets", numbers=True)
        + _table(tap_head, taps, "Taps, in a few rows", numbers=True)
        + _table((), list(_flat(about.get("counts") or {})), "Counts by cause", numbers=True)
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested counts as dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            yield prefix + str(name), number(value) if plain else str(value)


def _settings(what: str, by_run: Mapping[str, Mapping[str, str]]) -> str:
    """A row a name, a column a run; rows in which runs differ come first and are marked."""
    names = list(dict.fromkeys(name for values in by_run.values() for name in values))
    differing = [name for name in names if len({values.get(name) for values in by_run.values()}) > 1]
    rows = [(name, *(values.get(name, "") for values in by_run.values())) for name in _first(differing, names)]
    return _table((what, *by_run) if len(by_run) > 1 else (), rows, marked=len(differing))


def _first(some: list[str], names: list[str]) -> list[str]:
    return some + [name for name in names if name not in some]


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: "" if value is None else str(value) for name, value in values.items()}


def _table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", numbers: bool = False, marked: int = 0
) -> str:
    """A table in a box that scrolls sideways by itself; empty without rows. Without a head the first column is one."""
    if not rows:
        return ""
    lines = ["<tr>" + "".join(f"<th>{escape(str(cell))}</th>" for cell in head) + "</tr>"] if head else []
    for place, row in enumerate(rows):
        first = "td" if head else "th"
        cells = f"<{first}>{escape(str(row[0]))}</{first}>" + "".join(f"<td>{escape(str(c))}</td>" for c in row[1:])
        mark = ' class="differs"' if place < marked else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="wide"><table{kind}>{title}\n' + "\n".join(lines) + "\n</table></div>\n"
