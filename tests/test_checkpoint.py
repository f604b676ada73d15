"""The z-lab layout, tensor by tensor and key by key, and every way in which a folder can be unfit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafter import small_config

from dflash.checkpoint import config_from_json, config_to_json, load_drafter, read_drafter, tensor_shapes, write_drafter
from dflash.drafter import Drafter, initialise
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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": YARN}, {"block_size": 16, "taps": (0, 3, 5)}])
def test_what_was_written_is_read_back(changes: dict) -> None:
    config = small_config(**changes)
    assert config_from_json(config_to_json(config, "bfloat16"), Path("x")) == config


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
    with pytest.raises(DflashError, match="shifted by one"):
        config_from_json(document, Path("config.json"))


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
