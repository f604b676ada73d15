"""Speculative decoding against golden runs of the public reference and against the target alone."""

import json
from pathlib import Path

import pytest
import torch

from dflash.caches import TappedTarget
from dflash.checkpoint import load_drafter
from dflash.decode import decode_plain, decode_speculative
from dflash.drafter import Drafter
from dflash.response import Response, first_difference, kept_tokens
from dflash.sampling import Sampling, best_and_rivals
from dflash.target import TargetSpec, load_target

VECTORS = Path(__file__).parent / "assets" / "vectors"
CASES = json.loads((VECTORS / "speculative_decoding.json").read_text())


@pytest.fixture(scope="module")
def pair() -> tuple:
    drafter = load_drafter(VECTORS / "drafter", torch.float32)
    model = load_target(VECTORS / "target", torch.float32)
    return TappedTarget(model, TargetSpec.read(VECTORS / "target"), drafter.config.taps), drafter


GREEDY = Sampling()


def plain(target: TappedTarget, prompt: list[int], limit: int, stop_ids: tuple[int, ...] = ()) -> Response:
    return decode_plain(target, [prompt], [limit], stop_ids)[0]


def speculative(
    target: TappedTarget,
    drafter: Drafter,
    prompt: list[int],
    limit: int,
    stop_ids: tuple[int, ...] = (),
    sampling: Sampling = GREEDY,
) -> Response:
    return decode_speculative(target, drafter, [prompt], [limit], stop_ids, sampling)[0]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_tokens_and_accepted_counts_equal_the_public_reference(pair: tuple, case: dict) -> None:
    target, drafter = pair
    response = speculative(target, drafter, case["prompt"], 64)
    assert case["prompt"] + response.output_ids == case["output"]
    ours, golden = response.acceptance_lengths, case["acceptance_lengths"]
    # the reference's last count is uncut, and it makes one more cycle when exactly 64 tokens are out
    assert ours[:-1] == golden[: len(ours) - 1]
    assert len(golden) - len(ours) in (0, 1)
    assert sum(ours) == len(response.output_ids) - 1
    assert plain(target, case["prompt"], 64).output_ids == response.output_ids


def test_a_stop_token_ends_the_answer_and_is_kept(pair: tuple) -> None:
    target, drafter = pair
    case = CASES[0]
    answer = case["output"][len(case["prompt"]) :]
    stop = answer[20]
    expected = answer[: answer.index(stop) + 1]
    for response in (
        plain(target, case["prompt"], 64, (stop,)),
        speculative(target, drafter, case["prompt"], 64, (stop,)),
    ):
        assert response.output_ids == expected
    assert sum(response.acceptance_lengths) == len(expected) - 1


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9])
def test_the_limit_holds_exactly(pair: tuple, limit: int) -> None:
    target, drafter = pair
    case = CASES[1]
    expected = case["output"][len(case["prompt"]) :][:limit]
    response = speculative(target, drafter, case["prompt"], limit)
    assert response.output_ids == expected == plain(target, case["prompt"], limit).output_ids


def test_slot_counts_agree_with_the_cycles(pair: tuple) -> None:
    target, drafter = pair
    response = speculative(target, drafter, CASES[0]["prompt"], 64)
    whole = response.acceptance_lengths[:-1]
    for slot in range(drafter.config.block_size - 1):
        expected = sum(length - 1 > slot for length in whole)
        assert response.accepted[slot] - expected in (0, 1)  # the last cycle may be cut
        assert response.drafted[slot] - len(whole) in (0, 1)


def test_hooks_are_removed_and_a_bad_drafter_changes_nothing_but_speed(pair: tuple) -> None:
    target, _drafter = pair
    broken = load_drafter(VECTORS / "drafter", torch.float32)
    with torch.no_grad():
        broken.fc.weight.mul_(-3.0)
    case = CASES[2]
    response = speculative(target, broken, case["prompt"], 64)
    assert case["prompt"] + response.output_ids == case["output"]
    assert not any(module._forward_hooks for module in target.model.modules())


def test_sampling_keeps_the_targets_distribution(pair: tuple) -> None:
    """Chi-square over the second token, which a draft proposes: 500 samples of one prompt."""
    target, drafter = pair
    prompt, samples = CASES[0]["prompt"], 500
    generator = torch.Generator().manual_seed(11)
    counts = torch.zeros(256)
    for _ in range(samples):
        counts[
            speculative(target, drafter, prompt, 2, (), Sampling(temperature=1.0, generator=generator)).output_ids[-1]
        ] += 1
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        first = torch.softmax(target.model(ids).logits[0, -1], -1)
        batch = torch.cat((ids.expand(256, -1), torch.arange(256)[:, None]), 1)
        second = torch.softmax(target.model(batch).logits[:, -1], -1)
    expected = (first[:, None] * second).sum(0) * samples
    common = expected >= 5
    chi = ((counts - expected)[common] ** 2 / expected[common]).sum()
    rest = expected[~common].sum()
    chi = chi + (counts[~common].sum() - rest) ** 2 / rest.clamp(min=1)
    freedom = int(common.sum())
    assert freedom > 8
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


