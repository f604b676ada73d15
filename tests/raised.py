"""Every error that the program can raise, from the syntax trees; and every one that was raised while the tests ran.

`watch` is called by conftest.py. An error made in another process than pytest's own ones is not seen.
"""

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash.cli.options import Failure
from dflash.data.conversations import BadLineError
from dflash.errors import DflashError

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("dflash", "data", "extract", "train")
BASES: tuple[type[Exception], ...] = (DflashError, BadLineError, Failure)
PASSING = ("dflash/errors.py", "dflash/signals.py")  # who calls these says the words: `stop.check(words)`


@dataclass(frozen=True)
class Site:
    """A place that makes an error: `template` is its message with {expressions} where the values go."""

    file: str  # below the repository
    first: int  # lines
    last: int
    template: str
    kind: str = DflashError.__name__

    def __str__(self) -> str:
        return f"{self.file}:{self.first} {self.template}"


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for parent, folders, files in os.walk(ROOT / folder):  # follows no symlink
            folders[:] = [each for each in folders if each != "__pycache__"]
            yield from (Path(parent) / file for file in sorted(files) if file.endswith(".py"))


@cache
def sites() -> tuple[Site, ...]:
    return tuple(site for path in sources() for site in sites_of(path))


def sites_of(path: Path) -> Iterator[Site]:
    """Calls of an error's class, and of `stop.check`. What only passes another error's words on, `str(error)`, is no
    place of its own."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args)
    for call in calls if name not in PASSING else ():
        called = ast.unparse(call.func)
        kind = kinds().get(called, "")
        words = template(call.args[-1] if kind == BadLineError.__name__ else call.args[0])
        if called == "stop.check":
            kind, words = DflashError.__name__, f"Stopped by {{signal}}: {words}"
        if kind and words != "{str(error)}":
            yield Site(name, call.lineno, call.end_lineno or call.lineno, words, kind)


@cache
def kinds() -> dict[str, str]:
    """Every class of errors in the sources -> which of `BASES` it is."""
    found = {base.__name__: base.__name__ for base in BASES}
    classes = [
        node for path in sources() for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    while more := {
        node.name: found[base.id]
        for node in classes
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in found and node.name not in found
    }:
        found |= more
    return found


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
        self.judged = True  # off while values are made up at random, which no message can answer for

    def remember(self, error: BaseException) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename.endswith((*PASSING, "raised.py")) and frame.f_back:
            frame = frame.f_back
        path = Path(os.path.realpath(frame.f_code.co_filename))  # dflash/data is a symlink
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS:
            place = str(path.relative_to(ROOT)), frame.f_lineno
            self.messages.setdefault(place, set()).add(str(error) if self.judged else ELSEWHERE)

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

    def wrong(self) -> list[str]:
        """What is wrong with messages that were raised, once a place and cause."""
        found: dict[tuple[str, str], str] = {}
        for site in sites():
            for message in self.of(site) - {ELSEWHERE}:
                if why := complaint(whole(message, site.kind)):
                    found[f"{site.file}:{site.first}", why] = ascii(message)[1:-1][:300]
        return [f"{place} {why}: {message}" for (place, why), message in found.items()]

    def places(self) -> list[tuple[str, int]]:
        return list(self.messages)  # the messages themselves may hold what no other process can be sent

    def merge(self, other: Iterable[tuple[str, int]]) -> None:
        """What another process saw, from its `places`."""
        for file, line in other:
            self.messages.setdefault((file, line), {ELSEWHERE})


ELSEWHERE = "in another process, or from random values"
WATCH = Watch()
INSTALLED: dict[type[Exception], Callable[..., None]] = {}


def watch() -> None:
    """Remember every error from now on."""
    for base in BASES:
        INSTALLED[base] = base.__init__ = _watched(base.__init__)  # type: ignore[method-assign]


def _watched(init: Callable[..., None]) -> Callable[..., None]:
    def made(error: BaseException, *arguments: Any, **named: Any) -> None:
        init(error, *arguments, **named)
        WATCH.remember(error)

    return made


def is_watching() -> bool:
    """No test may take `watch` back: what came after it would not be seen."""
    return all(vars(base).get("__init__") is INSTALLED.get(base) for base in BASES)


# --- what a message must be

SENTENCE_INSIDE = re.compile(r"[a-z0-9`)'\"\]][.!?] +[A-Z`]")
QUOTED = re.compile(r"""(?<=[ (\[{=:])('(\\.|[^'\\])*'|"(\\.|[^"\\])*")(?=[]\s.,;:)}]|$)""")
PLACE = re.compile(r"[{/]|--[a-z]|\d|`|[a-z]\.[a-z]")
ANYWHERE = re.compile(
    r"\bmust\b|\bneeds?\b|did you mean|\bGive\b|"
    r"\{[^}]*(advice|ADVICE|REBUILD|RESTORE|hint|kept|help|proposal|_nothing_supervised)[^}]*\}"
)
BEHIND = re.compile(
    r"(?<!cannot )\b("
    r"add|answer|change|check|choose|completes?|copy|correct|delete|empty|evaluate|export|extract|fetch|"
    r"free|give|have the|install|leave|lower|make|makes|mend|move|name|open|pass|pick|put|raise|rebuild|"
    r"remove|report|restore|resumes?|retires?|run|set|shorten|start|stop|train|try|turn|upgrade|use|wait|"
    r"write"
    r")\b"
)


def complaint(message: str) -> str | None:
    """What is wrong with a message or template, or None: one sentence, a place, a remedy (behind `;:,(`).

    What it quotes ('…' behind a space or bracket, as `!r` writes it) may hold anything but a line's end.
    """
    if "\n" in message:
        return "more than one line"
    if not message.endswith((".", "?", "}")):
        return "does not end as a sentence"
    if SENTENCE_INSIDE.search(QUOTED.sub("''", message)):
        return "more than one sentence"
    if not PLACE.search(message):
        return "names no place"
    behind = re.split(r"[;:,(] ?", message, maxsplit=1)[-1]
    if not ANYWHERE.search(message) and not BEHIND.search(re.sub(r"\{[^{}]*\}", "{}", behind)):
        return "names no remedy"
    return None


def whole(message: str, kind: str) -> str:
    """What a user reads: a line of data that cannot be used is named around its error's own words."""
    if kind == BadLineError.__name__:
        return f"d.jsonl, line 1: {message}; correct it, or let extract count and skip such lines with --skip-bad."
    return message
