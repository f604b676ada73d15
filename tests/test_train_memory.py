"""The forecast against peaks that were measured on a card, and what is given up where it is too small."""

import pytest
from test_drafter import small_config

from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import DflashError
from dflash.train.memory import PLAIN, Economy, Need, choose, forecast, ladder, parameters_of, sentence

#: bench/step.py's shapes: hidden, mlp, vocabulary, heads, kv heads, head dim, context, anchors, block
SHAPES = {
    "A": (4096, 12288, 151936, 32, 8, 128, 12288, 2048, 16),
    "S": (576, 1536, 49152, 9, 3, 64, 2432, 128, 16),
}
#: allocated at the peak on an H200, torch 2.11, 2026-11-30 (docs/benchmarks.md)
MEASURED = {"A": 49.3e9, "S": 1.0e9}


def need(name: str = "A", context: int | None = None, **changes: object) -> Need:
    hidden, inner, vocabulary, heads, groups, dim, tokens, anchors, block = SHAPES[name]
    shape = small_config(
        hidden_size=hidden, intermediate_size=inner, vocab_size=vocabulary, num_heads=heads, num_kv_heads=groups,
        head_dim=dim, block_size=block, num_layers=5, taps=tuple(range(5)),
    )  # fmt: skip
    return Need(shape, ((context or tokens, anchors),), 5 * hidden * 2 + 9, **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_the_forecast_is_within_a_tenth_of_the_measured_peak(name: str) -> None:
    found = forecast(need(name))
    assert found.device == pytest.approx(MEASURED[name], rel=0.1)


@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_are_counted_as_they_are(layers: int) -> None:
    shape: DrafterConfig = small_config(num_layers=layers)
    sizes = [parameter.numel() for parameter in Drafter(shape).parameters()]
    assert sum(parameters_of(shape)) == sum(sizes)
    matrices = [parameter.numel() for parameter in Drafter(shape).parameters() if parameter.ndim > 1]
    assert parameters_of(shape)[0] == sum(matrices)


def test_each_thing_given_up_needs_less() -> None:
    plain = need(context=8192)
    costs = [forecast(plain, economy).card for economy in ladder(plain)]
    assert costs[0] == max(costs)
    assert costs[-1] == min(costs)
    assert forecast(plain, Economy(layerwise=True)).step < forecast(plain).step / 2
    away = forecast(plain, Economy(host_embedding=True))
    assert away.frozen == forecast(plain).frozen / 2
    assert away.pinned - forecast(plain).pinned == away.frozen
    assert forecast(need(ema=True)).optimiser - forecast(need(muon=True)).optimiser > 4e9


def test_an_8b_targets_drafter_fits_into_24_gb_with_replays_checkpointing_and_the_embedding_away() -> None:
    economy = choose(need(context=8192), int(24e9))
    assert economy.layerwise
    assert economy.host_embedding
    assert economy.anchors < 2048
    assert forecast(need(context=8192), economy).card <= 24e9
    assert choose(need(context=8192), int(140e9)) == PLAIN
    assert choose(need(context=8192), None) == PLAIN
    assert "checkpointing" in sentence(forecast(need(), economy), economy)


def test_too_small_a_card_is_refused_with_what_would_fit() -> None:
    with pytest.raises(DflashError, match=r"needs \d+\.\d GB .* 12\.0 GB may be used; --token-budget \d+ .*would fit"):
        choose(need(), int(12e9))
    with pytest.raises(DflashError, match="no drafter of this width fits"):
        choose(need(), int(1e9))
    with pytest.raises(DflashError, match="nothing given up"):  # a CPU has nothing to give up
        choose(need(cuda=False), int(20e9))


def test_a_tied_embedding_stays() -> None:
    assert not any(economy.host_embedding for economy in ladder(need(tied=True)))
    assert forecast(need(tied=True)).frozen == forecast(need()).frozen / 2
