"""Settings: one frozen dataclass a command, read from flags, TOML and JSON alike.

A config class declares each setting once, with its default and one line of help:

    @dataclass(frozen=True, kw_only=True)
    class TrainConfig:
        store: str = setting(REQUIRED, "The store to train on.")
        lr: float = setting(6e-4, "Peak learning rate.")

Flags (`dflash.cli.options`), TOML, JSON and the documentation read names, types, defaults and help from there.
Types are str, int, float, bool, `X | None`, `tuple[int, ...]`, `tuple[str, ...]` and `dict[str, Any]` (JSON in a flag).
Imports the standard library only, since `dflash --help` loads every config module.
"""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash.errors import DflashError

REQUIRED: Any = dataclasses.MISSING

# The sections a TOML file may hold: one file can serve a whole pipeline, each command reads its own section.
SECTIONS = ("extract", "train", "export", "eval", "regenerate", "inspect-shard", "verify", "report", "pack", "doctor")


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    positional: bool = False,
    instead_of: str | None = None,
) -> Any:
    """A dataclass field that knows its help; `REQUIRED` as default where there is none.

    With `positional` the command line takes it as an argument without a name (`dflash export RUN`). `instead_of` names
    another setting that this one replaces: given as a flag, it wins over the other one's line in a file.
    """
    metadata = {
        "help": help, "choices": choices, "metavar": metavar, "positional": positional,
        "instead_of": instead_of,
    }  # fmt: skip
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a config class, as flags and files see it."""

    name: str  # the field: `lr`
    flag: str  # `--lr`; shown to people in messages
    kind: type  # str, int, float, bool or dict: of the value, or of each element when `many`
    many: bool  # a tuple
    optional: bool  # None is allowed
    default: Any  # REQUIRED when there is none
    help: str
    choices: tuple[str, ...] | None
    metavar: str | None
    positional: bool
    instead_of: str | None

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


def settings(*classes: type) -> dict[str, Setting]:
    """The settings of the classes that share a command, in order; one of the same name in two classes is one flag."""
    found: dict[str, Setting] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.init and field.name not in found:
                found[field.name] = _setting(field, hints[field.name])
    return found


def _setting(field: dataclasses.Field, hint: Any) -> Setting:
    kind, many, optional = _kind(hint, field.name)
    meta = field.metadata
    choices = meta.get("choices")
    factory = field.default_factory
    return Setting(
        name=field.name,
        flag="--" + field.name.replace("_", "-"),
        kind=kind,
        many=many,
        optional=optional,
        default=field.default if factory is dataclasses.MISSING else factory(),
        help=meta.get("help", ""),
        choices=tuple(choices) if choices else None,
        metavar=meta.get("metavar"),
        positional=meta.get("positional", False),
        instead_of=meta.get("instead_of"),
    )


def _kind(hint: Any, name: str) -> tuple[type, bool, bool]:
    """(type of a value or an element, is a tuple, may be None) of a type hint."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [each for each in typing.get_args(hint) if each is not type(None)]
        assert len(inner) == 1, f"{name}: only `X | None` unions can be a setting, not {hint}"
        kind, many, _ = _kind(inner[0], name)
        return kind, many, True
    if origin is tuple:
        element, dots = typing.get_args(hint)
        assert dots is Ellipsis, f"{name}: a tuple setting has any length"
        return _kind(element, name)[0], True, False
    kind = origin or hint
    assert kind in (str, int, float, bool, dict), f"{name}: no flag for the type {hint}"
    return kind, False, False


def convert(one: Setting, value: Any, place: str) -> Any:
    """A value from TOML, JSON or a flag as the field's type; `place` starts the message when it cannot be."""
    if not one.many:
        return _convert_one(one, value, place)
    if isinstance(value, str) and one.kind is not str:  # a flag: --layers 1,9,17
        value = [part for part in value.replace(",", " ").split() if part]
    elif isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise DflashError(f"{place} must be a list, not {json.dumps(value, default=str)}.")
    return tuple(_convert_one(one, each, place) for each in value)


def _convert_one(one: Setting, value: Any, place: str) -> Any:
    converted = _parse(one.kind, value)
    if converted is None:
        words = {int: "a whole number", float: "a number", bool: "true or false", dict: "a JSON object", str: "a text"}
        raise DflashError(f"{place} must be {words[one.kind]}, not {json.dumps(value, default=str)}.")
    if one.choices and converted not in one.choices:
        hint = nearest(str(converted), one.choices)
        raise DflashError(
            f"{place} must be one of {', '.join(one.choices)}, not {json.dumps(converted)}"
            + (f"; did you mean {hint}?" if hint else ".")
        )
    return converted


