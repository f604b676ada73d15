"""The micro-step against a slow fp64 reference; stale, poisoned and invisible data must not matter."""

from dataclasses import replace

import pytest
import torch
from reference import dense_blocks, plain_counts
from test_drafter import small_config

from dflash.drafter import Drafter, RopeTable, initialise
from dflash.loss import Head, decay_weights
from dflash.train.anchors import choose, scores
from dflash.train.optimiser import flatten
from dflash.train.step import Batch, Model, Objective, Sums, micro_loss, micro_step

ROWS, CEILING, VOCABULARY, HIDDEN, BLOCK = 3, 30, 50, 32, 5
LENGTHS = (30, 17, 0)
STEP = torch.tensor(4)


def make_model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    drafter = Drafter(small_config(block_size=BLOCK)).to(dtype)
    initialise(drafter, seed=2)
    embed = torch.randn(VOCABULARY, HIDDEN, dtype=dtype)
    return Model(
        drafter=drafter,
        rope=RopeTable(drafter.config, CEILING + BLOCK, dtype, "cpu"),
        embed_VH=embed,
        embed_factor=2.0,
        head=Head(torch.randn(VOCABULARY, HIDDEN, dtype=dtype), 0.5, 7.0),
    )


def make_batch(poison: float = 0.5) -> Batch:
    """Valid parts are fixed by the seed; everything behind a row's length is `poison` or an impossible id."""
    torch.manual_seed(1)
    hidden = torch.randn(ROWS, CEILING, 2 * HIDDEN).bfloat16()
    ids = torch.randint(VOCABULARY, (ROWS, CEILING), dtype=torch.int32)
    labels = torch.where(torch.rand(ROWS, CEILING) < 0.8, ids, (ids + 1) % VOCABULARY)
    mask = (torch.rand(ROWS, CEILING) < 0.85).to(torch.uint8)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    behind = torch.arange(CEILING) >= lengths[:, None]
    hidden[behind] = poison
    ids[behind], labels[behind], mask[behind] = 2**31 - 1, -(2**31), 255
    return Batch(hidden, ids, labels, mask, lengths, torch.tensor([40, 41, -1]))


def objective(**changes: object) -> Objective:
    fields = {"loss": "ce", "decay_J": decay_weights(BLOCK, 2.0, "cpu").double(), "prefix": "agree"}
    return Objective(**(fields | changes))


