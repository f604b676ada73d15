"""On a CUDA GPU: kernels against torch, captured steps against eager ones, flat memory, the loop as a whole."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from dflash.drafter import Drafter, DrafterConfig, RopeTable, initialise
from dflash.loss import Head, block_loss, decay_weights
from dflash.train.optimiser import Optimiser, flatten
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout
from dflash.train.runner import Captured, Parts
from dflash.train.step import Batch, Model, Objective, Sums, micro_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

HIDDEN, VOCABULARY, BLOCK, TAPS = 128, 1000, 8, 2
BUCKETS = [BucketRows("b0300", 300, 9, 3, 50), BucketRows("b0100", 100, 9, 5, 70), BucketRows("b0513", 513, 9, 1, 9)]


def make_parts(dtype: torch.dtype = torch.bfloat16, heads: tuple[int, int] = (4, 2)) -> Parts:
    device = torch.device("cuda")
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=256, num_layers=2, num_heads=heads[0], num_kv_heads=heads[1], head_dim=64,
        rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=2048, vocab_size=VOCABULARY,
        block_size=BLOCK, taps=(1, 2), num_target_layers=6, mask_token_id=7,
    )  # fmt: skip
    drafter = Drafter(config)
    initialise(drafter, seed=0)
    flat = flatten(drafter, dtype, device)
    generator = torch.Generator().manual_seed(1)
    embed, head = (torch.randn(VOCABULARY, HIDDEN, generator=generator).to(device, dtype) for _ in range(2))
    model = Model(
        drafter=drafter, rope=RopeTable(config, 600, dtype, device), embed_VH=embed, embed_factor=1.0,
        head=Head(head, 0.3, 9.0),
    )  # fmt: skip
    objective = Objective(loss="ce", decay_J=decay_weights(BLOCK, 4.0, device), prefix="agree")
    return Parts(model, objective, Optimiser(flat, weight_decay=0.0, clip=1.0), 3, device)


def make_layout() -> Layout:
    tails = {"hidden": (TAPS * HIDDEN,), "input_ids": (), "labels": (), "loss_mask": ()}
    dtypes = {"hidden": torch.bfloat16, "input_ids": torch.int32, "labels": torch.int32, "loss_mask": torch.uint8}
    return Layout(tails, dtypes, max(b.rows_per_micro * b.ceiling for b in BUCKETS))


def make_batch(layout: Layout, bucket: BucketRows, seed: int, stale: float = float("nan")) -> Batch:
    """Random rows of random lengths, one of them missing; everything behind them is `stale`."""
    generator = torch.Generator().manual_seed(seed)
    batch = layout.batch(layout.buffers(torch.device("cpu"), pin=False), bucket)
    rows, ceiling = bucket.rows_per_micro, bucket.ceiling
    batch.lengths.copy_(torch.randint(ceiling // 2, ceiling + 1, (rows,), generator=generator))
    batch.lengths[-1] = 0 if rows > 1 else ceiling
    batch.documents.copy_(torch.arange(rows) + 100 * seed)
    batch.hidden.copy_(torch.randn(batch.hidden.shape, generator=generator))
    batch.input_ids.copy_(torch.randint(VOCABULARY, batch.input_ids.shape, generator=generator))
    wrong = torch.rand(batch.labels.shape, generator=generator) < 0.1
    batch.labels.copy_(torch.where(wrong, (batch.input_ids + 1) % VOCABULARY, batch.input_ids))
    batch.loss_mask.copy_(torch.rand(batch.loss_mask.shape, generator=generator) < 0.9)
    behind = torch.arange(ceiling) >= batch.lengths[:, None]
    batch.hidden[behind] = stale
    batch.input_ids[behind], batch.labels[behind], batch.loss_mask[behind] = 2**31 - 1, -(2**31), 255
    parts = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    return Batch(**{name: part if part is None else part.cuda() for name, part in parts.items()})


def eager(parts: Parts, bucket: BucketRows, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and flat gradient by attention row by row."""
    sums = Sums(BLOCK - 1, parts.device)
    parts.optimiser.flat.grad.zero_()
    micro_step(
        parts.model,
        batch,
        parts.objective,
        bucket.anchors,
        parts.seed,
        torch.tensor(step).cuda(),
        sums,
        parts.optimiser.flat,
    )
    return sums.vector.clone(), parts.optimiser.flat.grad.clone()


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, 4.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [True, False])
def test_fused_loss_rows_equal_torch(scale: float, softcap: float | None, dtype: torch.dtype, decay: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors, slots, vocabulary = 33, 7, 5003
    hidden = torch.randn(anchors, slots, 64, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, 64, generator=generator).to(dtype)
    targets = torch.randint(vocabulary, (anchors, slots), generator=generator)
    counts = (torch.rand(anchors, slots, generator=generator) < 0.8).long().cumprod(1).float()
    hidden[counts == 0] = float("inf")
    results = []
    for device in ("cuda", "cpu"):
        leaf = hidden.to(device).float() if device == "cpu" else hidden.to(device)
        leaf = leaf.clone().requires_grad_()
        head = Head(weight.to(device).to(leaf.dtype), scale, softcap)
        fixed = decay_weights(slots + 1, 4.0, device) if decay else None
        clean = torch.where(counts[..., None] > 0, leaf.cpu(), 0).to(leaf) if device == "cpu" else leaf
        sums = block_loss(
            clean, head, targets.to(device), counts.to(device), decay_J=fixed, chunk_logits=vocabulary * 40
        )
        sums.numerator.backward()
        results.append((sums, leaf.grad.float().cpu()))
    (ours, gradient), (plain, expected) = results
    tight = dtype == torch.float32
    assert torch.allclose(ours.numerator.cpu(), plain.numerator, rtol=1e-5 if tight else 2e-3)
    assert torch.allclose(ours.denominator.cpu(), plain.denominator, rtol=1e-5 if decay or tight else 1e-3)
    assert torch.equal(ours.scored.cpu(), plain.scored)
    error = (gradient - expected).norm() / expected.norm()
    assert error < (1e-5 if tight else 1e-2), error


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_captured_buckets_equal_the_eager_step_in_mixed_order(capture: bool, heads: tuple[int, int]) -> None:
    """bf16 sums in another order: losses to 2e-3, gradients to 2 % of their norm (fp32 reductions of bf16 products)."""
    layout, parts = make_layout(), make_parts(heads=heads)
    batches = [make_batch(layout, bucket, seed) for seed, bucket in enumerate(BUCKETS)]
    expected = [
        eager(make_parts(heads=heads), bucket, batch, 5) for bucket, batch in zip(BUCKETS, batches, strict=True)
    ]
    runner = Captured(parts, layout, BUCKETS, capture=capture)
    for index in (2, 0, 1, 1, 0, 2, 0):
        runner.parts.optimiser.flat.grad.zero_()
        runner.sums.vector.zero_()
        runner.micro(Micro(BUCKETS[index], ()), batches[index], 5)
        sums, gradient = expected[index]
        ours = runner.sums.vector
        assert torch.allclose(ours[:2], sums[:2], rtol=2e-3), (index, ours[:3], sums[:3])
        assert torch.equal(ours[2], sums[2])
        assert torch.equal(ours[3 : 3 + BLOCK - 1], sums[3 : 3 + BLOCK - 1])
        error = (runner.parts.optimiser.flat.grad - gradient).norm() / gradient.norm()
        assert error < 0.02, (index, error)
    runner.close()


def test_replays_are_bit_equal_and_stale_data_is_harmless() -> None:
    layout, parts = make_layout(), make_parts()
    runner = Captured(parts, layout, BUCKETS, capture=True)
    results = []
    for stale in (0.0, float("nan"), float("inf"), 0.0):
        for bucket in (BUCKETS[1], BUCKETS[0]):  # another bucket between: leftovers in shared inputs and pool
            parts.optimiser.flat.grad.zero_()
            runner.sums.vector.zero_()
            runner.micro(Micro(bucket, ()), make_batch(layout, bucket, 4, stale), 9)
        results.append((runner.sums.vector.clone(), parts.optimiser.flat.grad.clone()))
    for sums, gradient in results[1:]:
        assert torch.equal(sums, results[0][0])
        assert torch.equal(gradient, results[0][1])
    assert torch.isfinite(results[0][1]).all()
    runner.close()


def test_memory_is_flat_and_nothing_synchronises() -> None:
    layout, parts = make_layout(), make_parts()
    runner = Captured(parts, layout, BUCKETS, capture=True)
    batches = [make_batch(layout, bucket, seed) for seed, bucket in enumerate(BUCKETS)]

    def step(number: int) -> None:
        for index in (number % 3, (number + 1) % 3):
            runner.micro(Micro(BUCKETS[index], ()), batches[index], number)
        runner.update(1e-4)

    step(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(300):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for key in ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries", "num_device_alloc"):
        assert before.get(key) == after.get(key), key
    assert torch.isfinite(runner.outcome).all()
    runner.close()


def test_a_batch_without_rows_is_skipped_and_changes_nothing() -> None:
    layout, parts = make_layout(), make_parts()
    runner = Captured(parts, layout, BUCKETS, capture=True)
    before = parts.optimiser.flat.master.clone()
    batch = make_batch(layout, BUCKETS[0], 1)
    batch.lengths.zero_()
    runner.micro(Micro(BUCKETS[0], ()), batch, 1)
    outcome = runner.update(0.1)
    assert outcome[1] == 1
    assert torch.equal(parts.optimiser.flat.master, before)
    assert all(count == 0 for count in parts.optimiser.counts)
    runner.close()


def test_the_loop_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    from helpers_store import make_store
    from safetensors.torch import load_file

    from dflash.train.config import TrainConfig
    from dflash.train.run import train

    make_store(tmp_path / "store")
    common = {
        "store": str(tmp_path / "store"), "num_layers": 1, "block_size": 8, "steps": 40, "mask_token": "7",
        "token_budget": 384, "eval_every": 20,
    }  # fmt: skip
    train(TrainConfig(run=str(tmp_path / "whole"), **common))
    train(TrainConfig(run=str(tmp_path / "broken"), **common))
    checkpoints = tmp_path / "broken" / "checkpoints"
    (checkpoints / "step-000040").rename(checkpoints / ".step-000040.partial")
    result = train(TrainConfig(run=str(tmp_path / "broken"), **common))
    assert result["steps"] == 40
    for name in ("model", "optimizer"):
        one, two = (
            load_file(tmp_path / r / "checkpoints/step-000040" / f"{name}.safetensors") for r in ("whole", "broken")
        )
        assert all(torch.equal(one[key], two[key]) for key in one)
    lines = [
        [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "tokens_per_second", "data_wait")}
         for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "broken")
    ]  # fmt: skip
    assert lines[0] == lines[1]
