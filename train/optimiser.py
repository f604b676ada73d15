"""Flat parameters and their optimiser: one fp32 master vector, one fp32 gradient vector, one vector of compute weights.

The module's parameters and gradients are views of the flat vectors, so their addresses never change, gradients
accumulate in place over micro-steps, and the update is a handful of kernels whatever the depth. Gradients are
accumulated as SUMS of weighted losses; the division by the summed weights, the clipping and the check for non-finite
values are folded into AdamW's own `grad_scale` and `found_inf`, so nothing is read back to the host. With Muon
(train/muon.py) AdamW keeps the vectors. An average of the masters (--ema) is a fourth fp32 vector.

With fp32 arithmetic masters and compute weights are the same memory.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from dflash.drafter import Drafter
from dflash.train.muon import Matrix, muon_step


def _add_all(views: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
    torch._foreach_add_(views, [gradient.float() for gradient in gradients])


@cache
def _compiled_add_all() -> Callable[[list[Tensor], tuple[Tensor, ...]], None]:
    return torch.compile(_add_all, fullgraph=True, dynamic=False)


def add_all(views: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
    """Add each gradient to its fp32 view; on a GPU in a few kernels, since one for each of 58 is what a small drafter
    waits for."""
    (_compiled_add_all() if views[0].is_cuda else _add_all)(views, gradients)


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
    place: dict[Tensor, int] = field(default_factory=dict)  # of each parameter in that order

    def accumulate(self, loss: Tensor) -> None:
        """Add the gradient of `loss` in place, in fp32 whatever the weights' dtype.

        Not by `backward()`: torch.compile refuses parameters whose `.grad` has another dtype (torch 2.11), and
        gradients that autograd accumulates itself belong to the stream on which it first did.
        """
        add_all(self.grads, torch.autograd.grad(loss, self.parameters))

    def accumulate_for(
        self, parameters: list[Tensor], out: Tensor, inputs: list[Tensor], d_out: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The same for some parameters, from the gradient of `out`; returns the gradients of `inputs`."""
        gradients = torch.autograd.grad(out, [*inputs, *parameters], d_out)
        add_all([self.grads[self.place[parameter]] for parameter in parameters], gradients[len(inputs) :])
        return gradients[: len(inputs)]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[start:end].view(shape) for name, (start, end, shape) in self.spans.items()}

    def joined(self, *names: str) -> Tensor:
        """Compute weights of matrices that lie behind each other, as one matrix."""
        spans = [self.spans[name] for name in names]
        assert all(end == start for (_, end, _), (start, _, _) in pairwise(spans)), "matrices keep the module's order"
        return self.weights[spans[0][0] : spans[-1][1]].view(-1, spans[0][2][1])

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
        flat.place[parameter] = len(flat.parameters)
        flat.parameters.append(parameter)
        flat.grads.append(grads[name])
        setattr(drafter.get_submodule(parent), leaf, parameter)
    for number, layer in enumerate(drafter.all_layers()):
        layer.self_attn.joined = flat.joined(*(f"layers.{number}.self_attn.{part}_proj.weight" for part in "qkv"))
        layer.mlp.joined = flat.joined(*(f"layers.{number}.mlp.{part}_proj.weight" for part in ("gate", "up")))
    flat.refresh()
    return flat


