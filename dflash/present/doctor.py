"""The screen of `dflash doctor`."""

import textwrap
from typing import Any

from dflash.present.parts import LABEL, Result, screen

MARKS = {"ok": " ", "note": "·", "problem": "!"}
WIDTH = 78


def doctor(result: Result, config: Any) -> str:
    checks = result.get("checks") or ()
    problems = sum(check["state"] == "problem" for check in checks)
    stops = "one thing" if problems == 1 else f"{problems} things"
    title = f"On this machine {stops} will stop a run (marked !)" if problems else "This machine can run both stages"
    lines = [line for check in checks for line in _lines(check)]
    next_command = "dflash extract --target MODEL --data chats.jsonl --store STORE --dry-run" if not problems else ""
    return screen("\n".join([title, *lines]), [], next_command=next_command)


def _lines(check: Result) -> list[str]:
    """What was found, and below it what to do, wrapped."""
    mark, indent = MARKS[check["state"]], " " * (LABEL + 5)
    found = textwrap.wrap(check["found"], WIDTH - len(indent)) or [""]
    advice = textwrap.wrap(f"→ {check['advice']}", WIDTH - len(indent)) if check.get("advice") else []
    first, *rest = found + advice
    return [f"  {mark} {check['name']:<{LABEL}} {first}", *(indent + line for line in rest)]
