"""Field by field checks of JSON that came from a file: each error names the file and the field."""

import json
import reprlib
from collections.abc import Callable
from typing import Any

from dflash.errors import DflashError

Check = Callable[[Any], bool]
MAX_DEPTH = 64


def integer(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def parse_shallow(content: bytes) -> Any:
    """JSON, or ValueError; no deeper than anything we write, so that no later step runs out of stack."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH:  # else it cannot be deep
        level, depth = [value], 0
        while level := [item for each in level if type(each) in (list, dict) for item in _items(each)]:
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError("it is nested too deeply")
    return value


def _items(value: Any) -> Any:
    return value.values() if type(value) is dict else value


def boolean(value: Any) -> bool:
    return type(value) is bool


def text(value: Any) -> bool:
    return type(value) is str


def mapping(value: Any) -> bool:
    return type(value) is dict


def one_of(*choices: Any) -> Check:
    return lambda value: any(type(value) is type(choice) and value == choice for choice in choices)


def list_of(check: Check, low: int = 0, high: int = 1 << 32) -> Check:
    return lambda value: type(value) is list and low <= len(value) <= high and all(check(item) for item in value)


def shown(value: Any) -> str:
    """A value of a file in a message: however large or deep it is, a few words."""
    return reprlib.repr(value)[:80]


def check_fields(value: Any, fields: dict[str, Check], where: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """`value` as a dict with exactly `fields`, each passing its check."""
    if type(value) is not dict:
        raise DflashError(f"{where} is not a JSON object; restore it from a copy.")
    for name in value:
        if name not in fields:
            raise DflashError(
                f"{where} has the unknown field {str(name)[:80]!r}; if a newer dflash wrote it, use that."
            )
    for name, check in fields.items():
        if name not in value:
            if name not in optional:
                raise DflashError(
                    f"{where} lacks the field {name!r}, so it is damaged or not ours; restore it from a copy."
                )
        elif not check(value[name]):
            raise DflashError(
                f"{where}: the field {name!r} has the wrong value {shown(value[name])}; restore it from a copy."
            )
    return value
