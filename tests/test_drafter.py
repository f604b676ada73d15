"""The drafter against golden numbers of the public reference and against a dense mask in fp64."""

from pathlib import Path

import pytest
import torch
from reference import dense_blocks
from safetensors.torch import load_file

from dflash.attention import attend_rows, row_spans
from dflash.checkpoint import load_drafter
from dflash.drafter import (
    FULL,
    SLIDING,
    Drafter,
    DrafterConfig,
    RopeTable,
    embed_blocks,
    initialise,
    rope_frequencies,
)
from dflash.loss import Head

VECTORS = Path(__file__).parent / "assets" / "vectors"


def small_config(**changes: object) -> DrafterConfig:
    fields: dict = {
        "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 256,
        "vocab_size": 50, "block_size": 5, "taps": (1, 2), "num_target_layers": 6, "mask_token_id": 7,
    }  # fmt: skip
    return DrafterConfig(**(fields | changes))


def run_rows(
    drafter: Drafter, taps_RCF: torch.Tensor, ids_RC: torch.Tensor, anchors_RA: list[list[int]], embed: torch.Tensor
) -> torch.Tensor:
    """The product's way: rows flattened, attention row by row. Returns [ΣA, B, H]."""
    rows, ceiling, _ = taps_RCF.shape
    config = drafter.config
    rope = RopeTable(config, ceiling + config.block_size, taps_RCF.dtype, "cpu")
    flat = torch.tensor([r * ceiling + p for r, anchors in enumerate(anchors_RA) for p in sorted(anchors)])
    positions = flat % ceiling
    x = embed_blocks(embed, 1.0, ids_RC.flatten()[flat], config.mask_token_id, config.block_size)
    slots = positions[:, None] + torch.arange(config.block_size)
    attend = attend_rows(row_spans(flat, rows, ceiling), positions, config.block_size)
    context_rope = rope(torch.arange(ceiling).repeat(rows))
    out = drafter(taps_RCF.flatten(0, 1), context_rope, x.flatten(0, 1), rope(slots.flatten()), attend)
    return out.view(len(flat), config.block_size, -1)


def test_forward_and_logits_equal_the_public_reference() -> None:
    golden = load_file(VECTORS / "forward.safetensors")
    target = load_file(VECTORS / "target" / "model.safetensors")
    drafter = load_drafter(VECTORS / "drafter", torch.float32)
    embed = target["model.embed_tokens.weight"]
    anchors = [row.tolist() for row in golden["anchors"]]
    assert all(row == sorted(row) for row in anchors)
    hidden = run_rows(drafter, golden["context"], golden["input_ids"], anchors, embed)
    expected = golden["block_hidden"].flatten(0, 1)
    assert (hidden - expected).abs().max() <= 1e-5 * expected.abs().max()
    head = target.get("lm_head.weight", embed)
    logits = Head(head).logits(hidden)
    expected_logits = golden["logits"].flatten(0, 1)
    assert (logits - expected_logits).abs().max() <= 1e-5 * expected_logits.abs().max()


@pytest.mark.parametrize("layer_types", [(), (SLIDING, FULL)], ids=["full", "sliding"])
@pytest.mark.parametrize("block_size", [4, 5, 16])
def test_rows_equal_a_dense_mask_in_fp64(
    block_size: int, layer_types: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.attention.SCORES_AT_ONCE", 6 * block_size * 40)  # several chunks of anchors a row
    torch.manual_seed(block_size)
    config = small_config(block_size=block_size, layer_types=layer_types, sliding_window=18)
    drafter = Drafter(config).double()
    initialise(drafter, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    embed = torch.randn(50, 32, dtype=torch.float64)
    taps, ids = torch.randn(3, 40, 64, dtype=torch.float64), torch.randint(50, (3, 40))
    anchors = [[0, 3, 17, 39], [], [25]]
    out = run_rows(drafter, taps, ids, anchors, embed)
    expected = torch.cat([dense_blocks(drafter, taps[r], ids[r], a, embed) for r, a in enumerate(anchors) if a])
    assert torch.allclose(out, expected, rtol=1e-10, atol=1e-10)
    if layer_types:
        drafter.config = small_config(block_size=block_size)
        assert not torch.allclose(out, run_rows(drafter, taps, ids, anchors, embed))


def test_a_config_without_a_sliding_layer_has_one_spelling() -> None:
    assert small_config(layer_types=[FULL, FULL], sliding_window=64) == small_config()
    assert small_config().windows == (None, None)
    mixed = small_config(layer_types=[SLIDING, FULL], sliding_window=64, taps=[1, 2])
    assert mixed.windows == (64, None)
    assert mixed == small_config(layer_types=(SLIDING, FULL), sliding_window=64)


def test_context_at_and_after_the_anchor_is_invisible() -> None:
    torch.manual_seed(3)
    drafter = Drafter(small_config())
    embed, taps, ids = torch.randn(50, 32), torch.randn(1, 40, 64), torch.randint(50, (1, 40))
    clean = run_rows(drafter, taps, ids, [[12]], embed)
    noisy = taps.clone()
    noisy[:, 12:] = torch.randn(1, 28, 64) * 1e3
    assert torch.equal(clean, run_rows(drafter, noisy, ids, [[12]], embed))
    noisy[:, 11] += 1.0
    assert not torch.equal(clean, run_rows(drafter, noisy, ids, [[12]], embed))


def test_gradients_of_rows_equal_those_of_the_dense_mask() -> None:
    torch.manual_seed(4)
    drafter = Drafter(small_config()).double()
    embed = torch.randn(50, 32, dtype=torch.float64)
    taps, ids = torch.randn(1, 30, 64, dtype=torch.float64), torch.randint(50, (1, 30))
    weight = torch.randn(2, 5, 32, dtype=torch.float64)
    gradients = []
    for out in (run_rows(drafter, taps, ids, [[4, 20]], embed), dense_blocks(drafter, taps[0], ids[0], [4, 20], embed)):
        drafter.zero_grad()
        (out * weight).sum().backward()
        gradients.append([p.grad.clone() for p in drafter.parameters()])
    for ours, dense in zip(*gradients, strict=True):
        assert torch.allclose(ours, dense, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)  # fmt: skip
def test_rope_scaling_changes_the_angles(scaling: dict) -> None:
    plain, factor = rope_frequencies(small_config())
    scaled, scaled_factor = rope_frequencies(small_config(rope_scaling=scaling))
    assert factor == 1.0
    assert plain.shape == scaled.shape == (4,)
    assert not torch.equal(plain, scaled) or scaled_factor != 1.0
