"""The static step that a GPU captures: the same numbers as the eager one, however it is cut, and nothing in it that
cannot be captured. Here its functions run uncaptured, under attention by torch's dense kernel, which has a backward."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_drafter import small_config
from test_train_step import BLOCK, CEILING, HIDDEN, ROWS, STEP, VOCABULARY, make_batch, make_model, objective
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_mask

from dflash import block_attention, flex
from dflash.drafter import FULL, SLIDING, Drafter, RopeTable, initialise
from dflash.flex import TILE, anchors_per_tile, round_up
from dflash.loss import decay_weights
from dflash.train import layerwise, runner, static
from dflash.train.layerwise import Layerwise
from dflash.train.memory import PLAIN, Economy
from dflash.train.optimiser import Optimiser, flatten
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout
from dflash.train.runner import Captured, Eager, Parts
from dflash.train.static import Geometry, StaticStep
from dflash.train.step import Batch, Blocks, loss_of, micro_loss, scored_states

CONTEXT = round_up(ROWS * CEILING, TILE)
CPU = torch.device("cpu")
BUCKETS = [BucketRows("b0040", 40, 9, 3, 70), BucketRows("b0017", 17, 9, 6, 9), BucketRows("b0090", 90, 9, 1, 150)]


def same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def make_parts(sliding: bool = False, **changes: object) -> Parts:
    """Fresh parts; equal ones at every call."""
    model = make_model(torch.float32)
    config = small_config(
        block_size=BLOCK, **({"layer_types": (SLIDING, FULL), "sliding_window": 11} if sliding else {})
    )
    drafter = Drafter(config)
    initialise(drafter, seed=2)
    flat = flatten(drafter, torch.float32, CPU)
    model = replace(model, drafter=drafter, rope=RopeTable(config, 100, torch.float32, CPU))
    goal = objective(decay_J=decay_weights(BLOCK, 2.0, CPU), **changes)
    return Parts(model, goal, Optimiser(flat, weight_decay=0.0, clip=1.0), 9, CPU)


class PlainGraphs:
    """Stands for dflash.graphs.Graphs where there is no GPU: work is run, not captured."""

    def __init__(self, device: torch.device) -> None:
        self.work: dict[str, Callable[[], None]] = {}

    def warm_up(self, name: str, work: Callable[[], None]) -> None:
        work()

    def keep(self, name: str, work: Callable[[], None], capture: bool) -> None:
        self.work[name] = work

    def run(self, name: str) -> None:
        self.work[name]()


class OnCpu(Captured):
    def _run(self, name: str) -> None:
        self.graphs.run(name)


@pytest.fixture(params=[flex, block_attention], ids=lambda module: module.__name__)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Flex attention, or the kernels of block attention in Triton's interpreter."""
    for module in (static, layerwise):
        monkeypatch.setattr(module, "attend_ranges", request.param.attend_ranges)
    return request.param


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def dense_flex(mask: Any, sliding: Any = None) -> Callable[..., torch.Tensor]:
        def attend(q, k, v, block_k, block_v, window=None):  # noqa: ANN001, ANN202
            keys, values = torch.cat((k, block_k)), torch.cat((v, block_v))
            rule = (mask if window is None else sliding).mask_mod
            seen = create_mask(rule, None, None, len(q), len(keys), device="cpu")[0, 0]
            q, keys, values = (part.transpose(0, 1)[None] for part in (q, keys, values))
            return F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)[0].transpose(0, 1)

        return attend

    monkeypatch.setattr(flex, "attend_flex", dense_flex)
    monkeypatch.setattr(runner, "Graphs", PlainGraphs)
    monkeypatch.setattr(runner, "compiled", same)


def make_layout(largest: int = max(b.rows_per_micro * b.ceiling for b in BUCKETS)) -> Layout:
    tails = {"hidden": (2 * HIDDEN,), "input_ids": (), "labels": (), "loss_mask": ()}
    dtypes = {"hidden": torch.bfloat16, "input_ids": torch.int32, "labels": torch.int32, "loss_mask": torch.uint8}
    return Layout(tails, dtypes, largest)


