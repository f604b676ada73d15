"""How the target chooses tokens, and which others were as good: the side of decoding that a drafter must not change.

Axes: R rows, T tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TIE_ULPS = 2  # units in the last place between two logits that rounding may swap
RIVALS = 3  # tokens so close to the best that are remembered


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target chooses tokens: its argmax at temperature 0 (ties: smallest id), else a draw."""

    temperature: float = 0.0
    generator: torch.Generator | None = None

    def uniforms(self, prompts: int, places: int, device: torch.device) -> Tensor:
        """One number for every place of every answer, fp64 [prompts, places]; they alone decide the draws."""
        if self.temperature == 0.0:
            return torch.zeros(prompts, 1, dtype=torch.float64, device=device)
        source = self.generator.device if self.generator is not None else device
        drawn = torch.rand(prompts, places, dtype=torch.float64, device=source, generator=self.generator)
        return drawn.to(device)

    def choose(self, logits_RTV: Tensor, uniforms_RT: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens [R, T] and their rivals [R, T, RIVALS], -1 where there is none; int64."""
        if self.temperature == 0.0:
            return best_and_rivals(logits_RTV)
        probabilities = torch.softmax(logits_RTV.float() / self.temperature, dim=-1)
        below = torch.cumsum(probabilities, dim=-1, dtype=torch.float64)
        where = uniforms_RT[..., None] * below[..., -1:]
        tokens = torch.searchsorted(below, where, right=True)[..., 0].clamp(max=below.shape[-1] - 1)
        return tokens, tokens.new_full((*tokens.shape, RIVALS), -1)


GREEDY = Sampling()


def best_and_rivals(logits_RTV: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax [R, T] (ties: smallest id), and the next tokens within TIE_ULPS of it [R, T, RIVALS], else -1."""
    best = logits_RTV.argmax(dim=-1)
    values, ids = logits_RTV.topk(RIVALS + 1, dim=-1)
    values = values.float()
    ulp = torch.finfo(logits_RTV.dtype).eps * torch.exp2(torch.log2(values.abs().amax(-1, keepdim=True)).floor())
    close = (values[..., :1] - values <= TIE_ULPS * ulp) & (ids != best[..., None])
    # the best is one of the four unless more than four are equal
    return best, torch.where(close, ids, -1).sort(dim=-1, descending=True)[0][..., :RIVALS]
