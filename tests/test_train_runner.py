"""The static step that a GPU captures: the same numbers as the eager one, and nothing in it that cannot be captured."""

from dataclasses import fields

import pytest
import torch
from test_train_step import BLOCK, CEILING, ROWS, STEP, make_batch, make_model, objective

from dflash.flex import TILE, anchors_per_tile, round_up
from dflash.loss import decay_weights
from dflash.train.runner import Captured, Parts
from dflash.train.step import Blocks, loss_of, micro_loss

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
CONTEXT = round_up(ROWS * CEILING, TILE)


def static_parts(anchors: int) -> tuple[Captured, int]:
    """The functions that are captured, without a GPU; and the padded number of anchors."""
    captured = Captured.__new__(Captured)
    goal = objective(decay_J=decay_weights(BLOCK, 2.0, "cpu"))
    captured.parts = Parts(make_model(torch.float32), goal, None, 9, torch.device("cpu"))
    captured.block, captured.step = BLOCK, STEP
    return captured, round_up(anchors, anchors_per_tile(BLOCK))


@pytest.mark.parametrize("anchors", [6, 60])
@pytest.mark.parametrize("poison", [0.5, float("nan")])
def test_padded_anchors_and_context_give_the_eager_steps_sums(anchors: int, poison: float) -> None:
    static, padded = static_parts(anchors)
    parts, batch = static.parts, make_batch(poison)
    blocks = static._lay(batch, anchors, padded)
    assert len(blocks.flat_A) == padded > blocks.live_A.sum()
    with torch.no_grad():
        hidden = static._forward(batch, blocks, CONTEXT)
    ours = loss_of(parts.model, batch, blocks, parts.objective, hidden)
    eager, live = micro_loss(parts.model, batch, parts.objective, anchors, 9, STEP)
    assert live == blocks.live_A.sum()
    for field in fields(eager):
        assert torch.allclose(getattr(ours, field.name), getattr(eager, field.name), rtol=1e-5), field.name


def test_it_compiles_into_one_graph_without_reading_back() -> None:
    static, padded = static_parts(10)
    batch = make_batch()
    lay = torch.compile(static._lay, fullgraph=True, dynamic=False, backend="aot_eager")
    forward = torch.compile(static._forward, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        plain, compiled = static._lay(batch, 10, padded), lay(batch, 10, padded)
        for field in fields(Blocks):
            assert torch.equal(getattr(plain, field.name), getattr(compiled, field.name)), field.name
        hidden = forward(batch, compiled, CONTEXT)
        assert torch.equal(hidden, static._forward(batch, plain, CONTEXT))
        torch._dynamo.config.error_on_recompile = True
        try:
            static.step.add_(1)  # other anchors, the same graph
            forward(batch, lay(batch, 10, padded), CONTEXT)
        finally:
            torch._dynamo.config.error_on_recompile = False
            static.step.sub_(1)
