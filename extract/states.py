"""What happens on the device: hooks that catch the tapped layers, labels in chunks, and the check that all is finite.

Axes: R rows of a forward, C the bucket's ceiling, K taps, H hidden size, V vocabulary. Everything that grows with R·C
is preallocated for the largest batch of the run and viewed per batch, so nothing is allocated once the run is warm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dflash.errors import DflashError
from dflash.extract.config import top_k
from dflash.target import TargetSpec, decoder_layers, head_logits, head_weight, text_model

LAST = -1  # the "tap" of the normed last hidden state, in lists of bad documents
CHUNK = {"cpu": 512, "cuda": 2048}  # positions whose logits exist at once
TOP_K_CHUNK = 256  # top-k needs them in fp32 besides
INT8_MAX = 127.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The arrays that a batch produces: name -> (torch dtype, values per token)."""

    taps: tuple[int, ...]
    hidden_size: int
    labels: str
    storage: str

    def arrays(self) -> dict[str, tuple[torch.dtype, int]]:
        k, h = len(self.taps), self.hidden_size
        found: dict[str, tuple[torch.dtype, int]] = {
            "hidden": (torch.int8 if self.storage == "int8" else torch.bfloat16, k * h)
        }
        if self.storage == "int8":
            found["scale"] = (torch.float32, k)
        if self.labels == "last-hidden":
            found["last"] = (torch.bfloat16, h)
        if top_k(self.labels):
            found["topk_ids"] = (torch.int32, top_k(self.labels))
            found["topk_logp"] = (torch.float16, top_k(self.labels))
        if self.labels != "tokens":
            found["labels"] = (torch.int32, 1)
        return found

    @property
    def checked(self) -> tuple[int, ...]:
        """The states that must be finite: the taps, and the last one where labels come from it."""
        return self.taps if self.labels == "tokens" else (*self.taps, LAST)


class Stage:
    """Preallocated memory of one batch on one device; pinned when it serves a GPU from the host."""

    def __init__(self, layout: Layout, max_rows: int, max_tokens: int, device: str, pinned: bool = False) -> None:
        def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device, pin_memory=pinned)

        self.layout = layout
        self.flat = {name: empty(max_tokens * width, dtype) for name, (dtype, width) in layout.arrays().items()}
        self.flat_ids = empty(max_tokens, torch.int64)
        self.flat_index = empty(max_tokens, torch.int64)
        self.all_lengths = empty(max_rows, torch.int64)
        self.flat_finite = empty(max_rows * len(layout.checked), torch.bool)
        self.flat_lost = empty(max_rows * len(layout.taps) * 2 * (layout.storage == "int8"), torch.float32)
        self.shape(1, 1, 0)

    def shape(self, rows: int, ceiling: int, predicted: int) -> None:
        """View the memory for a batch [rows, ceiling] with `predicted` labels to make."""
        tokens = rows * ceiling
        self.arrays = {
            name: self.flat[name][: tokens * width].view(
                (rows, ceiling, width) if width > 1 or name == "scale" else (rows, ceiling)
            )
            for name, (_, width) in self.layout.arrays().items()
        }
        self.input_ids = self.flat_ids[:tokens].view(rows, ceiling)
        self.index = self.flat_index[:predicted]
        self.lengths = self.all_lengths[:rows]
        self.finite = self.flat_finite[: rows * len(self.layout.checked)].view(rows, -1)
        if self.layout.storage == "int8":  # [row, tap]: squared error of what is stored, squared state; summed
            self.lost = self.flat_lost[: rows * len(self.layout.taps) * 2].view(rows, -1, 2)

    def results(self) -> dict[str, torch.Tensor]:
        return {**self.arrays, "finite": self.finite} | ({"lost": self.lost} if self.layout.storage == "int8" else {})

    def numpy(self) -> dict[str, np.ndarray]:
        """The arrays as the store names and types them; bfloat16 as uint16."""
        return {
            name: tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
            for name, tensor in self.arrays.items()
        }


