"""Flat parameters and AdamW: one fp32 master vector, one fp32 gradient vector, one vector of compute weights.

The module's parameters and gradients are views of the flat vectors, so their addresses never change, gradients
accumulate in place over micro-steps, and the update is a handful of kernels whatever the depth. Gradients are
accumulated as SUMS of weighted losses; the division by the summed weights, the clipping and the check for non-finite
values are folded into AdamW's own `grad_scale` and `found_inf`, so nothing is read back to the host.

With fp32 arithmetic masters and compute weights are the same memory.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dflash.drafter import Drafter


@dataclass
class Flat:
    """Three vectors of P numbers and where each named parameter lies in them. Matrices first, then vectors."""

    master: Tensor  # fp32
    grad: Tensor  # fp32
    weights: Tensor  # compute dtype
    spans: dict[str, tuple[int, int, torch.Size]]
    matrices: int  # numbers that belong to matrices
    parameters: list[nn.Parameter] = field(default_factory=list)  # the module's, views of `weights`
    grads: list[Tensor] = field(default_factory=list)  # in the same order, views of `grad`

    def accumulate(self, loss: Tensor) -> None:
        """Add the gradient of `loss` in place, in fp32 whatever the weights' dtype.

        Not by `backward()`: torch.compile refuses parameters whose `.grad` has another dtype (torch 2.11), and
        gradients that autograd accumulates itself belong to the stream on which it first did.
        """
        for view, gradient in zip(self.grads, torch.autograd.grad(loss, self.parameters), strict=True):
            view.add_(gradient)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[start:end].view(shape) for name, (start, end, shape) in self.spans.items()}

    def refresh(self) -> None:
        """Make the compute weights from the masters."""
        if self.weights is not self.master:
            self.weights.copy_(self.master)


def flatten(drafter: Drafter, dtype: torch.dtype, device: torch.device) -> Flat:
    """Move a drafter's parameters into flat vectors on `device`; its parameters become views in `dtype`."""
    named = sorted(drafter.named_parameters(), key=lambda item: item[1].ndim == 1)
    spans: dict[str, tuple[int, int, torch.Size]] = {}
    end = matrices = 0
    for name, parameter in named:
        start, end = end, end + parameter.numel()
        spans[name] = (start, end, parameter.shape)
        matrices = end if parameter.ndim > 1 else matrices
    master = torch.empty(end, dtype=torch.float32, device=device)
    weights = master if dtype == torch.float32 else torch.empty(end, dtype=dtype, device=device)
    flat = Flat(master, torch.zeros(end, dtype=torch.float32, device=device), weights, spans, matrices)
    grads, values = flat.views(flat.grad), flat.views(flat.weights)
    for name, view in flat.views(master).items():
        view.copy_(drafter.get_parameter(name).detach())
    for name, _ in named:
        parent, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(values[name])
        flat.parameters.append(parameter)
        flat.grads.append(grads[name])
        setattr(drafter.get_submodule(parent), leaf, parameter)
    flat.refresh()
    return flat


class Optimiser:
    """AdamW over the masters; weight decay on matrices only."""

    def __init__(self, flat: Flat, *, weight_decay: float, clip: float) -> None:
        self.flat = flat
        self.clip = clip
        device = flat.master.device
        parts = (slice(0, flat.matrices), slice(flat.matrices, None))
        self.parameters = [nn.Parameter(flat.master[part]) for part in parts]
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = flat.grad[part]
        groups = [
            {"params": [self.parameters[0]], "weight_decay": weight_decay},
            {"params": [self.parameters[1]], "weight_decay": 0.0},
        ]
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        # foreign attributes of the fused kernel: they divide the gradient and skip the update, without the host
        self.adamw = torch.optim.AdamW(
            groups, lr=self.lr, betas=(0.9, 0.999), fused=True, capturable=device.type == "cuda"
        )
        self.moments = {name: torch.zeros_like(flat.master) for name in ("exp_avg", "exp_avg_sq")}
        self.counts = [torch.zeros((), dtype=torch.float32, device=device) for _ in parts]
        for parameter, part, count in zip(self.parameters, parts, self.counts, strict=True):
            state = {name: moment[part] for name, moment in self.moments.items()}
            self.adamw.state[parameter] = {"step": count, **state}

    def update(self, denominator: Tensor) -> tuple[Tensor, Tensor]:
        """One update from accumulated sums, then zero gradients.

        Args:
            denominator: fp32 scalar, the weights' sum over all micro-steps and ranks.

        Returns:
            The gradient's norm before clipping, and 1.0 where the update was skipped (no weight at all, or not finite).
        """
        norm = torch.linalg.vector_norm(self.flat.grad) / denominator
        skipped = (~torch.isfinite(norm) | (denominator <= 0)).float()
        self.adamw.grad_scale = denominator * torch.clamp(norm / self.clip, min=1.0)  # type: ignore[attr-defined]
        self.adamw.found_inf = skipped  # type: ignore[attr-defined]
        self.adamw.step()
        self.flat.grad.zero_()
        self.flat.refresh()
        return norm, skipped


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Rises linearly over the first `warmup` share, then a cosine to zero; the first step is not wasted on zero."""
    import math

    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