def bucket_batch(bucket: BucketRows, seed: int) -> Batch:
    """Random rows of random lengths, the last one missing where there are several; NaN behind them."""
    generator = torch.Generator().manual_seed(seed)
    rows, ceiling = bucket.rows_per_micro, bucket.ceiling
    lengths = torch.randint(ceiling // 2, ceiling + 1, (rows,), generator=generator, dtype=torch.int32)
    lengths[-1] = 0 if rows > 1 else ceiling
    hidden = torch.randn(rows, ceiling, 2 * HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(VOCABULARY, (rows, ceiling), generator=generator, dtype=torch.int32)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.8, ids, (ids + 1) % VOCABULARY)
    mask = (torch.rand(ids.shape, generator=generator) < 0.85).to(torch.uint8)
    behind = torch.arange(ceiling) >= lengths[:, None]
    hidden[behind] = float("nan")
    ids[behind], labels[behind], mask[behind] = 2**31 - 1, -(2**31), 255
    return Batch(hidden, ids, labels, mask, lengths, torch.arange(rows) + 100 * seed)


def run_all(made: Captured | Eager, order: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sums and gradient after each of several micro-steps of mixed buckets, then the update's outcome and masters."""
    flat, results = made.parts.optimiser.flat, []
    for step, index in enumerate(order):
        made.micro(Micro(BUCKETS[index], ()), bucket_batch(BUCKETS[index], index), step)
        results.append((made.sums.vector.clone(), flat.grad.clone()))
    outcome = made.update(0.01).clone()
    return [*results, (outcome, flat.master.clone())]


WAYS = {
    "bucket": (False, PLAIN),
    "budget": (True, PLAIN),
    "bucket in replays": (False, Economy(anchors=20)),
    "budget in replays": (True, Economy(anchors=128)),
    "checkpointing": (False, Economy(layerwise=True)),
    "all of it": (True, Economy(anchors=64, layerwise=True, chunk=VOCABULARY * 40)),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_eager_losses_gradients_and_update(way: str, sliding: bool) -> None:
    """fp32 sums in another order: 1e-5. Buckets alternate, so each finds the others' leftovers in its inputs."""
    budget, economy = WAYS[way]
    made = OnCpu(make_parts(sliding), make_layout(), BUCKETS, capture=False, budget=budget, economy=economy)
    assert list(made.graphs.work) == ["budget", "update"] if budget else ["b0040", "b0017", "b0090", "update"]
    order = (0, 1, 2, 1, 0)
    expected = run_all(Eager(make_parts(sliding)), order)
    for (sums, gradient), (eager_sums, eager_gradient) in zip(run_all(made, order), expected, strict=True):
        assert torch.allclose(sums, eager_sums, rtol=1e-5)
        assert (gradient - eager_gradient).norm() <= 1e-5 * eager_gradient.norm()
    assert not made.parts.optimiser.flat.grad.any()


@pytest.mark.usefixtures("on_cpu")
def test_warming_up_learns_nothing() -> None:
    parts = make_parts()
    before = parts.optimiser.flat.master.clone()
    made = OnCpu(parts, make_layout(), BUCKETS, capture=False, budget=True)
    assert torch.equal(before, parts.optimiser.flat.master)
    assert not made.sums.vector.any()
    assert all(count == 0 for count in parts.optimiser.counts)


@pytest.mark.parametrize("anchors", [6, 60])
@pytest.mark.usefixtures("attention")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_padded_anchors_and_context_give_the_eager_steps_sums(anchors: int) -> None:
    """Forward only: on a CPU flex attention has no backward. What lies behind a row is NaN."""
    parts, batch = make_parts(), make_batch(float("nan"))
    step = StaticStep(parts, PLAIN, same)
    step.step.copy_(STEP)
    geometry = Geometry.of(batch, anchors, BLOCK, PLAIN)
    assert geometry.replay == round_up(anchors, anchors_per_tile(BLOCK))
    blocks = step._lay(batch, anchors, geometry.replay, 1)
    assert len(blocks.flat_A) == geometry.replay > blocks.live_A.sum()
    with torch.no_grad():
        hidden = step._forward(batch, blocks, CONTEXT)
    ours = loss_of(parts.model, batch, blocks, parts.objective, hidden)
    eager, live = micro_loss(parts.model, batch, parts.objective, anchors, 9, STEP)
    assert live == blocks.live_A.sum()
    for field in fields(eager):
        assert torch.allclose(getattr(ours, field.name), getattr(eager, field.name), rtol=1e-5), field.name


@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.usefixtures("attention")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_it_compiles_into_one_graph_without_reading_back(budget: bool) -> None:
    parts, batch = make_parts(), make_batch()
    step = StaticStep(parts, PLAIN, same)
    if budget:
        flat = {f.name: getattr(batch, f.name) for f in fields(Batch) if getattr(batch, f.name) is not None}
        flat = {name: part if part.ndim == 1 else part.flatten(0, 1)[None] for name, part in flat.items()}
        batch = Batch(**flat, ceiling=step.ceiling)
        step.ceiling.fill_(CEILING)
        step.most.fill_(10)
    replay = anchors_per_tile(BLOCK)
    lay = torch.compile(step._lay, fullgraph=True, dynamic=False, backend="aot_eager")
    forward = torch.compile(step._forward, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        plain, compiled = step._lay(batch, 10, replay, 1), lay(batch, 10, replay, 1)
        for field in fields(Blocks):
            assert torch.equal(getattr(plain, field.name), getattr(compiled, field.name)), field.name
        hidden = forward(batch, compiled, CONTEXT)
        assert torch.equal(hidden, step._forward(batch, plain, CONTEXT))
        torch._dynamo.config.error_on_recompile = True
        try:
            step.step.add_(1)  # other anchors, other rows: the same graph
            if budget:
                step.ceiling.fill_(CEILING // 2)
                step.most.fill_(7)
            forward(batch, lay(batch, 10, replay, 1), CONTEXT)
        finally:
            torch._dynamo.config.error_on_recompile = False


@pytest.mark.usefixtures("attention")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_checkpointing_compiles_one_function_for_all_layers() -> None:
    parts, batch = make_parts(), make_batch()
    counter = CompileCounter()

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=counter)

    pieces = Layerwise(parts.model, parts.objective, compiled, None)
    blocks = StaticStep(parts, PLAIN, same)._lay(batch, 10, anchors_per_tile(BLOCK), 1)
    drafter, counts = parts.model.drafter, []
    with torch.no_grad():
        inputs = pieces.inputs(parts.model, batch, blocks, CONTEXT)
        context, x = pieces.context(inputs.taps_SF), inputs.x_NH
        for layer in drafter.all_layers():
            x = pieces.layer(layer, x, context, inputs, blocks, BLOCK, None)
            counts.append(counter.frame_count)
        whole = StaticStep(parts, PLAIN, same)._forward(batch, blocks, CONTEXT)
    assert torch.allclose(scored_states(drafter.norm(x), BLOCK), whole, atol=1e-6)
    assert counts == [3, 3]  # inputs, context, layer


def test_a_compiled_step_with_kernels_gives_the_eager_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo, AOTAutograd and its partitioner as on a GPU; what they make of it runs eagerly, kernels interpreted."""
    monkeypatch.setattr(static, "attend_ranges", block_attention.attend_ranges)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")

    parts, batch = make_parts(), make_batch()
    step = StaticStep(parts, PLAIN, compiled)
    step.step.copy_(STEP)
    step.micro(Geometry.of(batch, 10, BLOCK, PLAIN))
    ours = parts.optimiser.flat.grad.clone()
    step.forget()
    eager, _ = micro_loss(parts.model, batch, parts.objective, 10, 9, STEP)
    parts.optimiser.flat.accumulate(eager.numerator)
    assert parts.optimiser.flat.grad.abs().max() > 0.1
    torch.testing.assert_close(ours, parts.optimiser.flat.grad, atol=1e-5, rtol=1e-4)
