"""Activation checkpointing: forward and backward one layer at a time, for cards that hold little beside the weights.

The forward keeps each layer's input alone. The backward computes a layer again, takes its gradients and adds them to
the flat vector at once, so neither all activations nor all gradients in the compute dtype ever exist together. That
costs a second forward of the layers, about a third more arithmetic there. One compiled function serves every layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash.drafter import Layer
from dflash.flex import attend_ranges
from dflash.loss import LossSums
from dflash.train.optimiser import Flat
from dflash.train.step import Batch, Blocks, Inputs, Model, Objective, inputs_of, loss_of, scored_states


def run_layer(
    layer: Layer,
    x_NH: Tensor,
    context_SH: Tensor,  # behind fc and hidden_norm
    inputs: Inputs,
    blocks: Blocks,
    block: int,
    window: int | None,
) -> Tensor:
    """One layer's output [N, H]; the block mask is made again each time, which is small beside the layer."""
    attend = attend_ranges(blocks.low_A, blocks.high_A, len(context_SH), block, window)
    context_kv = layer.self_attn.keys_values(context_SH, inputs.rope_S)
    return layer(x_NH, inputs.rope_N, context_kv, attend if window is None else partial(attend, window=window))


class Layerwise:
    """The compiled pieces of a model's step."""

    def __init__(self, model: Model, objective: Objective, compiled: Callable[[Any], Any], chunk: int | None) -> None:
        self.model, self.objective, self.chunk = model, objective, chunk
        self.inputs = compiled(inputs_of)
        self.context = compiled(model.drafter.context)
        self.layer = compiled(run_layer)

    def accumulate(self, flat: Flat, batch: Batch, blocks: Blocks, context: int) -> LossSums:
        """Loss sums of a batch, its gradients added to `flat`."""
        drafter, block = self.model.drafter, self.model.drafter.config.block_size
        steps = list(zip(drafter.all_layers(), drafter.config.windows, strict=True))
        with torch.no_grad():
            inputs = self.inputs(self.model, batch, blocks, context)
            context_SH = self.context(inputs.taps_SF)
            kept = [inputs.x_NH]
            for layer, window in steps:
                kept.append(self.layer(layer, kept[-1], context_SH, inputs, blocks, block, window))
        last = kept.pop().detach().requires_grad_()
        hidden_AJH = scored_states(drafter.norm(last), block)
        sums = loss_of(self.model, batch, blocks, self.objective, hidden_AJH, self.chunk)
        (d_x,) = flat.accumulate_for([drafter.norm.weight], sums.numerator, [last])
        del last, hidden_AJH
        d_context = torch.zeros_like(context_SH)
        for layer, window in reversed(steps):
            leaf, shared = kept.pop().detach().requires_grad_(), context_SH.detach().requires_grad_()
            out = self.layer(layer, leaf, shared, inputs, blocks, block, window)
            d_x, d_shared = flat.accumulate_for(list(layer.parameters()), out, [leaf, shared], d_x)
            d_context += d_shared
        out = self.context(inputs.taps_SF)
        flat.accumulate_for([drafter.fc.weight, drafter.hidden_norm.weight], out, [], d_context)
        return sums
