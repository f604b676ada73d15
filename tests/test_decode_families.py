"""Greedy speculative decoding equals the target's own, in fp32, for every family of tests/make_tiny.py."""

from pathlib import Path

import pytest
import torch
from make_tiny import FAMILIES, make_tiny
from test_drafter import small_config

from dflash.caches import TappedTarget
from dflash.decode import decode_plain, decode_speculative
from dflash.drafter import Drafter, initialise
from dflash.errors import DflashError
from dflash.response import first_difference
from dflash.target import TargetSpec, load_target

VOCAB, BLOCK = 12, 4  # so few tokens that an untrained drafter is right now and then
HYBRID = {"qwen3-next", "qwen3.5", "qwen3.5-vision"}
LENGTHS = (3, 21, 8, 1, 13)  # on both sides of the tiny targets' window of 8


def drafter_for(spec: TargetSpec, seed: int = 4) -> Drafter:
    drafter = Drafter(
        small_config(
            hidden_size=64, vocab_size=VOCAB, block_size=BLOCK, taps=(1, 3), num_target_layers=6, mask_token_id=11,
            rms_norm_eps=spec.rms_norm_eps, rope_theta=spec.rope_theta,
        )
    )  # fmt: skip
    initialise(drafter, seed=seed)
    return drafter.eval()


def own_answer(target: TappedTarget, prompt: list[int], tokens: int) -> list[int]:
    """The model alone, without any cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - HYBRID))
def test_greedy_output_is_the_targets_own(family: str, tmp_path: Path) -> None:
    # a tied head behind a scaled embedding would repeat the last token, and the drafter its mask token
    untied = {"tie_word_embeddings": False} if family.startswith("gemma") else {}
    folder = make_tiny(tmp_path / "t", family, vocab_size=VOCAB, seed=1, **untied)
    spec = TargetSpec.read(folder)
    target = TappedTarget(load_target(folder), spec, (1, 3))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    limits = [24, 24, 9, 24, 2]
    own = decode_plain(target, prompts, limits)
    assert own[1].output_ids == own_answer(target, prompts[1], 24)
    assert len({token for each in own for token in each.output_ids}) > 2, "answers must vary"
    accepted = 0
    for seed in range(12):  # until a drafter is right now and then: the test means little before
        drafter = drafter_for(spec, seed)
        ours = decode_speculative(target, drafter, prompts, limits)
        assert [each.output_ids for each in ours] == [each.output_ids for each in own]
        assert {first_difference(a, b) for a, b in zip(ours, own, strict=True)} == {"identical"}
        accepted = sum(sum(each.accepted) for each in ours)
        if accepted:
            break
    assert accepted > 0
    assert decode_speculative(target, drafter, prompts, limits, rows=2) == ours


@pytest.mark.parametrize("family", sorted(HYBRID))
def test_a_state_that_cannot_be_rolled_back_is_refused(family: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "t", family, vocab_size=VOCAB)
    spec = TargetSpec.read(folder, name="org/hybrid")
    with pytest.raises(DflashError, match=r"org/hybrid has .*linear.*cannot be rolled back"):
        TappedTarget(load_target(folder), spec, (1, 3))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[TappedTarget, Drafter, list[int], list[int]]:
    folder = make_tiny(tmp_path_factory.mktemp("ends") / "t", vocab_size=VOCAB, seed=1)
    spec = TargetSpec.read(folder)
    drafter = drafter_for(spec)
    target = TappedTarget(load_target(folder), spec, drafter.config.taps)
    prompt = [3, 1, 4, 1, 5]
    return target, drafter, prompt, own_answer(target, prompt, 3 * BLOCK)


def test_every_limit_holds_wherever_it_falls_in_a_block(pair: tuple) -> None:
    target, drafter, prompt, answer = pair
    limits = list(range(1, len(answer) + 1))
    found = decode_speculative(target, drafter, [prompt] * len(limits), limits)
    for limit, response in zip(limits, found, strict=True):
        assert response.output_ids == answer[:limit]
        assert sum(response.acceptance_lengths) == limit - 1


def test_every_stop_token_ends_the_answer_wherever_it_falls_in_a_block(pair: tuple) -> None:
    target, drafter, prompt, answer = pair
    for stop in sorted(set(answer)):
        (response,) = decode_speculative(target, drafter, [prompt], [len(answer)], (stop,))
        assert response.output_ids == answer[: answer.index(stop) + 1]
        assert sum(response.acceptance_lengths) == len(response.output_ids) - 1
        assert response.output_ids == decode_plain(target, [prompt], [len(answer)], (stop,))[0].output_ids
        cycles = len(response.acceptance_lengths)
        assert all(drafted <= cycles for drafted in response.drafted)
        assert all(a <= d for a, d in zip(response.accepted, response.drafted, strict=True))
