"""Answers from the target in this process: batches of prompts, left-padded, through transformers' `generate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.data.config import RegenerateConfig


@dataclass(frozen=True)
class Answer:
    """Token ids without the stop token, and that token; None where the limit stopped the target."""

    ids: list[int]
    stop_id: int | None


class Generator:
    """The loaded target. Its generation_config's penalties and filters are left out: drafters serve the plain model."""

    def __init__(self, config: RegenerateConfig, folder: Path, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        from transformers import GenerationConfig

        from dflash.target import load_target
        from dflash.threads import set_threads

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        set_threads()
        model: Any = load_target(folder, config.dtype, self.device, config.trust_remote_code)
        model.generation_config = GenerationConfig()
        self.model = model
        self.stop_ids = tuple(stop_ids)
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad_id = pad if pad is not None else (self.stop_ids[0] if self.stop_ids else 0)
        chance = {"do_sample": True, "temperature": config.temperature, "top_k": 0, "top_p": 1.0}
        self.settings = GenerationConfig(
            max_new_tokens=config.max_new_tokens,
            eos_token_id=list(self.stop_ids) or None,
            pad_token_id=self.pad_id,
            **(chance if config.temperature > 0 else {"do_sample": False}),
        )

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Answer]:
        """The answers to a batch. What a row gets does not depend on which prompts were answered before."""
        width = max(map(len, prompts))
        input_ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            attention_mask[row, width - len(prompt) :] = 1
        torch.manual_seed(seed)
        output = self.model.generate(
            input_ids=input_ids.to(self.device),
            attention_mask=attention_mask.to(self.device),
            generation_config=self.settings,
        )
        return [self._cut(row[width:]) for row in output.tolist()]

    def _cut(self, ids: list[int]) -> Answer:
        for position, token in enumerate(ids):
            if token in self.stop_ids:
                return Answer(ids[:position], token)
        return Answer(ids, None)
