"""Settings of `dflash report`. Imports nothing heavy."""

from dataclasses import dataclass

from dflash.config import REQUIRED, setting
from dflash.errors import DflashError

MOST_SOURCES = 8  # that one chart tells apart


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Which runs and stores to show, and where the page goes."""

    sources: tuple[str, ...] = setting(
        REQUIRED, "Run folders, to compare side by side, and stores.", metavar="RUN|STORE...", positional=True
    )
    out: str | None = setting(
        None, "The HTML file, its charts as PNG beside it; RUN/report.html of a single run, else report.html."
    )

    def __post_init__(self) -> None:
        if not 0 < len(self.sources) <= MOST_SOURCES:
            raise DflashError(
                f"A report shows 1 to {MOST_SOURCES} runs and stores, not {len(self.sources)}; name fewer."
            )
        if self.out is not None and not self.out.endswith(".html"):
            raise DflashError(f"--out {self.out} is no name of a page; give one that ends in .html.")