def fill_inputs(stage: Stage, documents: Sequence[np.ndarray], ceiling: int) -> None:
    """Write token ids (right-padded with 0), lengths and the index of the states that predict a token of their row."""
    lengths = [len(tokens) for tokens in documents]
    stage.shape(len(documents), ceiling, sum(n - 1 for n in lengths))
    ids, index = stage.input_ids.numpy(), stage.index.numpy()
    ids[:] = 0
    end = 0
    for row, tokens in enumerate(documents):
        ids[row, : len(tokens)] = tokens
        index[end : end + len(tokens) - 1] = np.arange(row * ceiling, row * ceiling + len(tokens) - 1)
        end += len(tokens) - 1
    stage.lengths.numpy()[:] = lengths


class Extractor:
    """The target with hooks on its tapped layers; `run` fills a stage that has its inputs."""

    def __init__(
        self,
        model: nn.Module,
        spec: TargetSpec,
        layout: Layout,
        max_tokens: int,
        channel_rms: torch.Tensor | None = None,
    ) -> None:
        self.layout, self.spec = layout, spec
        self.text_model = text_model(model)
        layers = decoder_layers(model)
        device = next(model.parameters()).device
        self.sums = torch.empty(max_tokens * len(layout.checked), dtype=torch.float32, device=device)
        self.positions = torch.arange(max_tokens, device=device)
        self.stage: Stage | None = None
        self.channel_rms = channel_rms
        if layout.storage == "int8":
            self.scratch = torch.empty(max_tokens * layout.hidden_size, dtype=torch.float32, device=device)
        self.labeller = None if layout.labels == "tokens" else Labeller(head_weight(model), spec, layout.labels)
        self.handles = [layers[tap].register_forward_hook(self._catcher(i)) for i, tap in enumerate(layout.taps)]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    @torch.inference_mode()
    def run(self, stage: Stage) -> None:
        """One forward of the padded batch; no attention mask, since padding lies to the right of what is valid."""
        self.stage = stage
        rows, ceiling = stage.input_ids.shape
        last = self.text_model(input_ids=stage.input_ids, use_cache=False).last_hidden_state
        if self.labeller is not None:
            self.labeller(last, stage)
            torch.sum(last, dim=-1, dtype=torch.float32, out=self._sums(rows, ceiling)[len(self.layout.taps)])
        if "last" in stage.arrays:
            stage.arrays["last"].copy_(last)
        padding = self.positions[:ceiling] >= stage.lengths[:, None]
        finite = torch.isfinite(self._sums(rows, ceiling)) | padding
        stage.finite.copy_(finite.all(-1).T)

    def _sums(self, rows: int, ceiling: int) -> torch.Tensor:
        checked = len(self.layout.checked)
        return self.sums[: checked * rows * ceiling].view(checked, rows, ceiling)

    def _catcher(self, number: int) -> Any:
        def catch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple | list) else output
            stage = self.stage
            assert stage is not None
            rows, ceiling = stage.input_ids.shape
            if hidden.shape != (rows, ceiling, self.layout.hidden_size):
                raise DflashError(
                    f"Decoder layer {self.layout.taps[number]} of {self.spec.name} puts out {tuple(hidden.shape)} "
                    f"instead of {(rows, ceiling, self.layout.hidden_size)}: use another target."
                )
            self._keep(hidden, number, stage)

        return catch

    def _keep(self, hidden: torch.Tensor, number: int, stage: Stage) -> None:
        rows, ceiling, h = hidden.shape
        kept = stage.arrays["hidden"][:, :, number * h : (number + 1) * h]
        sums = self._sums(rows, ceiling)[number]
        if self.layout.storage == "int8":
            assert self.channel_rms is not None
            scratch = self.scratch[: hidden.numel()].view(rows, ceiling, h)
            rms, scale = self.channel_rms[number * h : (number + 1) * h], stage.arrays["scale"][:, :, number]
            quantise(hidden, rms, kept, scale, scratch)
            sums.copy_(scale)
            padding = self.positions[:ceiling] >= stage.lengths[:, None]
            stage.lost[:, number].copy_(lost_to_int8(hidden, rms, kept, scale, scratch, padding))
        else:
            kept.copy_(hidden)
            # A sum is finite only when every value is; false alarms would need values near the type's limit.
            torch.sum(kept, dim=-1, dtype=torch.float32, out=sums)


