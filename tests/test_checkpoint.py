"""Both layouts, tensor by tensor and key by key, and every way in which a folder can be unfit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter import small_config

from dflash.checkpoint import (
    Origin,
    load_drafter,
    read_config,
    read_copies,
    read_drafter,
    tensor_shapes,
    write_drafter,
)
from dflash.checkpoint.speculators import copies
from dflash.checkpoint.zlab import config_from_json, config_to_json
from dflash.drafter import Drafter, DrafterConfig, initialise
from dflash.errors import DflashError

VECTORS = Path(__file__).parent / "assets" / "vectors"

#: facts: H 32, I 48, 2 layers, 6/2 heads of 8, taps (1, 2)
TENSORS = {
    "fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,),
    **{f"layers.{i}.{name}.weight": shape for i in (0, 1) for name, shape in {
        "input_layernorm": (32,), "post_attention_layernorm": (32,),
        "self_attn.q_proj": (48, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 48), "self_attn.q_norm": (8,), "self_attn.k_norm": (8,),
        "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
    }.items()},
}  # fmt: skip
KEYS = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 5,
    "dflash_config": {"block_size": 5, "mask_token_id": 7, "target_layer_ids": [1, 2]}, "num_target_layers": 6,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 50,
    "max_position_embeddings": 256, "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
    "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "layer_types": ["full_attention", "full_attention"], "sliding_window": None, "use_sliding_window": False,
    "max_window_layers": 2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
QWEN3 = {
    name: KEYS[name] for name in KEYS
    if name not in ("architectures", "block_size", "dflash_config", "num_target_layers")
}  # fmt: skip
#: the origin of the drafter below, as it stands under `dflash`
ORIGIN = {
    "target": "org/model", "architectures": ["Qwen3ForCausalLM"], "config": "c0", "weights": "f0",
    "num_target_layers": 6, "tokenizer": "t0", "template": "m0", "template_args": {"enable_thinking": False},
    "embed_factor": 8.0, "softcap": 30.0, "logit_scale": 0.25, "step": 400,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dflash", "default_proposal_method": "greedy",
        "proposal_methods": [{
            "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0,
        }],
        "verifier": {"name_or_path": "org/model", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": QWEN3, "draft_vocab_size": 50, "block_size": 5, "target_hidden_size": 32,
    "aux_hidden_state_layer_ids": [2, 3], "mask_token_id": 7, "sample_from_anchor": False,
    "sliding_window_non_causal": True, "tie_word_embeddings": False, "dtype": "bfloat16", "torch_dtype": "bfloat16",
    "dflash": ORIGIN,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SLIDING: dict[str, Any] = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 64}


def write(folder: Path, config: DrafterConfig, layout: str, dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    drafter = Drafter(config)
    initialise(drafter, seed=3)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    embed = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    origin = Origin(**(ORIGIN | {"architectures": ("Qwen3ForCausalLM",)}))
    copied = copies(embed, 8.0, embed) if layout == "speculators" else None
    write_drafter(folder, config, dict(drafter.named_parameters()), dtype, ids, origin, copied)
    return {"embed": embed, **dict(drafter.named_parameters())}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    drafter = Drafter(small_config())
    initialise(drafter, seed=3)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    write_drafter(tmp_path, small_config(), dict(drafter.named_parameters()), "bfloat16", ids)
    return tmp_path


def test_every_tensor_has_the_layouts_name_shape_and_dtype(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == TENSORS
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensor_shapes(small_config()) == TENSORS
    assert len(TENSORS) == 11 * 2 + 3


def test_every_key_is_the_layouts(folder: Path) -> None:
    assert json.loads((folder / "config.json").read_text()) == KEYS


def test_the_origin_and_a_logit_scale_come_on_top(tmp_path: Path) -> None:
    write(tmp_path, small_config(), "z-lab")
    assert json.loads((tmp_path / "config.json").read_text()) == KEYS | {"logit_scale": 0.25, "dflash": ORIGIN}


def test_the_speculators_layout_has_its_keys_and_the_targets_tensors(tmp_path: Path) -> None:
    written = write(tmp_path, small_config(), "speculators")
    assert json.loads((tmp_path / "config.json").read_text()) == SPECULATORS
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = TENSORS | {"embed_tokens.weight": (50, 32), "lm_head.weight": (50, 32)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["embed_tokens.weight"], written["embed"] * 8.0)
    assert torch.equal(tensors["lm_head.weight"], written["embed"])
    assert torch.equal(read_copies(tmp_path)["lm_head.weight"], written["embed"])


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"rope_scaling": YARN}, {"rope_scaling": LLAMA3, "rope_theta": 5e5}, {"block_size": 16, "taps": (0, 2, 4)},
        SLIDING, {"rms_norm_eps": 1e-5, "max_position_embeddings": 77, "mask_token_id": 49},
    ],
)  # fmt: skip
def test_what_was_written_is_read_back(tmp_path: Path, changes: dict, layout: str) -> None:
    config = small_config(**changes)
    written = write(tmp_path, config, layout, "float32")
    read, origin = read_config(tmp_path)
    assert read == config
    assert origin is not None
    assert origin.to_json() == ORIGIN
    _, tensors = read_drafter(tmp_path)
    assert all(torch.equal(tensor, written[name]) for name, tensor in tensors.items())
    assert len(tensors) == len(tensor_shapes(config))


def test_what_is_causal_says_of_sliding_layers_alone_may_stand_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KEYS | SLIDING | {"is_causal": True}))
    assert read_config(tmp_path)[0].windows == (64, 64)


def test_the_last_layer_has_no_id_in_the_speculators_layout(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"cannot express tap 5, the target's last layer.*--layout z-lab"):
        write(tmp_path, small_config(taps=(1, 5)), "speculators")
    write(tmp_path, small_config(taps=(1, 5)), "z-lab")


def test_sliding_layers_are_told_as_servers_read_them(tmp_path: Path) -> None:
    """SGLang and vLLM run a sliding layer causally; vLLM's one `causal` of a speculators config is for all layers."""
    mixed = small_config(**(SLIDING | {"layer_types": ("sliding_attention", "full_attention")}))
    with pytest.raises(DflashError, match=r"full and sliding layers together.*--layout z-lab"):
        write(tmp_path, mixed, "speculators")
    for config, layout in ((small_config(**SLIDING), "speculators"), (mixed, "z-lab")):
        write(tmp_path, config, layout)
        document = json.loads((tmp_path / "config.json").read_text())
        layer = document.get("transformer_layer_config", document)
        assert (layer["sliding_window"], layer["use_sliding_window"]) == (64, True)
        assert layer["layer_types"] == list(config.layer_types)
        assert document.get("sliding_window_non_causal") in (None, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "shifted by one"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32 of 50"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"speculators_model_type": "eagle3"}, "'eagle3', not 'dflash'"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "counted from 0"),
        (
            {
                "sliding_window_non_causal": False,
                "transformer_layer_config": QWEN3 | {"layer_types": ["sliding_attention"] * 2},
            },
            "sliding_window is missing",
        ),
        ({"transformer_layer_config": QWEN3 | SLIDING}, "sliding_window_non_causal is true"),
    ],
)
def test_a_speculators_config_that_cannot_be_run_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SPECULATORS | change))
    with pytest.raises(DflashError, match=message):
        read_drafter(tmp_path)


