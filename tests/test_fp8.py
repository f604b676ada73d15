"""Products in e4m3 stay close to whole ones, weights get whole gradients, and nothing measured goes through them."""

from dataclasses import replace

import pytest
import torch
from test_drafter import small_config

from dflash.drafter import Drafter, RopeTable, initialise, side_by_side
from dflash.errors import DflashError
from dflash.fp8 import LARGEST, narrowed, product
from dflash.gated import GatedMLP
from dflash.kernels import head as head_kernels
from dflash.kernels.head import gradient_in_place, narrow_gradient
from dflash.loss import Head, NarrowHead, Teacher, block_loss, decay_weights
from dflash.train.narrow import check_fp8, to_fp8
from dflash.train.optimiser import Optimiser, flatten
from dflash.train.step import Batch, Model, Objective, Sums, micro_step

CPU = torch.device("cpu")
VOCABULARY = 96
STEP_OF_E4M3 = 2**-4  # half of its last bit, relative


def close(ours: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    """The difference is within `share` of the whole, as vectors."""
    wanted = wanted.float()
    assert (ours.float() - wanted).norm() <= share * wanted.norm()


def test_numbers_of_a_row_keep_three_bits_whatever_the_row_is_worth() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64) * torch.logspace(-6, 6, 8)[:, None]
    narrow = narrowed(x)
    large = x.abs() > narrow.scale * 2**-6  # below, e4m3 has fewer bits
    assert ((narrow.wide() - x).abs() <= STEP_OF_E4M3 * x.abs())[large].all()
    assert torch.equal(narrow.values.float().abs().amax(1), torch.full((8,), LARGEST))


def test_a_row_of_zeros_stays_one_and_a_row_with_nan_taints_itself_alone() -> None:
    x = torch.randn(4, 32)
    x[1], x[2, 5], x[3, 7] = 0.0, float("nan"), float("inf")
    wide = narrowed(x).wide()
    assert wide[0].isfinite().all()
    assert torch.equal(wide[1], torch.zeros(32))
    assert wide[2:].isnan().any(1).all()


@pytest.mark.parametrize("fast", [False, True])
def test_the_product_is_that_of_what_the_operands_stand_for(fast: bool) -> None:
    torch.manual_seed(1)
    a, b = narrowed(torch.randn(33, 64).bfloat16()), narrowed(torch.randn(64, 48).bfloat16().T)
    close(product(a, b, fast), a.wide() @ b.wide().T, 2**-8)


def test_weights_get_whole_gradients_and_inputs_narrow_ones() -> None:
    torch.manual_seed(2)
    joined = torch.randn(96, 32).bfloat16()
    linears = [torch.nn.Linear(32, size, bias=False, dtype=torch.bfloat16) for size in (32, 48, 16)]
    for linear, part in zip(linears, joined.split((32, 48, 16)), strict=True):
        linear.weight = torch.nn.Parameter(part)
    x = torch.randn(64, 32).bfloat16().requires_grad_()
    results = []
    for fp8 in (False, True):
        out = torch.cat(side_by_side(x, joined, *linears, fp8=fp8), dim=1)
        weights = [linear.weight for linear in linears]
        results.append(
            [out, *torch.autograd.grad(out, [x, *weights], torch.linspace(-1, 1, 96).bfloat16().expand(64, 96))]
        )
    (out, d_x, *d_weights), (out8, d_x8, *d_weights8) = results
    close(out8, out, 0.05)
    close(d_x8, d_x, 0.05)
    assert not torch.equal(d_x8, d_x)
    for mine, theirs in zip(d_weights8, d_weights, strict=True):
        assert torch.equal(mine, theirs)