def chosen(mask_RC: torch.Tensor, batch: Batch, anchors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's anchors among supervised positions with a supervised successor."""
    valid = mask_RC & torch.nn.functional.pad(mask_RC[:, 1:], (0, 1))
    score = scores(9, STEP, batch.documents[:, None], torch.arange(CEILING))
    return choose(valid.flatten(), score.flatten(), anchors)


def reference(model: Model, batch: Batch, goal: Objective, anchors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerator (differentiable) and denominator, block by block."""
    mask = (batch.loss_mask > 0) & (torch.arange(CEILING) < batch.lengths[:, None])
    flat, live = chosen(mask, batch, anchors)
    numerator, denominator = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for index in flat[live].tolist():
        row, position = divmod(index, CEILING)
        length = int(batch.lengths[row])
        taps = batch.hidden[row, :length].double()
        ids, labels = batch.input_ids[row].long(), batch.labels[row].long()
        out = dense_blocks(model.drafter, taps, ids[:length], [position], model.embed_VH, model.embed_factor)[0]
        slots = [position + j for j in range(BLOCK)]
        supervised = [bool(p < length and mask[row, p]) for p in slots]
        agrees = [bool(p < length and labels[p] == ids[p]) for p in slots]
        counts = plain_counts(supervised, agrees, goal.prefix)
        source = ids if goal.loss == "ce-tokens" else labels
        for j in range(1, BLOCK):
            if counts[j - 1]:
                logits = model.head.logits(out[j])
                weight = float(goal.decay_J[j - 1])
                numerator = numerator - weight * torch.log_softmax(logits, -1)[source[slots[j]]]
                denominator = denominator + weight
    return numerator, denominator


@pytest.mark.parametrize("loss", ["ce", "ce-tokens"])
@pytest.mark.parametrize("prefix", ["agree", "any"])
@pytest.mark.parametrize("anchors", [6, 1000])
def test_loss_and_gradients_equal_the_reference_block_by_block(loss: str, prefix: str, anchors: int) -> None:
    model, batch, goal = make_model(), make_batch(), objective(loss=loss, prefix=prefix)
    sums, live = micro_loss(model, batch, goal, anchors, 9, STEP)
    assert 0 < live <= anchors
    sums.numerator.backward()
    ours = [p.grad.clone() for p in model.drafter.parameters()]
    model.drafter.zero_grad()
    numerator, denominator = reference(model, batch, goal, anchors)
    numerator.backward()
    assert torch.allclose(sums.numerator, numerator, rtol=1e-8)
    assert torch.allclose(sums.denominator, denominator, rtol=1e-8)
    for mine, theirs in zip(ours, model.drafter.parameters(), strict=True):
        assert torch.allclose(mine, theirs.grad, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_stale_data_behind_a_row_changes_nothing(poison: float) -> None:
    results = []
    for value in (0.5, poison):
        model = make_model()
        sums, _ = micro_loss(model, make_batch(value), objective(), 20, 9, STEP)
        sums.numerator.backward()
        results.append([sums.numerator, *(p.grad for p in model.drafter.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_context_at_and_after_every_anchor_changes_nothing() -> None:
    """One anchor: noise from its position on leaves loss and gradients alone; noise before it does not."""
    batch = make_batch()
    mask = torch.zeros_like(batch.loss_mask)
    mask[0, 12:] = 1
    batch = replace(batch, loss_mask=mask)
    model = make_model()
    flat, _ = chosen(mask > 0, batch, 1)
    anchor = int(flat[0])
    clean, _ = micro_loss(model, batch, objective(), 1, 9, STEP)
    for first, same in ((anchor, True), (anchor - 1, False)):
        noisy = batch.hidden.clone()
        noisy[0, first:] = torch.randn_like(noisy[0, first:].float()).bfloat16() * 100
        sums, _ = micro_loss(model, replace(batch, hidden=noisy), objective(), 1, 9, STEP)
        assert torch.equal(sums.numerator, clean.numerator) == same


def test_a_cropped_batch_gives_the_same_loss() -> None:
    batch = replace(make_batch(), lengths=torch.tensor([17, 12, 0], dtype=torch.int32))
    model = make_model()
    whole, _ = micro_loss(model, batch, objective(), 6, 9, STEP)
    cropped, _ = micro_loss(model, batch.cropped(17), objective(), 6, 9, STEP)
    assert torch.allclose(whole.numerator, cropped.numerator, rtol=1e-12)
    assert torch.equal(whole.scored, cropped.scored)


def test_no_valid_position_contributes_nothing() -> None:
    model, batch = make_model(torch.float32), make_batch()
    flat = flatten(model.drafter, torch.float32, torch.device("cpu"))
    sums = Sums(BLOCK - 1, torch.device("cpu"))
    for mask in (torch.zeros_like(batch.loss_mask), torch.eye(ROWS, CEILING).to(torch.uint8)):
        micro_step(model, replace(batch, loss_mask=mask), objective(), 8, 9, STEP, sums, flat)
    assert not sums.vector.any()
    assert not flat.grad.any()


def test_kl_reads_the_teacher_of_the_right_position() -> None:
    """A top-k teacher that puts all mass on the label is cross entropy on the labels; so is a last state that does."""
    model, batch = make_model(), make_batch()
    labels = batch.labels.clamp(0, VOCABULARY - 1)
    ids = torch.stack((labels, (labels + 1) % VOCABULARY), -1)
    logp = torch.tensor([0.0, -1e4]).half().expand(ROWS, CEILING, 2).contiguous()
    soft = replace(batch, topk_ids=ids, topk_logp=logp)
    hard, _ = micro_loss(model, batch, objective(), 20, 9, STEP)
    topk, _ = micro_loss(model, soft, objective(loss="kl"), 20, 9, STEP)
    assert torch.allclose(hard.numerator, topk.numerator, rtol=1e-6)

    model = replace(model, head=Head(model.head.weight_VH))
    last = torch.full((ROWS, CEILING, HIDDEN), float("nan"), dtype=torch.float64)
    last[:, :-1] = model.head.weight_VH[labels[:, 1:].long()] * 100  # the state at p-1 predicts p
    hard, _ = micro_loss(model, batch, objective(), 20, 9, STEP)
    kl, _ = micro_loss(model, replace(batch, last=last), objective(loss="kl"), 20, 9, STEP)
    assert torch.allclose(hard.numerator, kl.numerator, rtol=1e-6)


def test_int8_states_are_scaled_back() -> None:
    model, batch = make_model(), make_batch()
    rms, scale = torch.rand(2 * HIDDEN) + 0.5, torch.rand(ROWS, CEILING, 2) * 0.02
    quantised = torch.randint(-127, 128, batch.hidden.shape, dtype=torch.int8)
    wide = quantised.float() * scale.repeat_interleave(HIDDEN, -1) * rms
    int8 = replace(batch, hidden=quantised, scale=scale)
    ours, _ = micro_loss(replace(model, tap_rms=rms), int8, objective(), 20, 9, STEP)
    plain, _ = micro_loss(model, replace(batch, hidden=wide), objective(), 20, 9, STEP)
    assert torch.allclose(ours.numerator, plain.numerator, rtol=1e-6)


def test_sums_accumulate_over_micro_steps() -> None:
    model, batch = make_model(torch.float32), make_batch()
    goal = objective(decay_J=decay_weights(BLOCK, 2.0, "cpu"))
    flat = flatten(model.drafter, torch.float32, torch.device("cpu"))
    once, twice = Sums(BLOCK - 1, torch.device("cpu")), Sums(BLOCK - 1, torch.device("cpu"))
    micro_step(model, batch, goal, 8, 9, STEP, once, flat)
    first = flat.grad.clone()
    flat.grad.zero_()
    for _ in range(2):
        micro_step(model, batch, goal, 8, 9, STEP, twice, flat)
    assert first.any()
    assert torch.allclose(twice.vector, 2 * once.vector)
    assert torch.allclose(flat.grad, 2 * first, rtol=1e-5, atol=1e-6)
