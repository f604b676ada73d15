"""The charts: what each shows of runs and stores. dflash/report/figure.py makes SVG and PNG of it."""

from dataclasses import dataclass
from typing import Any

from dflash.errors import DflashError
from dflash.report.figure import Draw, Palette, legend, logarithmic, nan, percent, png, short, svg
from dflash.report.read import Run, Series, StoreView

COLOURS = ("#2f7de1", "#e08a1e", "#1fa37a", "#d64550", "#8a63d2", "#17a2b8", "#c9509b", "#7f9a2e")

FIRST_TO_LAST = ("#2f7de1", "#9a5fd0", "#d64550", "#e08a1e")  # of the slots of a block


@dataclass(frozen=True)
class Chart:
    """One chart: `key` names its file, `note` explains what its title cannot."""

    key: str
    title: str
    svg: str
    png: bytes
    note: str = ""


def make_charts(runs: list[Run], stores: list[StoreView]) -> list[Chart]:
    """All charts that the data can fill."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise DflashError(
            "`dflash report` draws with matplotlib, which is missing; run pip install matplotlib."
        ) from None
    charts = []
    for key, title, draw, note in [*_run_charts(runs), *_slot_charts(runs), *_evaluations(runs), *_stores(stores)]:
        charts.append(Chart(key, title, svg(draw, key), png(draw, title, key), note))
    return charts


def _run_charts(runs: list[Run]) -> list[tuple[str, str, Draw, str]]:
    found = []
    for key, title, note in (
        ("loss", "Training loss", "Lines are means of neighbouring steps, the shade their range."),
        ("lr", "Learning rate", ""),
        ("tokens_per_second", "Throughput, tokens/s of a process", "Valid context tokens; padding does not count."),
        (
            "data_wait",
            "Share of a step spent waiting for data",
            "Above a few percent the disk or the reader is the limit.",
        ),
    ):
        if any(len(run.series[key].step) for run in runs):
            found.append((key, title, _over_steps([(run.name, run.series[key]) for run in runs], key), note))
    if any(run.best for run in runs):
        note = "Simulated on held-out rows as a server would decode; 1 means no help."
        found.append(("acceptance", "Acceptance length on held-out rows", _acceptance(runs), note))
    return found


def _over_steps(series: list[tuple[str, Series]], key: str) -> Draw:
    def draw(axes: Any, palette: Palette) -> None:
        for colour, (_, one) in zip(COLOURS, series, strict=False):
            axes.plot(one.step, one.mean, color=colour, linewidth=1.6)
            if key == "loss":
                axes.fill_between(one.step, one.low, one.high, color=colour, alpha=0.18, linewidth=0)
        low = min((float(one.mean.min()) for _, one in series if len(one.mean)), default=0.0)
        high = max((float(one.mean.max()) for _, one in series if len(one.mean)), default=0.0)
        if key == "loss" and low > 0 and high / low > 10:
            logarithmic(axes)
        elif key != "loss":
            axes.set_ylim(bottom=0)
        if key == "data_wait":
            axes.set_ylim(0, max(0.05, 1.1 * high))
            axes.yaxis.set_major_formatter(percent())
        axes.set_xlabel("step")
        legend(axes, palette, [name for name, _ in series])

    return draw


def _acceptance(runs: list[Run]) -> Draw:
    def draw(axes: Any, palette: Palette) -> None:
        for colour, run in zip(COLOURS, runs, strict=False):
            points = [
                (each["step"], each["acceptance_length"]["pooled"])
                for each in run.validations
                if each["acceptance_length"].get("pooled") is not None
            ]
            axes.plot(
                *(zip(*points, strict=True) if points else ([], [])),
                color=colour,
                linewidth=1.6,
                marker="o",
                markersize=3,
            )
        axes.set_ylim(bottom=1)
        axes.set_xlabel("step")
        legend(axes, palette, [run.name for run in runs])

    return draw


def _slot_charts(runs: list[Run]) -> list[tuple[str, str, Draw, str]]:
    found = []
    note = "Share of the blocks whose drafts are right up to that slot, on the rows that are trained on."
    for number, run in enumerate(run for run in runs if run.slots):
        of = f" · {run.name}" if len(runs) > 1 else ""
        key = "slots" if len(runs) == 1 else f"slots_{number}"
        found.append((key, f"Accepted up to each slot, in training{of}", _slots(run.slots), note))
    last = [(run.name, run.best["per_slot"]) for run in runs if run.best and run.best.get("per_slot")]
    if last:
        note = "Solid: all drafts up to the slot accepted. Dashed: the slot's own, where the one before it was."
        found.append(("per_slot", "Acceptance of each slot, best validation", _per_slot(last), note))
    return found


def _slots(slots: list[Series]) -> Draw:
    def draw(axes: Any, palette: Palette) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        colours = LinearSegmentedColormap.from_list("slots", FIRST_TO_LAST)
        named = {0, 1, 3, 7, len(slots) - 1}
        for slot, one in enumerate(slots):
            colour = colours(slot / max(1, len(slots) - 1))
            label = f"slot {slot + 1}" if slot in named else None
            axes.plot(one.step, one.mean, color=colour, linewidth=1.2, label=label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(percent())
        axes.set_xlabel("step")
        axes.legend(frameon=False, fontsize=9, labelcolor=palette.ink)

    return draw


def _per_slot(runs: list[tuple[str, list[dict[str, Any]]]]) -> Draw:
    def draw(axes: Any, palette: Palette) -> None:
        for colour, (_, slots) in zip(COLOURS, runs, strict=False):
            numbers = [each["slot"] for each in slots]
            for name, style in (("acceptance", "-"), ("conditional", "--")):
                axes.plot(
                    numbers, [nan(each.get(name)) for each in slots], color=colour, linestyle=style, linewidth=1.6
                )
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(percent())
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("slot")
        legend(axes, palette, [name for name, _ in runs], lines_each=2)

    return draw


def _evaluations(runs: list[Run]) -> list[tuple[str, str, Draw, str]]:
    names = list(dict.fromkeys(name for run in runs for name in run.evaluations))
    if not names:
        return []
    return [("evaluations", "Acceptance length by evaluation set", _bars(runs, names), "Pooled over all passes.")]


def _bars(runs: list[Run], names: list[str]) -> Draw:
    def draw(axes: Any, palette: Palette) -> None:
        height = 0.8 / len(runs)
        for number, (colour, run) in enumerate(zip(COLOURS, runs, strict=False)):
            at = [place + number * height for place, name in enumerate(names) if name in run.evaluations]
            values = [run.evaluations[name]["acceptance_length"]["pooled"] for name in names if name in run.evaluations]
            axes.barh(at, values, height=0.9 * height, color=colour)
            for y, value in zip(at, values, strict=True):
                axes.text(value, y, f" {value:.2f}", va="center", fontsize=9, color=palette.ink)
        axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], [short(name) for name in names])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.grid(axis="y", visible=False)
        # inside it would cover a bar's figure, above it the title
        below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.08), "ncols": 2}
        legend(axes, palette, [run.name for run in runs], **below)

    return draw


def _stores(stores: list[StoreView]) -> list[tuple[str, str, Draw, str]]:
    found = []
    for number, store in enumerate(stores):
        suffix = f"_{number}" if len(stores) > 1 else ""
        of = f" · {store.name}" if len(stores) > 1 else ""
        note = "Dotted: the buckets' ceilings, to which rows are padded."
        found.append((f"lengths{suffix}", f"Lengths of the documents, tokens{of}", _lengths(store), note))
        if store.taps:
            note = "Of a few rows spread over the store; the line spans the rows. A tap near zero teaches nothing."
            found.append((f"taps{suffix}", f"RMS of each tap, by layer{of}", _taps(store), note))
    return found


def _lengths(store: StoreView) -> Draw:
    def draw(axes: Any, palette: Palette) -> None:
        axes.hist(store.lengths, bins=40, color=COLOURS[0])
        for ceiling in sorted({each["ceiling"] for each in store.about["buckets"]}):
            axes.axvline(ceiling, color=palette.faint, linewidth=0.9, linestyle=":")
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens")
        axes.set_ylabel("documents")

    return draw


def _taps(store: StoreView) -> Draw:
    def draw(axes: Any, palette: Palette) -> None:
        places = range(len(store.taps))
        rms = [each["rms"] for each in store.taps]
        spans = [[max(0.0, rms[i] - store.taps[i]["rms_min"]) for i in places],
                 [max(0.0, store.taps[i]["rms_max"] - rms[i]) for i in places]]  # fmt: skip
        axes.bar(places, rms, yerr=spans, color=COLOURS[2], ecolor=palette.faint, width=0.6)
        axes.set_xticks(list(places), [str(each["layer"]) for each in store.taps])
        axes.set_xlabel("decoder layer")

    return draw