def test_a_foreign_speculators_config_does_not_say_how_many_layers_the_target_has(tmp_path: Path) -> None:
    write(tmp_path, small_config(), "speculators")
    foreign = {name: value for name, value in SPECULATORS.items() if name != "dflash"}
    (tmp_path / "config.json").write_text(json.dumps(foreign))
    config, origin = read_config(tmp_path)
    assert (config.num_target_layers, origin) == (0, None)
    assert len(read_drafter(tmp_path)[1]) == len(TENSORS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"is_causal": True}, "is_causal is True"),
        ({**SLIDING, "is_causal": False}, "is_causal is False .*leave the field out"),
        (
            {**SLIDING, "layer_types": ["sliding_attention", "full_attention"], "is_causal": True},
            "is_causal is True .*leave the field out",
        ),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 64}, "layer_types is missing"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types is"),
        ({"layer_types": ["full_attention"]}, "for each layer"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 10000.0.*500000.0"),
        ({"rope_scaling": YARN}, "rope_scaling is .*yarn.*, rope_parameters .*default.*; make them equal"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 3]}}, "RoPE"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "RoPE .longrope"),
        ({"block_size": 8}, "block_size is 8, dflash_config.block_size is 5"),
        ({"dflash_config": KEYS["dflash_config"] | {"mask_token_id": 50}}, "mask_token_id is 50, .*below 50"),
        (
            {"dflash_config": KEYS["dflash_config"] | {"target_layer_ids": [1, 6]}},
            "tap 6 must be one of the target's 6",
        ),
        ({"dflash_config": KEYS["dflash_config"] | {"target_layer_ids": [1, 1]}}, "must be different layers"),
        ({"dflash_config": KEYS["dflash_config"] | {"causal": True}}, "dflash_config.causal"),
        ({"architectures": ["LlamaForCausalLM"]}, "give a DFlash drafter"),
        ({"dflash": {"target": "T"}}, "field dflash is damaged"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_its_field(tmp_path: Path, change: dict, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KEYS | change))
    with pytest.raises(DflashError, match=message):
        read_config(tmp_path)


