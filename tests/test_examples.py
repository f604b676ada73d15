"""Every file in examples/: its lines parse, and its stages start with a tiny stand-in for the target."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from make_tiny import make_tiny, make_tokenizer
from tiny_tasks import prompts

from dflash.cli import cli
from dflash.config import toml_value

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
LINE = re.compile(r"#   (?:torchrun --nproc-per-node \d+ -m (?:-- )?)?dflash (.*)")


def lines(example: Path) -> list[list[str]]:
    """The commands at the top of a file, as words behind `dflash`."""
    return [shlex.split(found[1]) for found in map(LINE.fullmatch, example.read_text().splitlines()) if found]


def stand_in(example: Path, out: Path) -> Path:
    """A target of the same kind, hidden 64, with room for five taps; the hybrid has linear-attention layers."""
    if "hybrid" not in example.name:
        return make_tiny(out, num_hidden_layers=16)  # room for five taps
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=2048, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).eval().save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    return out


def chats(path: Path) -> str:
    answer = {"role": "assistant", "content": "one two three four five six"}
    with path.open("w") as file:
        for prompt in prompts(12, seed=0):
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}, answer]}) + "\n")
    return str(path)


def moved(example: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file with its paths below `folder`, the stand-in as target, little work a step; all else is its own."""
    sections = tomllib.loads(example.read_text())
    target, data = str(stand_in(example, folder / "target")), chats(folder / "chats.jsonl")
    places = {
        "target": target, "data": [data], "store": str(folder / "store"), "run": str(folder / "run"),
        "source": str(folder / "run"), "out": str(folder / "drafter"), "drafter": str(folder / "drafter"),
        "prompts": [data],
    }  # fmt: skip
    for name, section in sections.items():
        section |= {key: value for key, value in places.items() if key in section}
        if "layers" in section:
            section["layers"] = [1, 2, 3, 4, 5]  # as many, in a stand-in of eight layers
        if name == "train":  # a GPU's work in one step is minutes of a CPU
            section |= {"anchors": 16, "batch_tokens": section["token_budget"]}
        if name == "regenerate":
            section |= {"out": str(folder / "answers.jsonl"), "max_new_tokens": 4}
        if name == "eval":
            section |= {"max_new_tokens": 4, "limit": 2}
    file = folder / example.name
    file.write_text("".join(
        f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    ))  # fmt: skip
    return file, sections


def test_there_are_the_four_that_the_readme_of_the_examples_lists() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.toml)\)", (ROOT / "examples" / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES}
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_its_lines_parse_and_name_the_file_itself(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = lines(example)
    assert [words[0] for words in commands if "--dry-run" not in words] == list(tomllib.loads(example.read_text()))
    for words in commands:
        called: list[Any] = []
        monkeypatch.setattr(cli.commands[words[0]], "callback", lambda *configs, to=called: to.extend(configs) or {})
        result = CliRunner().invoke(cli, [*words, "--json"])
        assert result.exit_code == 0, result.output
        assert called
        assert str(example.relative_to(ROOT)) in words


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_starts_with_a_tiny_stand_in(example: Path, tmp_path: Path) -> None:
    file, sections = moved(example, tmp_path)
    for name in sections:
        extra = ["--steps", "2"] if name == "train" else []
        result = CliRunner().invoke(cli, [name, "--config", str(file), *extra, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, f"{name}: {result.output}"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
    drafter = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert drafter["block_size"] == sections["train"]["block_size"]
    assert drafter["num_hidden_layers"] == sections["train"]["num_layers"]
    assert len(drafter["dflash_config"]["target_layer_ids"]) == 5
