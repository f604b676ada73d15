"""Sampled speculative decoding keeps the target's distribution: whole answers counted over a tiny vocabulary."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from make_tiny import make_tiny
from test_drafter import small_config

from dflash.caches import TappedTarget
from dflash.decode import decode_plain, decode_speculative
from dflash.drafter import Drafter, initialise
from dflash.sampling import Sampling
from dflash.target import TargetSpec, load_target

VOCAB, TOKENS, SAMPLES = 6, 4, 6_000
PROMPT = [1, 4, 2, 0, 3]
FAR = 4.0  # standard deviations beyond which a chi-square is refused: once in 30,000 honest runs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[TappedTarget, Drafter]:
    folder = make_tiny(tmp_path_factory.mktemp("sampling") / "t", vocab_size=VOCAB, num_hidden_layers=4, seed=3)
    drafter = Drafter(
        small_config(hidden_size=64, vocab_size=VOCAB, block_size=3, num_target_layers=4, mask_token_id=5)
    )
    initialise(drafter, seed=2)
    spec = TargetSpec.read(folder)
    return TappedTarget(load_target(folder), spec, drafter.config.taps), drafter.eval()


def truth(target: TappedTarget, temperature: float) -> np.ndarray:
    """Probability of every answer of TOKENS tokens, [VOCAB, VOCAB, …], from the model alone."""
    answers = torch.tensor(list(itertools.product(range(VOCAB), repeat=TOKENS)))
    ids = torch.cat((torch.tensor([PROMPT]).expand(len(answers), -1), answers), 1)
    with torch.inference_mode():
        logits = target.model(ids).logits[:, len(PROMPT) - 1 : -1].double()
    logp = torch.log_softmax(logits / temperature, -1).gather(-1, answers[..., None])[..., 0].sum(1)
    return logp.exp().numpy()


def counts(answers: Sequence[Sequence[int]]) -> np.ndarray:
    index = np.array(answers) @ (VOCAB ** np.arange(TOKENS - 1, -1, -1))
    return np.bincount(index, minlength=VOCAB**TOKENS)


def deviations(found: np.ndarray, probabilities: np.ndarray) -> float:
    """How many standard deviations chi-square lies above its mean (Wilson and Hilferty); rare answers are pooled."""
    expected = probabilities * found.sum()
    common = expected >= 5
    observed = np.append(found[common], found[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    chi, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    return float(((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom)))


def sample(
    pair: tuple[TappedTarget, Drafter], temperature: float, seed: int, speculative: bool = True
) -> tuple[np.ndarray, float]:
    """Counts of SAMPLES answers, and the mean number of accepted drafts a cycle."""
    target, drafter = pair
    sampling = Sampling(temperature=temperature, generator=torch.Generator().manual_seed(seed))
    prompts, limits = [PROMPT] * SAMPLES, [TOKENS] * SAMPLES
    if not speculative:
        return counts([each.output_ids for each in decode_plain(target, prompts, limits, (), sampling)]), 0.0
    found = decode_speculative(target, drafter, prompts, limits, (), sampling)
    accepted = sum(sum(each.accepted) for each in found) / sum(len(each.acceptance_lengths) for each in found)
    return counts([each.output_ids for each in found]), accepted


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_whole_answers_have_the_targets_distribution(pair: tuple[TappedTarget, Drafter], temperature: float) -> None:
    probabilities = truth(pair[0], temperature)
    assert probabilities.sum() == pytest.approx(1)
    found, accepted = sample(pair, temperature, seed=1)
    assert (SAMPLES * probabilities >= 5).sum() > 100, "the answers must be many for the test to mean something"
    assert accepted > 0.1, "drafts must be accepted for the test to mean something"
    assert abs(deviations(found, probabilities)) < FAR


def test_plain_sampling_has_it_too(pair: tuple[TappedTarget, Drafter]) -> None:
    found, _ = sample(pair, 1.0, seed=2, speculative=False)
    assert abs(deviations(found, truth(pair[0], 1.0))) < FAR


def test_the_measure_sees_another_temperature_and_another_conditional(pair: tuple[TappedTarget, Drafter]) -> None:
    """It must fail where decoding is wrong: a temperature that is off, or a token drawn after another one's prefix."""
    found, _ = sample(pair, 1.0, seed=3)
    assert deviations(found, truth(pair[0], 0.8)) > 2 * FAR
    shape = (VOCAB,) * TOKENS
    whole = truth(pair[0], 1.0).reshape(shape)
    last = whole / whole.sum(-1, keepdims=True)
    wrong = whole.sum(-1, keepdims=True) * (0.6 * last + 0.4 * np.roll(last, 1, axis=-2))
    drawn = np.random.default_rng(0).multinomial(SAMPLES, wrong.flatten())
    assert deviations(drawn, whole.flatten()) > FAR