def _parse(kind: type, value: Any) -> Any:
    """`value` as `kind`, or None when it is not one. Texts are read as the command line would read them."""
    try:
        if kind is dict:
            value = json.loads(value) if isinstance(value, str) else value
            return value if isinstance(value, dict) else None
        if kind is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
        if isinstance(value, bool):  # True is an int to Python, but `steps = true` is a mistake
            return None
        if kind is str:
            return value if isinstance(value, str) else None
        if kind is int and isinstance(value, float) and not value.is_integer():
            return None
        number = kind(value)
        return None if number != number else number  # a NaN passes every range check, so it stops here
    except (ValueError, TypeError, OverflowError):
        return None


def nearest(word: str, known: Iterable[str], likeness: float = 0.5) -> str | None:
    """The known word that `word` most likely meant, if it is alike enough."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return found[0] if found else None


def check_keys(mapping: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    """Refuse a key that no setting has, naming the nearest one."""
    names = list(known)
    for key in mapping:
        if key not in names:
            hint, far = nearest(key, names), nearest(key, names, 0.0)
            others = f"use one of {', '.join(names)}, of which {far} is the nearest."
            raise DflashError(f"{place} has no setting {key!r}; {f'did you mean {hint}?' if hint else others}")


def read_toml(path: str | Path, section: str, known: Mapping[str, Setting]) -> dict[str, Any]:
    """The settings in section `[section]` of a TOML file, converted; other commands' sections are left alone."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DflashError(f"{path} cannot be read as TOML ({reason}); correct the file.") from error
    mine: dict[str, Any] = {}
    for name, content in document.items():
        section_name = name.replace("_", "-")
        if not isinstance(content, dict) or (section_name not in SECTIONS and name in known):
            raise DflashError(f"{path} has the key {name!r} outside a section; put it below a line [{section}].")
        if section_name not in SECTIONS:
            hint = nearest(section_name, SECTIONS)
            advice = f"did you mean [{hint}]?" if hint else f"use one of {', '.join(SECTIONS)}."
            raise DflashError(f"{path} has an unknown section [{name}]; {advice}")
        if section_name == section:
            mine = {key.replace("-", "_"): value for key, value in content.items()}
    check_keys(mine, known, f"{path} [{section}]")
    return {key: convert(known[key], value, f"{path} [{section}] {key}") for key, value in mine.items()}


def as_dict(config: Any) -> dict[str, Any]:
    """The config as JSON can hold it: tuples become lists."""
    return {name: json.loads(json.dumps(getattr(config, name))) for name in settings(type(config))}


def to_toml(section: str, *configs: Any) -> str:
    """A TOML section that repeats the configs, each setting below its help; what is not set is commented out."""
    known = settings(*(type(config) for config in configs))
    values: dict[str, Any] = {}
    for config in configs:
        values |= {name: getattr(config, name) for name in settings(type(config))}
    return toml_section(section, known, values)


def toml_section(section: str, known: Mapping[str, Setting], values: Mapping[str, Any]) -> str:
    """The same from loose values, where a required one may still be missing (`--print-config`)."""
    lines = [f"[{section}]"]
    for name, one in known.items():
        value = values.get(name, one.default)
        lines.append(f"# {one.help}")
        if value is REQUIRED:
            lines.append(f"# {name} must be given")
        else:
            lines.append(f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """One value as TOML; a dict that holds null, which TOML lacks, goes as a JSON text, which `convert` reads back."""
    if isinstance(value, dict):
        if "null" in json.dumps(value):
            return toml_value(json.dumps(value, ensure_ascii=False))
        return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(each) for each in value) + "]"
    if isinstance(value, str):  # a JSON string is a TOML basic string, but for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def parse_size(text: str | int) -> int:
    """Bytes of `2TB`, `1.5 GiB`, `500M` or a plain number; decimal units, binary ones with an i."""
    if isinstance(text, int):
        return text
    compact = text.replace(" ", "").replace("_", "").lower().removesuffix("b")
    base = 1024 if compact.endswith("i") else 1000
    compact = compact.removesuffix("i")
    power = "kmgtp".find(compact[-1:]) + 1 if compact[-1:] and compact[-1] in "kmgtp" else 0
    try:
        value = float(compact[:-1] if power else compact) * base**power
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**63:
        raise DflashError(f"{text!r} is not a size; write for example 500GB, 2TB or 1.5TiB.")
    return int(value)
