"""The target reader: shape and conventions of every family, taps, fingerprints, and the folder that stage two uses."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_tiny import FAMILIES, make_model, make_tiny
from safetensors.torch import load_file, save_file

from dflash.errors import DflashError
from dflash.target import (
    TargetSpec,
    check_conventions,
    check_taps,
    config_fingerprint,
    decoder_layers,
    default_taps,
    head_logits,
    head_weight,
    load_target,
    load_tokenizer,
    read_frozen,
    resolve_target,
    stop_token_ids,
    target_folder_bytes,
    template_fingerprint,
    text_model,
    tokenizer_fingerprint,
    weights_fingerprint,
    write_target_folder,
)

IDS = torch.arange(3, 43)[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_of_every_family_equal_its_own_logits(family: str, tmp_path: Path) -> None:
    """From the stored head alone: factor, scale, divisor and softcap are read from the config."""
    folder = make_tiny(tmp_path / "target", family)
    spec, model = TargetSpec.read(folder), load_target(folder)
    write_target_folder(folder, tmp_path / "kept")
    frozen = read_frozen(tmp_path / "kept")
    with torch.inference_mode():
        own = model(input_ids=IDS).logits[0]
        last = text_model(model)(input_ids=IDS).last_hidden_state[0]
        ours = head_logits(last, frozen.head, frozen.spec)
        in_place = head_logits(last, frozen.head, spec, out=torch.full_like(own, torch.nan))
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(in_place, own, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.argmax(-1), own.argmax(-1))
    assert torch.equal(frozen.embed, model.get_input_embeddings().weight)
    assert frozen.spec.tied is (frozen.head is frozen.embed)
    check_conventions(model, spec, IDS)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("gemma2", {"softcap": None}, "logits"),
        ("cohere", {"logit_scale": 1.0}, "logits"),
        ("granite", {"logit_divisor": 1.0}, "logits"),
        ("gemma3", {"embed_factor": 1.0}, "multiplies its embedding by 8"),
    ],
)
def test_a_convention_that_is_misread_is_refused(family: str, change: dict, says: str) -> None:
    model = make_model(family)
    folder_spec = replace(_spec_of(model), **change)
    with pytest.raises(DflashError, match=says):
        check_conventions(model, folder_spec, IDS)


def _spec_of(model: torch.nn.Module) -> TargetSpec:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return TargetSpec.read(folder)


def test_gemma_embedding_factor_is_rounded_in_the_targets_dtype(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "gemma3", dtype=torch.bfloat16, hidden_size=72)
    spec = TargetSpec.read(folder)
    assert spec.dtype == "bfloat16"
    assert spec.embed_factor == torch.tensor(72**0.5).bfloat16().item() != 72**0.5


def test_spec_reads_shape_and_rope(tiny_target: Path, tmp_path: Path) -> None:
    spec = TargetSpec.read(tiny_target, name="org/tiny")
    assert (spec.name, spec.hidden_size, spec.num_layers, spec.vocab_size) == ("org/tiny", 64, 6, 320)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.rope_theta, spec.rope_scaling, spec.tied, spec.dtype) == (10000.0, None, True, "float32")
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled["original_max_position_embeddings"] = 1024
    make_model("llama", rope_parameters=scaled).config.save_pretrained(tmp_path)
    spec = TargetSpec.read(tmp_path)
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == {k: v for k, v in scaled.items() if k != "rope_theta"}


def test_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3TextConfig

    text = Gemma3TextConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=1, head_dim=16
    )
    Gemma3Config(text_config=text.to_dict()).save_pretrained(tmp_path)
    spec = TargetSpec.read(tmp_path)
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size, spec.embed_factor) == (64, 7, 320, 8.0)
    assert spec.rope_theta == 1_000_000.0, "the RoPE of full attention, not the sliding layers' 10,000"


def test_default_taps_follow_the_published_rule() -> None:
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(28, 5) == (1, 7, 13, 19, 25)
    assert default_taps(6, 3) == (1, 2, 3)
    assert default_taps(9, 1) == (4,)


@pytest.mark.parametrize(("layers", "k", "proposed"), [(6, 5, 3), (3, 5, 1), (12, 12, 9)])
def test_colliding_taps_propose_what_works(layers: int, k: int, proposed: int) -> None:
    with pytest.raises(DflashError, match=rf"--num-taps {proposed}, that is --layers ") as error:
        default_taps(layers, k)
    assert len(default_taps(layers, proposed)) == proposed
    text = str(error.value).split("that is --layers ")[1].split(", or")[0].rstrip(".")
    check_taps(tuple(map(int, text.split(","))), layers)


@pytest.mark.parametrize("taps", [(1, 1, 2), (0, 6), (-1, 2), (3, 2), ()])
def test_wrong_layers_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(DflashError, match="use --"):
        check_taps(taps, 6)


def test_decoder_layers_are_those_of_the_text_model(tiny_target: Path) -> None:
    model = load_target(tiny_target)
    assert [type(layer).__name__ for layer in decoder_layers(model)] == ["Qwen3DecoderLayer"] * 6
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_kept_folder_replaces_the_target(tiny_chat: Path, tmp_path: Path) -> None:
    """Everything that stage two asks for, from a copy alone."""
    write_target_folder(tiny_chat, tmp_path / "kept", chat_template="{{ messages }}")
    kept = tmp_path / "kept"
    assert not (kept / "model.safetensors").exists()
    assert not (kept / "head.safetensors").exists(), "tied"
    assert (kept / "norm.safetensors").exists()
    assert replace(TargetSpec.read(kept), name="") == replace(TargetSpec.read(tiny_chat), name="")
    assert stop_token_ids(kept) == stop_token_ids(tiny_chat) == (2,)
    tokenizer = load_tokenizer(kept)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(tiny_chat)
    assert template_fingerprint(tokenizer) != template_fingerprint(load_tokenizer(tiny_chat))
    weights = load_file(tiny_chat / "model.safetensors")
    assert torch.equal(read_frozen(kept).head, weights["model.embed_tokens.weight"])
    assert read_frozen(kept, dtype="bfloat16").head.dtype == torch.bfloat16
    size = sum(-(-p.stat().st_size // 4096) * 4096 for p in kept.iterdir())
    assert abs(target_folder_bytes(tiny_chat, TargetSpec.read(tiny_chat)) - size) <= 4096


def test_sharded_weights_and_single_file_are_the_same_target(tmp_path: Path) -> None:
    one = make_tiny(tmp_path / "one", "llama")
    many = tmp_path / "many"
    model = make_model("llama")
    model.save_pretrained(many, max_shard_size="100KB")
    assert (many / "model.safetensors.index.json").exists()
    assert not (many / "model.safetensors").exists()
    assert weights_fingerprint(one) == weights_fingerprint(many)
    frozen = read_frozen(many)
    assert torch.equal(frozen.head, head_weight(model))
    assert frozen.head is not frozen.embed
    (many / sorted(p.name for p in many.glob("model-*.safetensors"))[0]).unlink()
    with pytest.raises(DflashError, match="fetch them again"):
        read_frozen(many)


def test_weights_decide_what_is_tied(tiny_target: Path, tmp_path: Path) -> None:
    """As transformers: both tensors there and different is not tied; the head alone serves as embedding."""
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    embed = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embed.flip(0).contiguous()}, folder / "model.safetensors", {"format": "pt"})
    frozen = read_frozen(folder)
    assert not frozen.spec.tied
    assert torch.equal(frozen.head, head_weight(load_target(folder)))
    save_file({**weights, "lm_head.weight": embed.clone()}, folder / "model.safetensors", {"format": "pt"})
    assert read_frozen(folder).spec.tied
    del weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embed.clone()}, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(read_frozen(folder).embed, embed)


def test_quantised_or_biased_heads_are_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "target", "llama")
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight")
    save_file({**weights, "lm_head.qweight": head.to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DflashError, match="quantised"):
        read_frozen(folder)
    save_file({**weights, "lm_head.weight": head.to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(DflashError, match="F8_E4M3"):
        read_frozen(folder)
    save_file({**weights, "lm_head.weight": head, "lm_head.bias": head[:, 0].clone()}, folder / "model.safetensors")
    with pytest.raises(DflashError, match="bias"):
        read_frozen(folder)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DflashError, match="output head"):
        read_frozen(folder)


def test_fingerprints_see_content_and_nothing_else(tiny_target: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_target, tmp_path / "elsewhere")
    before = weights_fingerprint(copy), config_fingerprint(copy), tokenizer_fingerprint(copy)
    assert before == (
        weights_fingerprint(tiny_target),
        config_fingerprint(tiny_target),
        tokenizer_fingerprint(tiny_target),
    )
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(config | {"transformers_version": "9", "_name_or_path": "x"}, indent=7)
    )
    assert config_fingerprint(copy) == before[1]
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    assert config_fingerprint(copy) != before[1]
    shutil.copy(tiny_target / "config.json", copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"][5, 5] += 0.1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert weights_fingerprint(copy) != before[0]


def test_tokenizer_fingerprint_ignores_padding_settings(tiny_target: Path) -> None:
    tokenizer = load_tokenizer(tiny_target)
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "longer"], padding=True, truncation=True, max_length=3)
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_fingerprint(tokenizer) != before


def test_damaged_folders_are_named(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="does not exist"):
        resolve_target(str(tmp_path / "nowhere"))
    with pytest.raises(DflashError, match=r"no config\.json"):
        TargetSpec.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DflashError, match="cannot be read as JSON"):
        TargetSpec.read(tmp_path)
    copy = shutil.copytree(tiny_target, tmp_path / "target")
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(DflashError, match="fetch it again"):
        weights_fingerprint(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(DflashError, match=r"no model\.safetensors"):
        write_target_folder(copy, tmp_path / "kept")
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(DflashError, match="no tokenizer that transformers can load"):
        load_tokenizer(copy)


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ((), r"4 of 5 layers are linear attention .* flash-linear-attention and causal-conv1d are not installed"),
        (("fla",), r"since causal-conv1d is not installed: .* several times as long .*\(pip install causal-conv1d\)"),
        (("fla", "causal_conv1d"), None),
    ],
)
def test_a_hybrid_without_its_kernels_is_warned_of_once(
    there: tuple[str, ...],
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    folder = make_tiny(tmp_path / "target", "qwen3.5", num_hidden_layers=5)
    real = importlib.util.find_spec
    hidden = {"fla", "causal_conv1d"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: (name in there or None) if name in hidden else real(name, *a)
    )
    load_target(folder)
    found = capsys.readouterr().err
    assert found.count("Warning") == (says is not None)
    assert says is None or re.search(says, found)
    assert len(found.splitlines()) <= 1, "transformers' own warning would be a second one"


def test_a_dense_target_is_not_warned_of(tiny_target: Path, capsys: pytest.CaptureFixture) -> None:
    load_target(tiny_target)
    assert capsys.readouterr().err == ""


def test_models_without_what_extraction_needs_are_one_sentence() -> None:
    """No list of decoder layers to hook; a head that is quantised in the live model."""
    model = make_model("llama")
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:3])
    with pytest.raises(DflashError, match="no list of 6 decoder layers to tap: use another target"):
        decoder_layers(model)
    with pytest.raises(DflashError, match="has no decoder that dflash can find: use another target"):
        text_model(torch.nn.Linear(2, 2))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(DflashError, match=r"no plain output head .*: use the original checkpoint"):
        head_weight(model)


def test_code_in_a_target_needs_a_flag(tiny_target: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_target, tmp_path / "target")
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "c.py").write_text("raise SystemExit('ran code of the target')")
    assert TargetSpec.read(copy).hidden_size == 64
    with pytest.raises(DflashError, match=r"code of its own \(m\.M\): look at it, then pass --trust-remote-code"):
        load_target(copy)
