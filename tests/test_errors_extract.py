"""Errors of extraction that the modules' own tests do not raise, each from what really causes it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raised import complaint
from safetensors.torch import load_file, save_file

from dflash.data.config import DataConfig
from dflash.data.prepare import prepare
from dflash.errors import DflashError
from dflash.extract import states
from dflash.extract.config import ExtractConfig
from dflash.extract.run import extract
from dflash.extract.workers import choose_device
from dflash.target import TargetSpec, load_target

Trigger = Callable[[Path, Path, pytest.MonkeyPatch], Any]


def extracted(target: Path, folder: Path, store: str = "store", **settings: Any) -> Any:
    (folder / "d.jsonl").write_text('{"input_ids": [3, 4, 5, 6], "loss_mask": [0, 1, 1, 1]}\n')
    data = DataConfig(data=(str(folder / "d.jsonl"),), buckets=(8,), holdout=0.0)
    chosen = {"device": "cpu", "threads": 1, "num_taps": 2, **settings}
    return extract(ExtractConfig(target=str(target), store=str(folder / store), **chosen), data, prepare)


def no_finite_state(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    broken = shutil.copytree(target, folder / "target")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][:] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    return extracted(broken, folder, storage="int8")


def full_memory(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    patch.setattr(states.Extractor, "run", full)
    return extracted(target, folder)


def few_words(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    try:
        return extracted(target, folder, labels="topk:321")
    finally:
        assert not (folder / "store").exists(), "refused before anything is written"


def layer_of_another_shape(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """A layer that puts out [R·C, H], as some mixtures of experts have inside."""
    model, spec = load_target(target), TargetSpec.read(target)
    layers = model.get_submodule("model.layers")
    layers[1].register_forward_hook(lambda module, given, hidden: hidden.reshape(-1, hidden.shape[-1]))
    layout = states.Layout(taps=(1, 2), hidden_size=spec.hidden_size, labels="tokens", storage="bf16")
    extractor, stage = states.Extractor(model, spec, layout, 16), states.Stage(layout, 2, 16, "cpu")
    states.fill_inputs(stage, [torch.arange(3, 8).numpy()] * 2, 8)
    extractor.run(stage)


def last_of_equals(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """A torch build whose argmax takes the largest id."""
    first = torch.Tensor.argmax
    patch.setattr(torch.Tensor, "argmax", lambda self, dim: self.shape[dim] - 1 - first(self.flip(dim), dim))
    return extracted(target, folder)


def closed_folder(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    make = Path.mkdir

    def refuse(path: Path, *arguments: Any, **settings: Any) -> None:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        make(path, *arguments, **settings)

    patch.setattr(Path, "mkdir", refuse)
    return extracted(target, folder, "closed/store")


def one_gpu(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda", 0) == torch.device("cuda", 0)
    return extracted(target, folder, device="cuda:1")


def another_device(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    return extracted(target, folder, device="meta")


def unknown_device(target: Path, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    return extracted(target, folder, device="gpu:0")


CASES: list[tuple[str, Trigger]] = [
    ("No document of store", no_finite_state),
    ("ran out of memory on cpu at this store's tokens a forward", full_memory),
    ("--labels topk:321 asks for more than the vocabulary of 320: use a smaller K.", few_words),
    ("puts out (16, 64) instead of (2, 8, 64): use another target.", layer_of_another_shape),
    (" on cpu does not take the smallest id among equals: use another torch build.", last_of_equals),
    ("closed cannot be written (Permission denied): give another --store.", closed_folder),
    ("--device cuda:1 is not there (GPUs that torch sees here: 1); choose cpu or one of them.", one_gpu),
    ("--device meta is not there", another_device),
    ("--device gpu:0 is unknown: choose cpu, cuda or cuda:N.", unknown_device),
]


@pytest.mark.parametrize(("words", "trigger"), CASES, ids=[trigger.__name__ for _, trigger in CASES])
def test_an_error_is_one_sentence_that_says_what_to_do(
    words: str, trigger: Trigger, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DflashError) as caught:
        trigger(tiny_target, tmp_path, monkeypatch)
    assert words in str(caught.value)
    assert complaint(str(caught.value)) is None
