"""Answers from the target in this process, many prompts at a time.

A target of attention layers is decoded by dflash/decode.py, whose rows take the next prompt as soon as they are done
and whose steps are replayed on a GPU. A target with other layers keeps a state that has no place there: transformers'
`generate` answers for it, batch by batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.caches import TappedTarget, stateful_layers
from dflash.data.config import RegenerateConfig
from dflash.decode import decode_plain
from dflash.sampling import Sampling
from dflash.target import TargetSpec, load_target
from dflash.threads import set_threads


@dataclass(frozen=True)
class Answer:
    """Token ids without the stop token, and that token; None where the limit stopped the target."""

    ids: list[int]
    stop_id: int | None


class Generator:
    """The loaded target. Its generation_config's penalties and filters are left out: drafters serve the plain model."""

    def __init__(self, config: RegenerateConfig, folder: Path, stop_ids: Sequence[int], rows: int) -> None:
        set_threads()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config, self.stop_ids, self.rows = config, tuple(stop_ids), rows
        self.model: Any = load_target(folder, config.dtype, device, config.trust_remote_code)
        self.target: TappedTarget | None = None
        if not stateful_layers(self.model):
            spec = TargetSpec.read(folder, trust_remote_code=config.trust_remote_code)
            self.target = TappedTarget(self.model, spec, taps=())

    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Answer]:
        """The answers to these prompts. They do not depend on which prompts were answered before."""
        generator = torch.Generator().manual_seed(seed)
        if self.target is None:
            parts = [prompts[first : first + self.rows] for first in range(0, len(prompts), self.rows)]
            return [answer for part in parts for answer in self._by_transformers(part, generator)]
        sampling = Sampling(temperature=self.config.temperature, generator=generator)
        limits = [self.config.max_new_tokens] * len(prompts)
        responses = decode_plain(self.target, prompts, limits, self.stop_ids, sampling, rows=self.rows)
        return [self._cut(response.output_ids) for response in responses]

    @torch.inference_mode()
    def _by_transformers(self, prompts: Sequence[Sequence[int]], generator: torch.Generator) -> list[Answer]:
        from transformers import GenerationConfig

        chance = {"do_sample": True, "temperature": self.config.temperature, "top_k": 0, "top_p": 1.0}
        self.model.generation_config = GenerationConfig(
            max_new_tokens=self.config.max_new_tokens,
            eos_token_id=list(self.stop_ids) or None,
            pad_token_id=(self.stop_ids or (0,))[0],
            **(chance if self.config.temperature > 0 else {"do_sample": False}),
        )
        width, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        output = self.model.generate(input_ids=ids, attention_mask=mask)
        return [self._cut(row[width:]) for row in output.tolist()]

    def _cut(self, ids: list[int]) -> Answer:
        for position, token in enumerate(ids):
            if token in self.stop_ids:
                return Answer(ids[:position], token)
        return Answer(ids, None)