def test_the_gated_mlp_stays_close() -> None:
    torch.manual_seed(3)
    joined, down = torch.randn(96, 32).bfloat16() / 6, torch.randn(32, 48).bfloat16() / 7
    leaves = [torch.randn(64, 32).bfloat16(), joined[:48].clone(), joined[48:].clone(), down]
    leaves = [each.requires_grad_() for each in leaves]
    whole, narrow = (GatedMLP.apply(leaves[0], joined, *leaves[1:], fp8) for fp8 in (False, True))
    close(narrow, whole, 0.08)
    d_out = torch.randn(64, 32).bfloat16()
    for mine, theirs in zip(
        torch.autograd.grad(narrow, leaves, d_out), torch.autograd.grad(whole, leaves, d_out), strict=True
    ):
        close(mine, theirs, 0.08)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_heads_gradient_kernel_scales_rows_to_what_e4m3_holds(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that do not count hold anything; among the others are a sure one, a sure and wrong one, one of equals.

    It writes fp32 here, since Triton's interpreter does not round to e4m3 as a GPU does.
    """
    monkeypatch.setattr(head_kernels, "E4M3", torch.float32)
    torch.manual_seed(4)
    logits, targets = torch.randn(7, 5000) * 3, torch.randint(5000, (7,))
    logits[1, targets[1]], logits[2, (targets[2] + 1) % 5000], logits[3] = 60.0, 60.0, 1.0
    weights = torch.tensor([0.7, 1.0, 0.3, 2.0, 0.0, 1.0, 0.0])
    logits[4], logits[6] = float("nan"), float("inf")
    shaped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    lse, highest = shaped.logsumexp(1), shaped.amax(1)
    picked = shaped.gather(1, targets[:, None])[:, 0]
    narrow = narrow_gradient(logits.clone(), picked, highest, targets, lse, weights, 1.0, softcap)
    whole = logits.clone()
    gradient_in_place(whole, targets, lse, weights, 1.0, softcap)
    assert not whole[[4, 6]].any()
    assert not narrow.wide()[[4, 6]].any()
    count = [0, 1, 2, 3, 5]
    torch.testing.assert_close(narrow.wide()[count], whole[count], rtol=1e-5, atol=1e-12)
    assert narrow.values[count].abs().max() <= LARGEST
    if softcap is None:  # with it, the bound is an upper one
        assert (narrow.values[[0, 2, 3, 5]].abs().amax(1) > 0.99 * LARGEST).all()


@pytest.mark.parametrize("kind", ["ce", "d-pace", "top-k", "last"])
def test_every_loss_through_a_narrow_head_stays_close(kind: str) -> None:
    torch.manual_seed(5)
    weight, hidden = torch.randn(VOCABULARY, 64).bfloat16(), torch.randn(9, 4, 64).bfloat16()
    targets, counts = torch.randint(VOCABULARY, (9, 4)), torch.ones(9, 4)
    ids = torch.stack([torch.randperm(VOCABULARY)[:8] for _ in range(36)]).view(9, 4, 8)
    teacher = {
        "top-k": Teacher(ids_AJk=ids, logp_AJk=torch.randn(9, 4, 8).log_softmax(-1)),
        "last": Teacher(last_AJH=torch.randn(9, 4, 64).bfloat16()),
    }.get(kind)
    decay = None if kind == "d-pace" else decay_weights(5, 4.0, CPU)
    results = []
    for head in (Head(weight, 0.2), Head(weight, 0.2, narrow=NarrowHead.of(weight))):
        leaf = hidden.clone().requires_grad_()
        sums = block_loss(leaf, head, targets, counts, decay_J=decay, teacher=teacher)
        results.append((sums.numerator, torch.autograd.grad(sums.numerator, leaf)[0]))
    (loss, gradient), (loss8, gradient8) = results
    close(loss8, loss, 0.02)
    close(gradient8, gradient, 0.12)
    assert not torch.equal(gradient8, gradient)


def trained(fp8: bool, steps: int = 40) -> tuple[list[float], Model]:
    """Mean loss of each step on one batch, in bf16."""
    config = small_config(block_size=5, vocab_size=VOCABULARY)
    drafter = Drafter(config)
    initialise(drafter, seed=2)
    flat = flatten(drafter, torch.bfloat16, CPU)
    generator = torch.Generator().manual_seed(6)
    embed = torch.randn(VOCABULARY, config.hidden_size, generator=generator).bfloat16()
    model = Model(
        drafter=drafter, rope=RopeTable(config, 40, torch.bfloat16, CPU), embed_VH=embed, embed_factor=1.0,
        head=Head(embed, 0.2),
    )  # fmt: skip
    model = to_fp8(model) if fp8 else model
    ids = torch.randint(VOCABULARY, (3, 30), generator=generator, dtype=torch.int32)
    hidden = torch.randn(3, 30, 2 * config.hidden_size, generator=generator).bfloat16()
    batch = Batch(hidden, ids, ids, torch.ones(3, 30, dtype=torch.uint8), torch.tensor([30, 30, 12]), torch.arange(3))
    optimiser, losses = Optimiser(flat, weight_decay=0.0, clip=1.0), []
    objective = Objective(loss="ce", decay_J=decay_weights(5, 4.0, CPU), prefix="agree")
    optimiser.lr.fill_(3e-3)
    for _ in range(steps):
        sums = Sums(4, CPU)
        micro_step(model, batch, objective, 20, 0, torch.tensor(0), sums, flat)
        losses.append(float(sums.vector[0] / sums.denominator))
        optimiser.update(sums.denominator)
    return losses, model


def test_a_drafter_learns_as_fast_and_is_read_whole() -> None:
    whole, narrow = trained(fp8=False), trained(fp8=True)
    assert whole[0][-1] < 0.7 * whole[0][0], "there was something to learn"
    assert narrow[0][1:] != whole[0][1:]
    assert max(abs(a - b) for a, b in zip(whole[0], narrow[0], strict=True)) < 0.05 * whole[0][0]
    model = narrow[1]
    plain = Drafter(model.drafter.config).bfloat16()
    plain.load_state_dict(model.drafter.state_dict())
    taps = torch.randn(7, 2 * 32).bfloat16()
    model.drafter.eval()
    assert torch.equal(model.drafter.context(taps), plain.context(taps))
    model.drafter.train()
    assert not torch.equal(model.drafter.context(taps), plain.context(taps))
    hidden = torch.randn(3, 32).bfloat16()
    assert torch.equal(model.head.logits(hidden), replace(model.head, narrow=None).logits(hidden))


def test_what_a_card_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DflashError, match="needs a Hopper GPU or a newer one, not a CPU"):
        check_fp8(CPU, small_config())
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A40")
    with pytest.raises(DflashError, match="not an A40; use --precision bf16"):
        check_fp8(cuda, small_config())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(DflashError, match="but the target's vocabulary is 50;"):
        check_fp8(cuda, small_config(vocab_size=50))
    check_fp8(cuda, small_config(vocab_size=VOCABULARY))
