"""Field by field checks of JSON that came from a file: each error names the file and the field."""

from collections.abc import Callable
from typing import Any

from dflash.errors import DflashError

Check = Callable[[Any], bool]


def integer(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def boolean(value: Any) -> bool:
    return type(value) is bool


def text(value: Any) -> bool:
    return type(value) is str


def mapping(value: Any) -> bool:
    return type(value) is dict


def one_of(*choices: Any) -> Check:
    return lambda value: value in choices


def list_of(check: Check, low: int = 0, high: int = 1 << 32) -> Check:
    return lambda value: type(value) is list and low <= len(value) <= high and all(check(item) for item in value)


def check_fields(value: Any, fields: dict[str, Check], where: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """`value` as a dict with exactly `fields`, each passing its check."""
    if type(value) is not dict:
        raise DflashError(f"{where} is not a JSON object.")
    for name in value:
        if name not in fields:
            raise DflashError(f"{where} has the unknown field {str(name)[:80]!r}; a newer dflash may have written it.")
    for name, check in fields.items():
        if name not in value:
            if name not in optional:
                raise DflashError(f"{where} lacks the field {name!r}; the file is damaged or not ours.")
        elif not check(value[name]):
            raise DflashError(f"{where}: the field {name!r} has the wrong value {str(value[name])[:80]!r}.")
    return value
