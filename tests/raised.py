"""Every error that the program can raise, from the syntax trees; and every one that was raised while the tests ran.

`watch` is called by conftest.py. An error made in another process is not seen.
"""

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.errors import DflashError, DiskFullError, Interrupted

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("dflash", "data", "extract", "train")
ERRORS = tuple(error.__name__ for error in (DflashError, DiskFullError, Interrupted))


@dataclass(frozen=True)
class Site:
    """A place that makes an error: `template` is its message with {expressions} where the values go."""

    file: str  # below the repository
    first: int  # lines
    last: int
    template: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first} {self.template}"


def sites() -> Iterator[Site]:
    for folder in FOLDERS:
        for parent, folders, files in os.walk(ROOT / folder):  # follows no symlink
            folders[:] = [each for each in folders if each != "__pycache__"]
            for file in sorted(files):
                if file.endswith(".py"):
                    yield from sites_of(Path(parent) / file)


def sites_of(path: Path) -> Iterator[Site]:
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
            yield Site(name, node.lineno, node.end_lineno or node.lineno, template(node.args[0]))


def template(node: ast.expr) -> str:
    """A message's text as far as the source tells it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(template(each) for each in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.IfExp):
        return template(node.body)
    return "{" + ast.unparse(node) + "}"


class Watch:
    """What was raised: (file below the repository, line) -> messages."""

    def __init__(self) -> None:
        self.messages: dict[tuple[str, int], set[str]] = {}

    def remember(self, error: BaseException, *arguments: Any) -> None:
        Exception.__init__(error, *arguments)
        frame = sys._getframe(1)
        while frame.f_code.co_filename.endswith(("dflash/errors.py", "raised.py")) and frame.f_back:
            frame = frame.f_back
        path = Path(os.path.realpath(frame.f_code.co_filename))
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS:
            place = str(path.relative_to(ROOT)), frame.f_lineno
            self.messages.setdefault(place, set()).add(str(arguments[0]) if arguments else "")

    def of(self, site: Site) -> set[str]:
        return {
            message
            for (file, line), messages in self.messages.items()
            if file == site.file and site.first <= line <= site.last
            for message in messages
        }

    def unseen(self) -> list[Site]:
        """Errors that nothing raised."""
        return [site for site in sites() if not self.of(site)]

    def places(self) -> list[tuple[str, int]]:
        return list(self.messages)  # the messages themselves may hold what no other process can be sent

    def merge(self, other: Iterable[tuple[str, int]]) -> None:
        """What another process saw, from its `places`."""
        for file, line in other:
            self.messages.setdefault((file, line), {"in another process"})


WATCH = Watch()


def watch() -> None:
    """Remember every error from now on."""
    DflashError.__init__ = lambda error, *arguments: WATCH.remember(error, *arguments)  # type: ignore[method-assign]


# --- what a message must be

SENTENCE_INSIDE = re.compile(r"[a-z0-9`)'\"\]][.!?] +[A-Z`]")
PLACE = re.compile(r"[{/]|--[a-z]|\d|`|[a-z]\.[a-z]")
ANYWHERE = re.compile(
    r"\bmust\b|\bneeds?\b|did you mean|\bGive\b|"
    r"\{[^}]*(advice|ADVICE|hint|kept|help|proposal|_nothing_supervised)[^}]*\}"
)
BEHIND = re.compile(
    r"\b(add|answer|change|check|choose|completes?|copy|correct|delete|do|empty|evaluate|export|extract|fetch|free|give|have|install|"
    r"leave|lower|make|makes|mend|move|name|open|pass|pick|put|raise|rebuild|remove|report|restore|resumes?|retires?|run|"
    r"set|shorten|start|stop|train|try|turn|upgrade|use|wait|write)\b"
)


def complaint(message: str) -> str | None:
    """What is wrong with a message or template, or None: one sentence, a place, a remedy (behind `;:,(`)."""
    if "\n" in message:
        return "more than one line"
    if not message.endswith((".", "?", "}")):
        return "does not end as a sentence"
    if SENTENCE_INSIDE.search(message):
        return "more than one sentence"
    if not PLACE.search(message):
        return "names no place"
    if not ANYWHERE.search(message) and not BEHIND.search(re.split(r"[;:,(] ?", message, maxsplit=1)[-1]):
        return "names no remedy"
    return None
