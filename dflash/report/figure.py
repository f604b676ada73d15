"""How a chart comes out: one drawing as SVG for the page and as PNG, and what drawings share.

In the SVG every colour is a CSS variable and all text stays text, so that the page follows the reader's light or dark
theme, and names from outside pass through matplotlib's XML writer, which escapes them. The PNG has a white ground.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

INCHES = (4.8, 2.9)


@dataclass(frozen=True)
class Palette:
    """Colours of text, of what is less important, and of lines behind the data."""

    ink: str
    faint: str
    grid: str


PRINTED = Palette("#1f2328", "#59636e", "#d9dee3")
STANDINS = Palette("#010101", "#020202", "#030303")  # replaced in the SVG by the page's variables
VARIABLES = {STANDINS.ink: "var(--ink)", STANDINS.faint: "var(--faint)", STANDINS.grid: "var(--grid)"}

Draw = Callable[[Any, Palette], None]  # onto matplotlib's axes


def svg(draw: Draw, key: str) -> str:
    """The chart as an element to put into a page: colours as variables, no ids that two charts share."""
    out = io.StringIO()
    with _figure(draw, STANDINS, key) as figure:
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)


def png(draw: Draw, title: str, key: str) -> bytes:
    out = io.BytesIO()
    with _figure(draw, PRINTED, key) as figure:
        figure.axes[0].set_title(title, fontsize=11, loc="left")
        figure.savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return out.getvalue()


@contextmanager
def _figure(draw: Draw, palette: Palette, key: str) -> Iterator[Any]:
    """A drawn figure; no window system and none of pyplot's global state. `key` makes the SVG's ids its own."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 10, "font.family": "sans-serif", "text.parse_math": False, "svg.fonttype": "none",
        "svg.hashsalt": key, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "axes.axisbelow": True, "axes.facecolor": "none", "axes.edgecolor": palette.grid, "grid.color": palette.grid,
        "grid.linewidth": 0.7, "text.color": palette.ink, "axes.labelcolor": palette.faint,
        "xtick.color": palette.faint, "ytick.color": palette.faint, "axes.formatter.useoffset": False,
    }  # fmt: skip
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks
        figure = Figure(figsize=INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot(), palette)
        yield figure


def legend(axes: Any, palette: Palette, names: list[str], lines_each: int = 1, **where: Any) -> None:
    """Who is who, where there is more than one; where it covers least, or `where` it is said."""
    if len(names) > 1:
        handles = [*axes.get_lines()[::lines_each], *axes.containers][: len(names)]
        shown = [f" {short(name)}" for name in names]
        axes.legend(handles, shown, frameon=False, fontsize=9, labelcolor=palette.ink, **where)


def logarithmic(axes: Any) -> None:
    """A logarithmic scale with plain numbers on it."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=None)


def short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def nan(value: float | None) -> float:
    return float("nan") if value is None else value
