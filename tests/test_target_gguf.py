"""GGUF files: unpacked once, by content, to what transformers makes of them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny import make_gguf, make_tokenizer

from dflash.errors import DflashError
from dflash.target import (
    TargetSpec,
    load_target,
    load_tokenizer,
    read_frozen,
    resolve_target,
    stop_token_ids,
    weights_fingerprint,
)
from dflash.target.gguf import cache_folder

IDS = torch.arange(3, 43)[None]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))


def own_model(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)],
)
def test_the_target_is_what_transformers_loads_from_the_file(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    made = make_gguf(path, kind)
    folder = resolve_target(str(path))
    spec, model = TargetSpec.read(folder), load_target(folder)
    assert spec.torch_dtype == dtype
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, own_model(path, dtype)(IDS).logits)
    for name, original in made.state_dict().items():
        weight = model.state_dict()[name]
        assert torch.equal(weight, original.to(dtype)) or kind == "Q8_0"
        assert (weight - original).norm() < 0.01 * original.norm()
    assert torch.equal(read_frozen(folder).head, model.get_output_embeddings().weight)
    assert stop_token_ids(folder) == (2,)
    tokenizer = load_tokenizer(folder)
    assert tokenizer("hé !")["input_ids"] == make_tokenizer()("hé !")["input_ids"]
    assert tokenizer.chat_template == make_tokenizer().chat_template


def test_it_is_unpacked_once_whatever_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    make_gguf(path)
    first = resolve_target(str(path))
    assert "float32 weights" in capsys.readouterr().err
    fingerprint = weights_fingerprint(first)
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "tiny.gguf")
    with monkeypatch.context() as patch:
        patch.setattr("dflash.target.gguf.unpack", None)
        assert resolve_target(str(moved)) == first
    make_gguf(moved, "F16")
    other = resolve_target(str(moved))
    assert other != first
    assert weights_fingerprint(other) != fingerprint
    assert sorted(cache_folder().iterdir()) == sorted([first, other])


def test_the_digits_of_smollm_are_split(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_gguf(path, pre="smollm")
    steps = load_tokenizer(resolve_target(str(path))).backend_tokenizer.pre_tokenizer
    assert "Digits" in repr(steps)


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(DflashError, match=r"bad\.gguf is no GGUF file"):
        resolve_target(str(path))
    assert not list(cache_folder().iterdir())
    monkeypatch.setenv("DFLASH_CACHE", "/proc/nowhere")
    with pytest.raises(DflashError, match="set DFLASH_CACHE"):
        resolve_target(str(path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DflashError, match=r"pip install dflash\[gguf\]"):
        resolve_target(str(path))
