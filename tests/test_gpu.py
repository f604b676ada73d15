"""On a CUDA GPU: kernels against torch, captured steps against eager ones, flat memory, the loop as a whole."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.drafter import FULL, SLIDING, Drafter, DrafterConfig, RopeTable, initialise
from dflash.graphs import Graphs
from dflash.loss import Head, block_loss, decay_weights
from dflash.train.memory import PLAIN, Economy
from dflash.train.narrow import HOPPER, to_fp8
from dflash.train.optimiser import Optimiser, flatten
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout
from dflash.train.runner import Captured, Parts
from dflash.train.step import Batch, Model, Objective, Sums, micro_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

HIDDEN, VOCABULARY, BLOCK, TAPS = 128, 1008, 8, 2  # products in e4m3 take multiples of 16
BUCKETS = [BucketRows("b0300", 300, 9, 3, 50), BucketRows("b0100", 100, 9, 5, 70), BucketRows("b0513", 513, 9, 1, 9)]


def make_parts(
    dtype: torch.dtype = torch.bfloat16, heads: tuple[int, int] = (4, 2), window: int | None = None, **optimiser: Any
) -> Parts:
    device = torch.device("cuda")
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=256, num_layers=2, num_heads=heads[0], num_kv_heads=heads[1], head_dim=64,
        rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=2048, vocab_size=VOCABULARY,
        block_size=BLOCK, taps=(1, 2), num_target_layers=6, mask_token_id=7, sliding_window=window,
        layer_types=(SLIDING, FULL),
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
    return Parts(model, objective, Optimiser(flat, weight_decay=0.0, clip=1.0, **optimiser), 3, device)


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


#: capture, one graph for all, what is given up to save memory
WAYS = {
    "bucket": (True, False, PLAIN),
    "off": (False, False, PLAIN),
    "budget": (True, True, PLAIN),
    "replays": (True, False, Economy(anchors=32)),
    "checkpointing": (True, False, Economy(layerwise=True)),
    "all of it": (True, True, Economy(anchors=32, layerwise=True, chunk=VOCABULARY * 200)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("heads", "window"), [((4, 2), None), ((3, 3), None), ((4, 2), 40)])
def test_captured_buckets_equal_the_eager_step_in_mixed_order(
    way: str, heads: tuple[int, int], window: int | None
) -> None:
    """bf16 sums in another order: losses to 2e-3, gradients to 2 % of their norm (fp32 reductions of bf16 products)."""
    capture, budget, economy = WAYS[way]
    layout, parts = make_layout(), make_parts(heads=heads, window=window)
    batches = [make_batch(layout, bucket, seed) for seed, bucket in enumerate(BUCKETS)]
    expected = [
        eager(make_parts(heads=heads, window=window), bucket, batch, 5)
        for bucket, batch in zip(BUCKETS, batches, strict=True)
    ]
    runner = Captured(parts, layout, BUCKETS, capture=capture, budget=budget, economy=economy)
    assert len(runner.graphs.graphs) == (0 if not capture else 2 if budget else len(BUCKETS) + 1)
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


@pytest.mark.parametrize("way", ["bucket", "all of it"])
def test_a_step_in_fp8_is_close_and_its_replays_are_bit_equal(way: str) -> None:
    """The rounding to three bits of every product shows in the gradient as a tenth of its norm."""
    if torch.cuda.get_device_capability() < HOPPER:
        pytest.skip("needs a Hopper GPU")
    capture, budget, economy = WAYS[way]
    layout, parts = make_layout(), make_parts()
    runner = Captured(replace(parts, model=to_fp8(parts.model)), layout, BUCKETS, capture, budget, economy)
    for index in (2, 0, 1):
        batch, results = make_batch(layout, BUCKETS[index], index), []
        for _ in range(2):
            parts.optimiser.flat.grad.zero_()
            runner.sums.vector.zero_()
            runner.micro(Micro(BUCKETS[index], ()), batch, 5)
            results.append((runner.sums.vector.clone(), parts.optimiser.flat.grad.clone()))
        assert all(torch.equal(*each) for each in zip(*results, strict=True))
        sums, gradient = eager(make_parts(), BUCKETS[index], batch, 5)
        assert torch.allclose(results[0][0][:2], sums[:2], rtol=3e-2)
        error = (results[0][1] - gradient).norm() / gradient.norm()
        assert 1e-3 < error < 0.2, (index, error)
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


def test_six_buckets_share_one_pool_and_replay_in_any_order() -> None:
    """Reserved memory is that of the largest alone (within 15 %); no replay allocates."""
    buckets = [BucketRows(f"b{c:04d}", c, 9, 1200 // c, 60) for c in (100, 150, 200, 300, 400, 600)]
    layout, parts = make_layout(), make_parts()
    layout = Layout(layout.tails, layout.dtypes, max(b.rows_per_micro * b.ceiling for b in buckets))
    runner = Captured(parts, layout, buckets, capture=True)
    names = [name for name in runner.graphs.graphs if name != "update"]
    assert sorted(names) == [bucket.name for bucket in buckets]
    reserved = runner.graphs.reserved
    assert reserved["update"] <= 1.15 * reserved[names[0]] + (64 << 20)  # torch reserves in pieces of 20 MiB
    batches = {bucket.name: make_batch(layout, bucket, seed) for seed, bucket in enumerate(buckets)}
    order = torch.randint(len(buckets), (200,), generator=torch.Generator().manual_seed(2)).tolist()
    runner.micro(Micro(buckets[0], ()), batches[buckets[0].name], 0)
    runner.update(1e-4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for step, index in enumerate(order):
        runner.micro(Micro(buckets[index], ()), batches[buckets[index].name], step)
        runner.update(1e-4)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for key in ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_device_alloc"):
        assert before.get(key) == after.get(key), key
    runner.close()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_captured_update_equals_the_same_one_in_python(kind: str) -> None:
    """Also where a step between is skipped; learning rate and average are values on the device."""
    results = []
    for captured in (True, False):
        parts = make_parts(kind=kind, ema=0.9)
        optimiser, flat = parts.optimiser, parts.optimiser.flat
        runner = Captured(parts, make_layout(), BUCKETS[:1], capture=True) if captured else None
        generator = torch.Generator().manual_seed(3)
        for step, (denominator, poison) in enumerate(((3.0, 0.0), (0.0, 0.0), (2.0, float("nan")), (5.0, 0.0))):
            flat.grad.copy_(torch.randn(flat.grad.shape, generator=generator))
            flat.grad[7] += poison
            if runner is not None:
                runner.sums.vector[1] = denominator
                runner.update(0.01 / (step + 1))
            else:
                optimiser.lr.fill_(0.01 / (step + 1))
                optimiser.update(torch.tensor(denominator, device="cuda"))
        results.append([tensor.clone() for tensor in (flat.master, flat.weights, optimiser.ema, *optimiser.counts)])
        assert optimiser.counts[-1] == 2
        if runner is not None:
            runner.close()
    for captured, plain in zip(*results, strict=True):
        assert torch.allclose(captured, plain, rtol=1e-3, atol=1e-5)


def test_a_gather_reads_a_table_in_host_memory_also_captured() -> None:
    from dflash.train.setup import from_host

    device = torch.device("cuda")
    table = torch.randn(500, 64).bfloat16()
    seen = from_host(table, device)
    assert seen.is_cuda
    before = torch.cuda.memory_allocated()
    ids, out = torch.zeros(9, dtype=torch.int64, device=device), torch.zeros(9, 64, device=device)
    graphs = Graphs(device)
    graphs.prepare("gather", lambda: out.copy_(seen[ids] * 2.0), capture=True)
    ids.copy_(torch.tensor([3, 499, 0, 3, 77, 8, 9, 10, 11]))
    graphs.run("gather")
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), table[ids.cpu()].float() * 2)
    assert torch.cuda.memory_allocated() - before < 2**20
    graphs.close()


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deterministic": True, "ema": 0.9},
        {"graph": "budget", "optimizer": "muon"},
        {"sliding_window": 16, "memory": "20GB", "num_layers": 2},
    ],
    ids=["plain", "deterministic", "budget and muon", "sliding"],
)
def test_the_loop_trains_and_resumes_bit_for_bit(tmp_path: Path, changes: dict) -> None:
    from helpers_store import make_store
    from safetensors.torch import load_file

    from dflash.train.config import TrainConfig
    from dflash.train.run import train

    make_store(tmp_path / "store")
    common = {
        "store": str(tmp_path / "store"), "num_layers": 1, "block_size": 8, "steps": 40, "mask_token": "7",
        "token_budget": 384, "eval_every": 20, **changes,
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


def test_a_dry_run_measures_every_bucket(tmp_path: Path) -> None:
    from helpers_store import make_store

    from dflash.train.config import TrainConfig
    from dflash.train.run import train

    make_store(tmp_path / "store")
    result = train(
        TrainConfig(
            store=str(tmp_path / "store"), run=str(tmp_path / "run"), num_layers=1, block_size=8, mask_token="7",
            dry_run=True,
        )
    )  # fmt: skip
    assert len(result["buckets"]) == 2
    assert all(bucket["ms"] > 0 and bucket["peak"] > 0 for bucket in result["buckets"])
    assert not (tmp_path / "run").exists()