def test_names_with_the_prefix_that_servers_also_take_are_read(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    _, read = read_drafter(folder)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_the_public_reference_checkpoint_is_read() -> None:
    config, tensors = read_drafter(VECTORS / "drafter")
    assert (config.block_size, config.taps, config.mask_token_id, config.num_target_layers) == (8, (1, 3, 5), 3, 8)
    assert len(tensors) == 11 * 2 + 3


def test_transformers_reads_the_config_as_qwen3(folder: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "qwen3"
    assert config.head_dim == 8


def test_block_size_inside_dflash_config_alone_is_enough(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    del document["block_size"]
    assert config_from_json(document, Path("x")).block_size == 5
    assert config_from_json(config_to_json(small_config(), "float16"), Path("x")) == small_config()


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_target_layers", "dflash_config", "rms_norm_eps", "head_dim", "vocab_size"]
)
def test_a_missing_field_is_named(folder: Path, field: str) -> None:
    document = json.loads((folder / "config.json").read_text())
    del document[field]
    with pytest.raises(DflashError, match=f"field {field} is missing"):
        config_from_json(document, Path("config.json"))


@pytest.mark.parametrize("field", ["target_layer_ids", "mask_token_id"])
def test_taps_and_mask_are_never_guessed(folder: Path, field: str) -> None:
    document = json.loads((folder / "config.json").read_text())
    del document["dflash_config"][field]
    with pytest.raises(DflashError, match=rf"dflash_config\.{field} is missing"):
        config_from_json(document, Path("config.json"))


def test_shifted_labels_are_refused_with_the_reason(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3DSparkModel"]}
    flat = document | {"target_layer_ids": [1, 2], "mask_token_id": 7, "architectures": ["Qwen3DFlashModel"]}
    del flat["dflash_config"]
    for dialect in (document, flat):
        with pytest.raises(DflashError, match=r"DeepSpec.*shifted by one"):
            config_from_json(dialect, Path("config.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "norm.weight is missing"),
        (lambda t: t.update({"extra.weight": torch.ones(1)}), "extra.weight is not of a DFlash drafter"),
        (lambda t: t.update({"norm.weight": torch.ones(31)}), r"norm.weight has shape \[31\]"),
    ],
)
def test_unfit_tensors_are_named(folder: Path, change: object, message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DflashError, match=message):
        read_drafter(folder)


def test_a_truncated_file_is_one_sentence(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DflashError, match=r"model\.safetensors cannot be read"):
        load_drafter(folder, torch.float32)
    shutil.rmtree(folder)
    with pytest.raises(DflashError, match="does not exist"):
        load_drafter(folder, torch.float32)
