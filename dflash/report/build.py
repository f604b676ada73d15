"""The command: read, draw, write the page and its charts, each file whole or not there."""

import time
from pathlib import Path
from typing import Any

import dflash
from dflash.errors import DflashError
from dflash.files import write_atomically
from dflash.report.charts import make_charts
from dflash.report.config import ReportConfig
from dflash.report.page import page
from dflash.report.read import Run, read_sources


def report(config: ReportConfig) -> dict[str, Any]:
    """Write the page; returns where it and its charts lie."""
    runs, stores = read_sources(config.sources)
    out = page_path(config, runs)
    charts = make_charts(runs, stores)
    made = f"Made by dflash {dflash.__version__} on {time.strftime('%Y-%m-%d %H:%M')} from {', '.join(config.sources)}."
    folder = out.with_suffix("")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DflashError(f"{folder} cannot be made ({error.strerror}); name another page with --out.") from None
    for chart in charts:
        write_atomically(folder / f"{chart.key}.png", chart.png)
    write_atomically(out, page(runs, stores, charts, made))
    return {
        "page": str(out),
        "charts": [str(folder / f"{chart.key}.png") for chart in charts],
        "runs": [str(run.folder) for run in runs],
        "stores": [store.about["store"] for store in stores],
    }


def page_path(config: ReportConfig, runs: list[Run]) -> Path:
    if config.out is not None:
        return Path(config.out)
    return runs[0].folder / "report.html" if len(runs) == 1 else Path("report.html")