class Optimiser:
    """AdamW over the masters, or Muon over matrices and AdamW over vectors; weight decay on matrices only."""

    def __init__(
        self, flat: Flat, *, weight_decay: float, clip: float, kind: str = "adamw", ema: float | None = None
    ) -> None:
        self.flat, self.clip, self.weight_decay = flat, clip, weight_decay
        device = flat.master.device
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.ema_decay, self.ema = ema, None if ema is None else flat.master.clone()
        first = flat.matrices if kind == "muon" else 0
        adam = torch.zeros_like(flat.master[first:]), torch.zeros_like(flat.master[first:])
        #: kind -> (where it begins in the flat order, its vector)
        self.moments = {"exp_avg": (first, adam[0]), "exp_avg_sq": (first, adam[1])}
        self.matrices: list[Matrix] = []
        if kind == "muon":
            self.moments["momentum"] = (0, torch.zeros_like(flat.master[:first]))
            momenta = self._views(*self.moments["momentum"])
            masters, grads = flat.views(flat.master), flat.views(flat.grad)
            self.matrices = [Matrix(masters[name], grads[name], momentum) for name, momentum in momenta.items()]
        parts = [part for part in (slice(0, flat.matrices), slice(flat.matrices, None)) if part.start >= first]
        self.counts = [torch.zeros((), dtype=torch.float32, device=device) for _ in parts]
        self.adamw = self._make_adamw(parts, first)

    def _make_adamw(self, parts: list[slice], first: int) -> torch.optim.AdamW:
        """One parameter a part; the moments are views of ours, so that their addresses never change."""
        groups, states = [], []
        for part, count in zip(parts, self.counts, strict=True):
            parameter = nn.Parameter(self.flat.master[part])
            parameter.grad = self.flat.grad[part]
            groups.append({"params": [parameter], "weight_decay": self.weight_decay if part.start == 0 else 0.0})
            inner = slice(part.start - first, None if part.stop is None else part.stop - first)
            states.append({"step": count, **{n: self.moments[n][1][inner] for n in ("exp_avg", "exp_avg_sq")}})
        capturable = self.lr.device.type == "cuda"
        adamw = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.999), fused=True, capturable=capturable)
        for group, state in zip(groups, states, strict=True):
            adamw.state[group["params"][0]] = state  # type: ignore[index]
        return adamw

    def _views(self, first: int, vector: Tensor) -> dict[str, Tensor]:
        """By name, of a vector that begins at `first` of the flat order."""
        return {
            name: vector[start - first : end - first].view(shape)
            for name, (start, end, shape) in self.flat.spans.items()
            if start >= first and end - first <= vector.numel()
        }

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps beside the masters; views, so that loading copies into them."""
        moments = {
            f"{kind}.{name}": view
            for kind, (first, vector) in self.moments.items()
            for name, view in self._views(first, vector).items()
        }
        return moments | {f"step.{index}": count for index, count in enumerate(self.counts)}

    def update(self, denominator: Tensor) -> tuple[Tensor, Tensor]:
        """One update from accumulated sums, then zero gradients.

        Args:
            denominator: fp32 scalar, the weights' sum over all micro-steps and ranks.

        Returns:
            The gradient's norm before clipping, and 1.0 where the update was skipped (no weight at all, or not finite).
        """
        norm = torch.linalg.vector_norm(self.flat.grad) / denominator
        skipped = (~torch.isfinite(norm) | (denominator <= 0)).float()
        divisor = denominator * torch.clamp(norm / self.clip, min=1.0)
        muon_step(self.matrices, self.lr, divisor, skipped, self.weight_decay)
        # foreign attributes of the fused kernel: they divide the gradient and skip the update, without the host
        self.adamw.grad_scale = divisor  # type: ignore[attr-defined]
        self.adamw.found_inf = skipped  # type: ignore[attr-defined]
        self.adamw.step()
        if self.ema is not None and self.ema_decay is not None:
            steps = self.counts[-1]  # a short memory at first, or the random start would stay in the average
            decay = torch.clamp((1 + steps) / (10 + steps), max=self.ema_decay)
            self.ema.lerp_(self.flat.master, (1 - decay) * (1 - skipped))
        self.flat.grad.zero_()
        self.flat.refresh()
        return norm, skipped

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Meanwhile the module computes with the average of the weights, where there is one."""
        if self.ema is None:
            yield
            return
        kept = self.flat.master.clone() if self.flat.weights is self.flat.master else None
        self.flat.weights.copy_(self.ema)
        try:
            yield
        finally:
            if kept is not None:
                self.flat.master.copy_(kept)
            self.flat.refresh()


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Rises linearly over the first `warmup` share, then a cosine to zero; the first step is not wasted on zero."""
    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
