"""The frozen-head loss against plain references, and against golden numbers of the public trainer."""

from pathlib import Path

import pytest
import torch
from reference import plain_counts, plain_dpace, plain_logits, plain_loss
from safetensors.torch import load_file
from test_drafter import run_rows

from dflash.checkpoint import load_drafter
from dflash.loss import (
    Head,
    Teacher,
    block_loss,
    decay_weights,
    default_gamma,
    dpace_weights,
    slots_that_count,
)

VECTORS = Path(__file__).parent / "assets" / "vectors"
ANCHORS, SLOTS, HIDDEN, VOCABULARY = 7, 5, 16, 37
HEADS = [(1.0, None), (0.25, None), (1.0, 3.0), (0.5, 2.0)]


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    hidden = torch.randn(ANCHORS, SLOTS, HIDDEN, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (ANCHORS, SLOTS))
    counts = (torch.rand(ANCHORS, SLOTS) > 0.3).long().cumprod(1).double()
    return hidden, weight, targets, counts


@pytest.mark.parametrize(("scale", "softcap"), HEADS)
@pytest.mark.parametrize("kind", ["ce", "dpace", "kl-topk", "kl-last"])
def test_loss_and_gradient_equal_autograd_in_fp64(kind: str, scale: float, softcap: float | None) -> None:
    hidden, weight, targets, counts = random_case(seed=len(kind))
    head = Head(weight, scale, softcap)
    last = torch.randn_like(hidden)
    teacher, teacher_logp = None, None
    if kind == "kl-last":
        teacher = Teacher(last_AJH=last)
        teacher_logp = torch.log_softmax(plain_logits(last, weight, scale, softcap), -1)
    elif kind == "kl-topk":
        values, ids = torch.log_softmax(plain_logits(last, weight, scale, softcap), -1).topk(4)
        teacher = Teacher(ids_AJk=ids, logp_AJk=values)
        renormalised = values - values.logsumexp(-1, keepdim=True)
        teacher_logp = torch.full((ANCHORS, SLOTS, VOCABULARY), -1e300, dtype=torch.float64).scatter(
            -1, ids, renormalised
        )
    decay = None if kind == "dpace" else decay_weights(SLOTS + 1, 2.5, "cpu").double()

    ours = hidden.clone().requires_grad_()
    sums = block_loss(ours, head, targets, counts, decay_J=decay, teacher=teacher, chunk_logits=VOCABULARY * SLOTS * 3)
    (3 * sums.numerator).backward()

    plain = hidden.clone().requires_grad_()
    logits = plain_logits(plain, weight, scale, softcap)
    if decay is None:
        ce = torch.nn.functional.cross_entropy(logits.detach().flatten(0, 1), targets.flatten(), reduction="none")
        rows = zip(ce.view(ANCHORS, SLOTS).tolist(), counts.tolist(), strict=True)
        weights = torch.tensor([plain_dpace(c, n, 0.5) for c, n in rows], dtype=torch.float64)
        denominator = counts.sum()
    else:
        weights = decay * counts
        denominator = weights.sum()
    loss = plain_loss(logits, targets, weights, teacher_logp)
    (3 * loss).backward()
    # the teacher's exponentials of a masked log-probability differ in the last places only
    assert torch.allclose(sums.numerator, loss, rtol=1e-6)
    assert torch.allclose(sums.denominator, denominator, rtol=1e-6)
    assert torch.allclose(ours.grad, plain.grad, rtol=1e-5, atol=1e-7)


