"""Flat parameters and the folded update against plain torch."""

from itertools import pairwise

import pytest
import torch
from test_drafter import small_config

from dflash.drafter import Drafter, RopeTable, initialise, side_by_side
from dflash.train.optimiser import Optimiser, flatten, learning_rate


def made(dtype: torch.dtype = torch.float32) -> Drafter:
    drafter = Drafter(small_config())
    initialise(drafter, seed=1)
    return drafter


@pytest.mark.parametrize("clip", [0.01, 1e9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_equal_torch_adamw_with_division_and_clipping(clip: float, decay: float) -> None:
    ours, plain = made(), made()
    flat = flatten(ours, torch.float32, torch.device("cpu"))
    optimiser = Optimiser(flat, weight_decay=decay, clip=clip)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        denominator = torch.tensor(37.5)
        named = flat.views(flat.grad)
        for name, theirs in plain.named_parameters():
            mine = named[name]
            summed = torch.randn(mine.shape, generator=generator) * 20
            mine += summed
            theirs.grad = summed / denominator
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimiser.lr.fill_(0.01)
        norm, skipped = optimiser.update(denominator)
        adamw.step()
        assert torch.allclose(norm, expected, rtol=1e-5)
        assert skipped == 0
        assert not flat.grad.any()
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6), name


def test_muon_equals_torchs_on_matrices_and_leaves_vectors_to_adamw() -> None:
    """bf16 products inside: the same up to their rounding, relative to the size of a step."""
    ours, plain = made(), made()
    flat = flatten(ours, torch.float32, torch.device("cpu"))
    optimiser = Optimiser(flat, weight_decay=0.1, clip=1e9, kind="muon")
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    theirs = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.0),
    ]
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    optimiser.lr.fill_(0.01)
    for _ in range(4):
        named = flat.views(flat.grad)
        for name, parameter in plain.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            named[name] += 8 * parameter.grad
        optimiser.update(torch.tensor(8.0))
        for each in theirs:
            each.step()
    for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        moved = (other - before[name]).norm()
        assert (mine - other).norm() < 0.02 * moved, name
    assert optimiser.state().keys() >= {"momentum.fc.weight", "exp_avg.norm.weight", "step.0"}
    assert "exp_avg.fc.weight" not in optimiser.state()


def test_the_average_follows_the_masters_and_serves_in_their_place() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        drafter = made()
        flat = flatten(drafter, dtype, torch.device("cpu"))
        optimiser = Optimiser(flat, weight_decay=0.0, clip=1.0, ema=0.9)
        optimiser.lr.fill_(0.1)
        expected = flat.master.clone()
        for step in range(1, 31):
            flat.grad.normal_()
            optimiser.update(torch.tensor(1.0))
            decay = min(0.9, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * flat.master
        assert torch.allclose(optimiser.ema, expected, rtol=1e-4, atol=1e-6)
        master, weights = flat.master.clone(), flat.weights.clone()
        with optimiser.averaged():
            served = flat.views(optimiser.ema.to(dtype))["fc.weight"]
            assert torch.equal(drafter.fc.weight, served)
        assert torch.equal(flat.master, master)
        assert torch.equal(flat.weights, weights)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(("gradient", "denominator"), [(0.0, 0.0), (float("nan"), 3.0), (float("inf"), 3.0)])
def test_no_weight_or_a_value_that_is_not_finite_skips_the_update(
    gradient: float, denominator: float, kind: str
) -> None:
    drafter = made()
    flat = flatten(drafter, torch.float32, torch.device("cpu"))
    optimiser = Optimiser(flat, weight_decay=0.1, clip=1.0, kind=kind, ema=0.9)
    optimiser.lr.fill_(0.01)
    flat.grad.fill_(1.0)
    optimiser.update(torch.tensor(5.0))
    before = [tensor.clone() for tensor in (flat.master, optimiser.ema, *optimiser.state().values())]
    flat.grad[3] = gradient
    _, skipped = optimiser.update(torch.tensor(denominator))
    assert skipped == 1
    after = [flat.master, optimiser.ema, *optimiser.state().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not flat.grad.any()


def test_gradients_accumulate_in_place_in_fp32_with_bf16_weights() -> None:
    drafter = made()
    flat = flatten(drafter, torch.bfloat16, torch.device("cpu"))
    addresses = [view.data_ptr() for view in flat.grads]
    x = torch.randn(4, 64).bfloat16()

    def loss() -> torch.Tensor:
        used = drafter.fc(x).float().sum()
        return used + sum(0.0 * parameter.float().sum() for parameter in drafter.parameters())

    for _ in range(2):
        flat.accumulate(loss())
    assert [view.data_ptr() for view in flat.grads] == addresses
    assert drafter.fc.weight.dtype == torch.bfloat16
    view = flat.views(flat.grad)["fc.weight"]
    assert view.dtype == torch.float32
    once = view.clone() / 2
    flat.grad.zero_()
    flat.accumulate(loss())
    assert torch.equal(view, once)
    assert once.any()


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == 2.0
    assert rates.index(2.0) == 9
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_products_give_what_single_ones_give(dtype: torch.dtype) -> None:
    """Outputs and the gradient of every parameter and input; the joined weights are the parameters' own memory."""
    generator = torch.Generator().manual_seed(3)
    plain, ours = made().to(dtype), made()
    flatten(ours, dtype, torch.device("cpu"))
    layers = [drafter.all_layers()[1] for drafter in (plain, ours)]
    assert layers[0].mlp.joined is None
    assert layers[1].mlp.joined.data_ptr() == layers[1].mlp.gate_proj.weight.data_ptr()  # type: ignore[union-attr]
    x_NH = torch.randn(24, small_config().hidden_size, generator=generator).to(dtype)
    rope = RopeTable(small_config(), 24, dtype, "cpu")(torch.arange(24))
    results = []
    for layer in layers:
        x = x_NH.clone().requires_grad_()
        q, k, v = side_by_side(x, layer.self_attn.joined, *(getattr(layer.self_attn, f"{p}_proj") for p in "qkv"))
        keys, values = layer.self_attn.keys_values(x, rope)
        out = torch.cat([part.flatten(1) for part in (q, k, v, keys, values, layer.mlp(x))], dim=1)
        used = [p for n, p in layer.named_parameters() if n.endswith("proj.weight") and "o_proj" not in n]
        weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype)
        results.append([out, *torch.autograd.grad(out, [x, *used], weight)])
    for mine, theirs in zip(*results, strict=True):
        loose = {"rtol": 0.02, "atol": 0.01} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(mine, theirs, **loose)
