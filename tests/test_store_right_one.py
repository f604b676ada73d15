"""The right store or none: whatever made a store's content is compared before anything is added to it, or trained on.

All through the commands themselves: a difference is one sentence with the field, the old and the new value, exit 1,
and the store is as it was.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from dflash.cli import cli
from dflash.store import Store


def dflash(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


def one_sentence(result: Result) -> str:
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    return line


def extract(folder: Path, **changes: str) -> Result:
    flags = {"layers": "1,2,4", "buckets": "48,96", "holdout": "0", "device": "cpu", "threads": "1"} | changes
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    return dflash(
        "extract", "--target", folder / "target", "--data", folder / "data.jsonl", "--store", folder / "store", *words
    )


@pytest.fixture(scope="module")
def template(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right")
    shutil.copytree(tiny_target, folder / "target")
    with (folder / "data.jsonl").open("w") as file:
        for i in range(20):
            turns = [("user", f"What is {i}?"), ("assistant", "a number " * (1 + i % 4))]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    result = extract(folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "work")


def content_of(store: Path) -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in sorted(store.rglob("*")) if p.is_file()}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_data(folder: Path) -> None:
    path = folder / "data.jsonl"
    text = path.read_text()
    assert text.count("What is 7?") == 1
    path.write_text(text.replace("What is 7?", "What is 8?"))  # in place, of the same length


def edit_tokenizer(folder: Path) -> None:
    path = folder / "target/tokenizer.json"
    whole = json.loads(path.read_text())
    vocabulary = whole["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(whole))


def edit_template(folder: Path) -> None:
    path = folder / "target/chat_template.jinja"
    path.write_text(path.read_text() + "{# nothing to see #}")


def edit_weights(folder: Path) -> None:
    path = folder / "target/model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, path, {"format": "pt"})


EDITS: dict[str, Callable[[Path], None]] = {
    "data": edit_data,
    "tokenizer": edit_tokenizer,
    "template": edit_template,
    "target.weights": edit_weights,
    "target.config": lambda folder: edit_json(folder / "target/config.json", rope_theta=5e5, rms_norm_eps=1e-4),
}


@pytest.mark.parametrize("field", EDITS)
def test_changed_content_is_refused_with_field_old_and_new_value(folder: Path, field: str) -> None:
    before = content_of(folder / "store")
    stored: Any = json.loads(before["store.json"])
    for name in field.split("."):
        stored = stored[name]
    EDITS[field](folder)
    line = one_sentence(extract(folder))
    found = re.search(rf'another {re.escape(field)}: it has "([^"]+)", this command has "([^"]+)"', line)
    assert found, line
    old, new = found.groups()
    assert stored.startswith(old.removesuffix("..."))
    assert old != new
    assert content_of(folder / "store") == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"layers": "1,2,3"}, "taps: it has [1,2,4], this command has [1,2,3]"),
        ({"buckets": "48,80"}, "buckets: it has [48,96], this command has [48,80]"),
        ({"labels": "topk:4"}, 'labels: it has "argmax", this command has "topk:4"'),
        ({"labels": "last-hidden"}, 'labels: it has "argmax", this command has "last-hidden"'),
        ({"storage": "int8"}, 'storage: it has "bf16", this command has "int8"'),
        ({"storage": "lz4"}, 'storage: it has "bf16", this command has "lz4"'),
        ({"template_args": '{"enable_thinking": false}'}, "template_args: it has {}, this command has {"),
        ({"seed": "5"}, "seed: it has 0, this command has 5"),
        ({"dtype": "bfloat16"}, 'target.dtype: it has "float32", this command has "bfloat16"'),
        ({"holdout": "0.1"}, "holdout: it has 0.0, this command has 0.1"),
        ({"turns": "last"}, 'turns: it has "all", this command has "last"'),
    ],
    ids=lambda value: ",".join(f"{k} {v}" for k, v in value.items()) if type(value) is dict else None,
)
def test_another_setting_is_refused_with_field_old_and_new_value(
    folder: Path, flags: dict[str, str], words: str
) -> None:
    before = content_of(folder / "store")
    assert words in one_sentence(extract(folder, **flags))
    assert content_of(folder / "store") == before


def test_other_paths_and_the_same_content_are_no_difference(folder: Path) -> None:
    (folder / "target").rename(folder / "t2")
    (folder / "data.jsonl").rename(folder / "d2.jsonl")
    (folder / "store").rename(folder / "s2")
    again = dflash(
        "extract", "--target", folder / "t2", "--data", folder / "d2.jsonl", "--store", folder / "s2", "--layers",
        "1,2,4", "--buckets", "48,96", "--holdout", "0", "--device", "cpu", "--threads", "1",
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    assert "complete" in again.stderr


@pytest.fixture
def no_gpu_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a model may be loaded or made."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the refusal comes too late")

    for name in ("read_frozen", "Drafter", "TargetSpec"):
        monkeypatch.setattr(f"dflash.train.setup.{name}", never)


def train(folder: Path, *words: str) -> Result:
    return dflash(
        "train", "--store", folder / "store", "--run", folder / "run", "--steps", "2", "--num-layers", "1",
        "--block-size", "4", *words,
    )  # fmt: skip


def lose_shard(store: Path) -> tuple[str, int]:
    """Retire one shard, as `verify --repair` does."""
    victim = next(path for path in sorted((store / "shards").rglob("hidden/c.*")))
    victim.write_bytes(victim.read_bytes()[:-1])
    dflash("verify", store, "--repair", "--json")
    (shard,) = Store.open(store).missing()
    return shard


@pytest.mark.usefixtures("no_gpu_work")
def test_an_incomplete_store_is_refused_before_any_model_is_made(folder: Path) -> None:
    lose_shard(folder / "store")
    line = one_sentence(train(folder))
    assert re.search(r"lacks 1 of its \d+ shards", line)
    assert "dflash extract" in line
    assert "--partial" in line
    assert not (folder / "run").exists()


def test_partial_trains_on_what_is_there_and_the_extraction_completes_it(folder: Path) -> None:
    whole = content_of(folder / "store" / "shards")
    lose_shard(folder / "store")
    result = train(folder, "--partial")
    assert result.exit_code == 0, result.output
    assert (folder / "run/rows.npz").exists()
    assert extract(folder).exit_code == 0
    arrays = {name: content for name, content in content_of(folder / "store" / "shards").items() if "/c." in name}
    assert arrays == {name: content for name, content in whole.items() if "/c." in name}


@pytest.mark.usefixtures("no_gpu_work")
@pytest.mark.parametrize(
    ("flags", "words"), [(("--loss", "kl"), "topk:K or last-hidden"), (("--target", "OTHER"), "weights")]
)
def test_an_incompatible_store_is_refused_before_any_model_is_made(
    folder: Path, flags: tuple[str, str], words: str
) -> None:
    if flags[1] == "OTHER":
        edit_weights(folder)
        flags = (flags[0], str(folder / "target"))
    assert words in one_sentence(train(folder, *flags))
    assert not (folder / "run").exists()
