"""Settings: what a dataclass declares is what flags, TOML and JSON read and write."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.config import (
    REQUIRED,
    as_dict,
    convert,
    nearest,
    parse_size,
    read_toml,
    setting,
    settings,
    to_toml,
)
from dflash.errors import DflashError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    store: str = setting(REQUIRED, "Where it lies.")
    lr: float = setting(6e-4, "Peak learning rate.")
    steps: int | None = setting(None, "How many.")
    layers: tuple[int, ...] | None = setting(None, "Which layers.")
    names: tuple[str, ...] = setting((), "Words.")
    template_args: dict[str, Any] = setting({}, "Arguments.")
    loss: str = setting("ce", "Which loss.", choices=("ce", "kl", "ce-tokens"))
    dry_run: bool = setting(False, "Only look.")


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "f.toml"
    path.write_text(text)
    return path


def test_a_setting_tells_name_type_default_and_help() -> None:
    found = settings(Example)
    assert list(found) == [field.name for field in dataclasses.fields(Example)]
    assert found["store"].required
    assert (found["lr"].kind, found["lr"].default, found["lr"].help) == (float, 6e-4, "Peak learning rate.")
    assert (found["layers"].kind, found["layers"].many, found["layers"].optional) == (int, True, True)
    assert (found["layers"].flag, found["dry_run"].flag) == ("--layers", "--dry-run")
    assert not found["lr"].required


def test_a_required_setting_cannot_be_left_out_of_the_dataclass() -> None:
    with pytest.raises(TypeError, match="store"):
        Example()


def test_a_default_dict_is_not_shared_between_configs() -> None:
    first, second = Example(store="a"), Example(store="b")
    first.template_args["x"] = 1
    assert second.template_args == {}


def test_a_toml_section_is_read_with_hyphens_or_underscores_and_other_commands_sections_are_left(
    tmp_path: Path,
) -> None:
    path = toml(tmp_path, '[train]\nstore = "s"\ndry-run = true\nlr = 1\n[extract]\nlr = "no number"\n')
    assert read_toml(path, "train", settings(Example)) == {"store": "s", "dry_run": True, "lr": 1.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nstroe = 'a'", ["f.toml [train]", "'stroe'", "did you mean store?"]),
        ("[train]\nzzzzzz = 'a'", ["'zzzzzz'", "use one of store, lr", "is the nearest."]),
        ("[trian]\nstore = 'a'", ["[trian]", "did you mean [train]?"]),
        ("store = 'a'", ["'store'", "outside a section", "[train]"]),
        ("[train]\nlr = 'fast'", ["[train] lr must be a number", '"fast"']),
        ("[train]\nsteps = true", ["steps must be a whole number"]),
        ("[train]\nsteps = 1.5", ["steps must be a whole number"]),
        ("[train]\nlr = nan", ["lr must be a number"]),
        ("[train]\ndry_run = 'perhaps'", ["dry_run must be true or false"]),
        ("[train]\nlayers = 3", ["layers must be a list"]),
        ("[train]\nlayers = [1, 'x']", ["layers must be a whole number", '"x"']),
        ("[train]\ntemplate_args = '[1]'", ["template_args must be a JSON object"]),
        ("[train]\nloss = 'ce-token'", ["must be one of ce, kl, ce-tokens", "did you mean ce-tokens?"]),
        ("[train\n", ["cannot be read as TOML", "line 1"]),
    ],
)
def test_what_is_wrong_in_toml_is_named_with_its_place_and_a_remedy(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(DflashError) as caught:
        read_toml(toml(tmp_path, text), "train", settings(Example))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_toml_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"absent\.toml cannot be read as TOML \(No such file"):
        read_toml(tmp_path / "absent.toml", "train", settings(Example))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
examples = st.builds(
    Example,
    store=st.text(),
    lr=st.floats(allow_nan=False),
    steps=st.none() | st.integers(-(2**60), 2**60),
    layers=st.none() | st.lists(st.integers(-(2**60), 2**60)).map(tuple),
    names=st.lists(st.text()).map(tuple),
    template_args=st.dictionaries(st.text(), json_values, max_size=3),
    loss=st.sampled_from(["ce", "kl"]),
    dry_run=st.booleans(),
)


@hypothesis.settings(deadline=None)
@given(examples)
def test_what_to_toml_writes_read_toml_reads_back(config: Example) -> None:
    section = tomllib.loads(to_toml("train", config))["train"]
    known = settings(Example)
    assert Example(**{name: convert(known[name], value, name) for name, value in section.items()}) == config


@hypothesis.settings(deadline=None)
@given(examples)
def test_as_dict_gives_what_json_holds_and_flags_take_back(config: Example) -> None:
    known = settings(Example)
    values = json.loads(json.dumps(as_dict(config)))
    given = {name: value for name, value in values.items() if value is not None}  # no flag gives nothing
    assert Example(**{name: convert(known[name], value, name) for name, value in given.items()}) == config


def test_to_toml_explains_each_setting_and_comments_out_what_is_not_set() -> None:
    text = to_toml("train", Example(store="s"))
    assert text.startswith('[train]\n# Where it lies.\nstore = "s"\n# Peak learning rate.\nlr = 0.0006\n')
    assert "# How many.\n# steps is not set\n" in text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2TB", 2 * 10**12),
        ("1.5 TiB", 3 * 2**39),
        ("500M", 5 * 10**8),
        ("7kb", 7000),
        ("4KiB", 4096),
        ("123", 123),
        (99, 99),
        ("1_000", 1000),
    ],
)
def test_sizes_are_decimal_and_binary_with_an_i(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "TB", "two", "-1GB", "1XB", "nan", "inf", "1e30TB"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(DflashError, match="is not a size"):
        parse_size(text)


def test_nearest_finds_a_misspelling_and_nothing_for_a_stranger() -> None:
    assert nearest("bolck_size", ["block_size", "store"]) == "block_size"
    assert nearest("qqqq", ["block_size", "store"]) is None