def test_a_difference_is_a_tie_only_where_one_run_had_the_others_token_within_rounding() -> None:
    own = Response(output_ids=[4, 5, 6], rivals=[(), (8, 9), ()])
    none: list[tuple[int, ...]] = [()] * 3
    assert first_difference(Response(output_ids=[4, 5, 6], rivals=none), own) == "identical"
    assert first_difference(Response(output_ids=[4, 9, 8], rivals=none), own) == "ties"
    assert first_difference(Response(output_ids=[4, 7, 8], rivals=[(), (5,), ()]), own) == "ties"
    assert first_difference(Response(output_ids=[4, 7, 8], rivals=[(), (9,), ()]), own) == "wrong"
    assert first_difference(Response(output_ids=[7, 5, 6], rivals=[(5,), (), ()]), own) == "wrong"
    assert first_difference(Response(output_ids=[4, 5], rivals=none[:2]), own) == "wrong"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rivals_are_the_tokens_within_two_units_in_the_last_place(dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps * 16  # of numbers between 16 and 32
    rows = [
        [20.0, 3, 20.0 - 2 * ulp, -1, 0, 20.0 - ulp],
        [20.0, 3, 20.0 - 3 * ulp, -1, 0, 0],
        [7, -20, 0, 7, 7, 7],
    ]
    best, rivals = best_and_rivals(torch.tensor([rows], dtype=dtype))
    assert best.tolist() == [[0, 0, 0]]
    assert rivals.tolist() == [[[5, 2, -1], [-1, -1, -1], [5, 4, 3]]]


def test_kept_tokens_cuts_at_limit_and_stop() -> None:
    assert kept_tokens([4, 5, 6], 9, (7,)) == ([4, 5, 6], False)
    assert kept_tokens([4, 5, 6], 3, (7,)) == ([4, 5, 6], True)
    assert kept_tokens([4, 7, 6], 9, (7,)) == ([4, 7], True)
    assert kept_tokens([4, 5, 6], 2, (6,)) == ([4, 5], True)


def test_a_batch_gives_what_each_prompt_gives_alone(pair: tuple) -> None:
    """Rows of different lengths, limits and ends."""
    target, drafter = pair
    prompts = [case["prompt"] for case in CASES]
    limits = [64, 30, 64, 5, 64, 1]
    stop = (CASES[2]["output"][len(prompts[2]) + 40],)
    alone = [speculative(target, drafter, p, n, stop) for p, n in zip(prompts, limits, strict=True)]
    assert decode_speculative(target, drafter, prompts, limits, stop) == alone
    ours = decode_plain(target, prompts, limits, stop)
    assert [response.output_ids for response in ours] == [response.output_ids for response in alone]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_free_row_takes_the_next_prompt(pair: tuple, rows: int) -> None:
    """What an earlier prompt left in a row's caches is never seen."""
    target, drafter = pair
    prompts = [case["prompt"] for case in CASES]
    limits = [20, 64, 1, 33, 64, 7]
    stop = (CASES[2]["output"][len(prompts[2]) + 40],)
    expected = decode_speculative(target, drafter, prompts, limits, stop)
    assert decode_speculative(target, drafter, prompts, limits, stop, rows=rows) == expected
    plain_ids = [response.output_ids for response in decode_plain(target, prompts, limits, stop, rows=rows)]
    assert plain_ids == [response.output_ids for response in expected]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_same_numbers_draw_the_same_answer_with_and_without_a_drafter(pair: tuple, temperature: float) -> None:
    target, drafter = pair
    prompts = [case["prompt"] for case in CASES]

    def sampling() -> Sampling:
        return Sampling(temperature=temperature, generator=torch.Generator().manual_seed(5))

    own = decode_plain(target, prompts, [40] * len(prompts), (), sampling())
    ours = decode_speculative(target, drafter, prompts, [40] * len(prompts), (), sampling(), rows=4)
    assert [len(response.output_ids) for response in ours] == [40] * len(prompts)
    assert [response.output_ids for response in ours] == [response.output_ids for response in own]
    assert len({tuple(response.output_ids) for response in own}) == len(prompts)