def test_unscored_slots_may_hold_garbage() -> None:
    hidden, weight, targets, counts = random_case(seed=5)
    decay = decay_weights(SLOTS + 1, 4.0, "cpu").double()
    clean = block_loss(hidden, Head(weight), targets, counts, decay_J=decay)
    poisoned = hidden.clone()
    poisoned[counts == 0] = 1e4
    other = torch.where(counts > 0, targets, torch.randint(VOCABULARY, targets.shape))
    dirty = block_loss(poisoned, Head(weight), other, counts, decay_J=decay)
    for name in ("numerator", "denominator", "scored", "correct", "prefix"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name


def test_no_scored_slot_gives_zero_and_no_nan() -> None:
    hidden, weight, targets, counts = random_case(seed=6)
    for decay in (decay_weights(SLOTS + 1, 4.0, "cpu").double(), None):
        leaf = hidden.clone().requires_grad_()
        sums = block_loss(leaf, Head(weight), targets, torch.zeros_like(counts), decay_J=decay)
        sums.numerator.backward()
        assert sums.numerator == 0
        assert sums.denominator == 0
        assert torch.equal(leaf.grad, torch.zeros_like(hidden))


def test_metrics_count_what_a_server_would_accept() -> None:
    weight = torch.eye(4, dtype=torch.float64)
    targets = torch.tensor([[1, 2, 3], [1, 2, 3]])
    hidden = torch.nn.functional.one_hot(torch.tensor([[1, 0, 3], [1, 2, 0]]), 4).double() * 9
    counts = torch.tensor([[1.0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    sums = block_loss(hidden, Head(weight), targets, counts, decay_J=decay_weights(4, 4.0, "cpu"))
    assert sums.scored.tolist() == [2, 2, 1]
    assert sums.correct.tolist() == [2, 1, 1]
    assert sums.prefix.tolist() == [2, 1, 0]


@pytest.mark.parametrize("prefix", ["agree", "any"])
def test_slots_that_count_equal_the_rule_spelled_out(prefix: str) -> None:
    torch.manual_seed(8)
    supervised, agrees = torch.rand(200, 6) > 0.2, torch.rand(200, 6) > 0.3
    ours = slots_that_count(supervised, agrees, prefix)
    plain = [plain_counts(s, a, prefix) for s, a in zip(supervised.tolist(), agrees.tolist(), strict=True)]
    assert ours.tolist() == plain
    assert 0 < ours.mean() < 1


def test_the_disagreeing_slot_itself_counts() -> None:
    supervised, agrees = torch.ones(1, 5, dtype=torch.bool), torch.tensor([[True, True, False, True, True]])
    assert slots_that_count(supervised, agrees, "agree").tolist() == [[1, 1, 0, 0]]


def test_default_gamma_passes_through_the_papers_values() -> None:
    assert [default_gamma(b) for b in (4, 8, 10, 16, 32)] == [2, 4, 5, 7, 14]


def test_dpace_weights_equal_the_formula() -> None:
    torch.manual_seed(9)
    ce, counts = torch.rand(20, 6, dtype=torch.float64) * 3, (torch.rand(20, 6) > 0.4).double()
    plain = [plain_dpace(c, n, 0.3) for c, n in zip(ce.tolist(), counts.tolist(), strict=True)]
    assert torch.allclose(dpace_weights(ce, counts, 0.3), torch.tensor(plain, dtype=torch.float64))


def test_loss_and_gradients_equal_the_public_reference() -> None:
    golden = load_file(VECTORS / "loss.safetensors")
    target = load_file(VECTORS / "target" / "model.safetensors")
    drafter = load_drafter(VECTORS / "drafter", torch.float32).requires_grad_()
    embed = target["model.embed_tokens.weight"]
    block = drafter.config.block_size
    ids, mask = golden["input_ids"], golden["loss_mask"].bool()
    valid = golden["anchor_valid"].bool()
    anchors = [row[keep].tolist() for row, keep in zip(golden["anchors"], valid, strict=True)]
    assert all(row == sorted(row) for row in anchors)
    hidden = run_rows(drafter, golden["context"], ids, anchors, embed)

    rows = torch.tensor([r for r, row in enumerate(anchors) for _ in row])
    slots = torch.tensor([p for row in anchors for p in row])[:, None] + torch.arange(block)
    inside = slots < ids.shape[1]
    slots = slots.clamp(max=ids.shape[1] - 1)
    tokens, supervised = ids[rows[:, None], slots], mask[rows[:, None], slots] & inside
    counts = (supervised[:, 1:]).float()  # the public trainer keeps slots after a gap
    decay = decay_weights(block, float(golden["gamma"]), "cpu")
    head = Head(target.get("lm_head.weight", embed))
    sums = block_loss(hidden[:, 1:], head, tokens[:, 1:], counts, decay_J=decay)
    loss = sums.numerator / sums.denominator
    loss.backward()
    assert abs(loss - golden["loss"]) <= 1e-6 * golden["loss"]
    assert torch.allclose(sums.denominator, golden["loss_denominator"], rtol=1e-6)
    accuracy = sums.correct.sum() / sums.scored.sum()
    assert torch.allclose(accuracy, golden["accuracy"], atol=1e-6)
    parameters = dict(drafter.named_parameters())
    for name in [key.removeprefix("grad.") for key in golden if key.startswith("grad.")]:
        expected = golden[f"grad.{name}"]
        assert (parameters[name].grad - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-6, name
