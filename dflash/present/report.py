"""The screen of `dflash report`."""

from pathlib import Path
from typing import Any

from dflash.present.parts import Result, screen


def report(result: Result, config: Any) -> str:
    page, charts = result.get("page", "report.html"), result.get("charts")
    return screen(
        f"Report written: {page}",
        [
            ("runs", ", ".join(result.get("runs", ()))),
            ("stores", ", ".join(result.get("stores", ()))),
            ("charts", f"{len(charts)} PNG files in {Path(charts[0]).parent}" if charts else ""),
        ],
        next_command=f"xdg-open {page}   (or any browser; it needs no network)",
    )