def quantise(
    hidden: torch.Tensor, rms: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor
) -> None:
    """int8 `values` [R, C, H] and `scale` [R, C] with hidden ≈ values · scale · rms.

    A scale is not finite where a state is not."""
    scratch.copy_(hidden)
    scratch.div_(rms)
    scale.copy_(torch.linalg.vector_norm(scratch, ord=torch.inf, dim=-1))
    scale.div_(INT8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
    scratch.div_(scale[..., None]).round_()
    values.copy_(scratch)


def lost_to_int8(
    hidden: torch.Tensor,
    rms: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    scratch: torch.Tensor,
    padding: torch.Tensor,
) -> torch.Tensor:
    """[R, 2]: over a row's valid tokens the sums of (stored - true)² and of true²; what `inspect-shard` shows."""

    def total() -> torch.Tensor:
        return scratch.square_().sum(-1).masked_fill_(padding, 0).sum(-1)

    scratch.copy_(values)
    scratch.mul_(scale[..., None]).mul_(rms).sub_(hidden)
    error = total()
    scratch.copy_(hidden)
    return torch.stack([error, total()], dim=-1)


class Labeller:
    """Labels of position p from the normed state at p-1, through the frozen head, a chunk of positions at a time."""

    def __init__(self, weight: torch.Tensor, spec: TargetSpec, labels: str) -> None:
        self.weight, self.spec, self.k = weight, spec, top_k(labels)
        device = weight.device
        self.chunk = TOP_K_CHUNK if self.k else CHUNK.get(device.type, 1024)
        vocabulary, hidden = weight.shape
        assert self.k <= vocabulary, "identity.check_labels has refused it"
        self.states = torch.empty(self.chunk, hidden, dtype=weight.dtype, device=device)
        self.logits = torch.empty(self.chunk, vocabulary, dtype=weight.dtype, device=device)
        self.best = torch.empty(self.chunk, dtype=torch.int64, device=device)
        if self.k:
            self.wide = torch.empty(self.chunk, vocabulary, dtype=torch.float32, device=device)
        _check_ties(device, weight.dtype)

    def __call__(self, last: torch.Tensor, stage: Stage) -> None:
        flat = last.reshape(-1, last.shape[-1])
        labels = stage.arrays["labels"].view(-1)
        labels.fill_(-1)
        if self.k:
            stage.arrays["topk_ids"].zero_()
            stage.arrays["topk_logp"].zero_()
        for start in range(0, len(stage.index), self.chunk):
            index = stage.index[start : start + self.chunk]
            n = len(index)
            states = self.states[:n]
            if flat.dtype == states.dtype:
                torch.index_select(flat, 0, index, out=states)
            else:
                states.copy_(flat[index])
            logits = head_logits(states, self.weight, self.spec, out=self.logits[:n])
            torch.argmax(logits, dim=-1, out=self.best[:n])
            labels.index_copy_(0, index + 1, self.best[:n].to(torch.int32))
            if self.k:
                self._top_k(logits, index + 1, stage)

    def _top_k(self, logits: torch.Tensor, places: torch.Tensor, stage: Stage) -> None:
        """Most probable first; among equals the smallest id first. Position 0 of a row has id 0 and 0.0, as padding."""
        wide = self.wide[: len(logits)]
        wide.copy_(logits)
        values, ids = torch.topk(wide, self.k, dim=-1)
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        logp = values - torch.logsumexp(wide, dim=-1, keepdim=True)
        stage.arrays["topk_ids"].view(-1, self.k).index_copy_(0, places, ids.gather(-1, order).to(torch.int32))
        stage.arrays["topk_logp"].view(-1, self.k).index_copy_(0, places, logp.to(torch.float16))


def _check_ties(device: torch.device, dtype: torch.dtype) -> None:
    """argmax documents that the first of equals wins; a device where it does not would make labels differ."""
    tied = torch.zeros(4, 70_001, dtype=dtype, device=device)
    tied[:, 5::7] = 1
    if not (tied.argmax(-1) == 5).all():
        raise DflashError(
            f"argmax of torch {torch.__version__} on {device} does not take the smallest id among equals: use another "
            "torch build."
        )
