"""Errors of a target's folder and of the loaded target, each from damage that is really there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny import make_model
from raised import complaint
from safetensors.torch import load_file, save_file

from dflash.errors import DflashError, cause
from dflash.quickstart import make_target
from dflash.target import (
    TargetSpec,
    check_conventions,
    head_weight,
    load_target,
    load_tokenizer,
    read_frozen,
    resolve_target,
    stop_token_ids,
    write_target_folder,
)
from dflash.target.gguf import unpack

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def says(folder: Path, file: str = "config.json", **changes: Any) -> Any:
    """Change fields of a JSON file; None takes one away."""
    path = folder / file
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def code_of_its_own(folder: Path) -> Any:
    says(folder, model_type="strange", auto_map={"AutoConfig": "c.C"})
    says(folder, "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["t.T", None]})
    (folder / "t.py").write_text("raise SystemExit('ran code of the target')")
    return load_tokenizer(folder)


def damaged_embedding(folder: Path) -> Any:
    write_target_folder(folder, folder / "kept")
    (folder / "kept" / "embed.safetensors").write_bytes(bytes(64))
    return read_frozen(folder / "kept", dtype="float32")


def cut_header(folder: Path) -> Any:
    (folder / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"no json!")


def only_an_index(folder: Path) -> Any:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text("[]")


def strange_gguf(folder: Path) -> Any:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(folder / "s.gguf", "strange")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unpack(folder / "s.gguf", folder / "out")


DAMAGE: dict[str, Callable[[Path], Any]] = {
    r"c\.jinja cannot be read \(.*No such file": lambda t: load_tokenizer(t, str(t / "c.jinja")),
    "tokenizer of .* is code of its own: pass --trust-remote-code": code_of_its_own,
    r"embedding of \(320, 64\) where config.json tells \(321, 64\)": lambda t: (
        says(t, vocab_size=321), write_target_folder(t, t / "kept")),
    "holds a damaged weight file .*: extract into a new store": damaged_embedding,
    r"generation_config\.json cannot be read as JSON \(Expecting": lambda t: (
        (t / "generation_config.json").write_text("{"), stop_token_ids(t)),
    "is not a JSON object": lambda t: ((t / "config.json").write_text("[]"), TargetSpec.read(t)),
    "model_type 'strange'.* is of no family that transformers knows": lambda t: (
        says(t, model_type="strange", hidden_size=None), TargetSpec.read(t)),
    "gives vocab_size = 0: .* a positive whole number": lambda t: (
        says(t, model_type="strange", vocab_size=0), TargetSpec.read(t)),
    r"config\.json is refused by transformers \(TypeError: .*hidden_size": lambda t: (
        says(t, hidden_size="wide"), TargetSpec.read(t)),
    "index.json is no index of weights": lambda t: (only_an_index(t), read_frozen(t)),
    "model.safetensors is no safetensors file, or is cut off": lambda t: (
        (t / WEIGHTS).write_bytes(b"\xff" * 100), read_frozen(t)),
    "has a damaged safetensors header": lambda t: (cut_header(t), read_frozen(t)),
    r"cannot be loaded by transformers \(Error no file named": lambda t: ((t / WEIGHTS).unlink(), load_target(t)),
    r"cannot be loaded by transformers \(.*deserializ.*\): restore its files": lambda t: (
        cut_header(t), load_target(t)),
    r"s\.gguf cannot be loaded by transformers \(.*strange": strange_gguf,
    "exists already; delete it to convert": make_target,
}  # fmt: skip


@pytest.mark.parametrize("words", DAMAGE)
def test_a_target_that_cannot_be_used_is_named(words: str, tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=words) as caught:
        DAMAGE[words](shutil.copytree(tiny_target, tmp_path / "target"))
    assert complaint(str(caught.value)) is None


def test_a_hub_that_cannot_be_reached_says_why_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DflashError, match=r"org/none is no folder here .*hub model \(.+\): give a folder") as caught:
        resolve_target("org/none")
    assert complaint(str(caught.value)) is None


@pytest.mark.parametrize("where", ["while it is read", "while it is moved"])
def test_a_target_too_large_for_the_device_is_named(
    where: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)  # without accelerate
    if where == "while it is read":
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    else:
        monkeypatch.setattr("transformers.PreTrainedModel.to", full)
    with pytest.raises(DflashError, match="does not fit into the memory of cuda:0: use a larger device") as caught:
        load_target(tiny_target, device="cuda:0")
    assert complaint(str(caught.value)) is None


def test_a_live_head_with_a_bias_is_refused() -> None:
    model = make_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(320))
    with pytest.raises(DflashError, match="`LlamaForCausalLM` has an output head with a bias") as caught:
        head_weight(model)
    assert complaint(str(caught.value)) is None


def test_states_of_another_shape_than_the_embedding_are_refused(tiny_target: Path) -> None:
    """As of a family that projects its embedding before the first layer."""
    model: Any = load_target(tiny_target)
    model.get_input_embeddings().register_forward_hook(lambda module, ids, rows: rows[:, 1:])
    with pytest.raises(DflashError, match=r"feeds its first layer \(1, 39, 64\) for \(1, 40, 64\)") as caught:
        check_conventions(model, TargetSpec.read(tiny_target), torch.arange(3, 43)[None])
    assert complaint(str(caught.value)) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "ValueError"),
        ("No such file.", "No such file"),
        ("Cannot connect. To go on, set X=0.", "Cannot connect"),
        ("Two\nlines", "Two"),
        ("Validation error for 'x':\n    TypeError: x is a str", "TypeError: x is a str"),
        ("torch 2.11 is needed.", "torch 2.11 is needed"),
    ],
)
def test_what_a_library_says_fits_into_a_sentence(text: str, told: str) -> None:
    assert cause(ValueError(text)) == told


def test_a_sound_copy_is_read(tiny_target: Path, tmp_path: Path) -> None:
    """Else every test above could be of a copy that is broken anyway."""
    copy = shutil.copytree(tiny_target, tmp_path / "target")
    says(copy)
    save_file(load_file(copy / WEIGHTS), copy / WEIGHTS, {"format": "pt"})
    write_target_folder(copy, copy / "kept")
    assert torch.equal(read_frozen(copy / "kept").head, head_weight(load_target(copy)))
    assert load_tokenizer(copy)("a")["input_ids"]
