"""A drafter with sliding layers decodes under the mask that it was trained with."""

from dataclasses import replace

import pytest
import torch
from reference import dense_blocks
from test_decode import CASES, GREEDY, VECTORS

from dflash.caches import TappedTarget
from dflash.checkpoint import load_drafter
from dflash.decode import decode_speculative
from dflash.drafter import FULL, SLIDING, Drafter
from dflash.target import TargetSpec, load_target


def sliding_drafter(window: int) -> Drafter:
    """The golden one's weights, its last layer full."""
    drafter = load_drafter(VECTORS / "drafter", torch.float32)
    layers = drafter.config.num_layers
    drafter.config = replace(drafter.config, sliding_window=window, layer_types=(SLIDING,) * (layers - 1) + (FULL,))
    return drafter


def walked(
    drafter: Drafter, model: torch.nn.Module, embed: torch.Tensor, head: torch.Tensor, ids: list[int], start: int
) -> list[int]:
    """Acceptance lengths of the target's own answer ids[start:], block by block under a dense mask."""
    text = torch.tensor(ids)
    with torch.no_grad():
        states = model(text[None], output_hidden_states=True).hidden_states
        taps = torch.cat([states[tap + 1][0] for tap in drafter.config.taps], -1)
        lengths, position = [], start
        while position < len(ids) - 1:
            hidden = dense_blocks(drafter, taps, text, [position], embed)[0, 1:]
            drafts = (hidden @ head.T).argmax(-1)[: len(ids) - 1 - position]
            good = int((drafts == text[position + 1 : position + 1 + len(drafts)]).long().cumprod(0).sum())
            lengths.append(good + 1)
            position += good + 1
    return lengths


@pytest.mark.parametrize("window", [8, 12])
def test_cycles_accept_what_the_dense_mask_with_windows_drafts(window: int) -> None:
    drafter, model = sliding_drafter(window), load_target(VECTORS / "target", torch.float32)
    target = TappedTarget(model, TargetSpec.read(VECTORS / "target"), drafter.config.taps)
    differs = False
    for case in CASES[:4]:
        prompt = case["prompt"]
        response = decode_speculative(target, drafter, [prompt], [48], (), GREEDY)[0]
        assert response.output_ids == case["output"][len(prompt) :][:48]  # windows change the speed, not the text
        ids = prompt + case["output"][len(prompt) :]
        expected = walked(drafter, model, target.embed_VH, target.head.weight_VH, ids, len(prompt))
        ours = response.acceptance_lengths
        assert ours[:-1] == expected[: len(ours) - 1]
        differs |= ours[:-1] != case["acceptance_lengths"][: len(ours) - 1]
    assert differs, "the window hides nothing here, so the test says nothing"
