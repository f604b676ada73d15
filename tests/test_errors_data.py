"""Errors of reading and answering prompts that the modules' own tests do not raise, each from what really causes it."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_templates import CHATML, make_tokenizer
from raised import complaint

from dflash.data import generate
from dflash.data.config import DataConfig, RegenerateConfig
from dflash.data.play import Item, play_server
from dflash.data.prepare import prepare
from dflash.data.prompts import Prompt
from dflash.data.regenerate import regenerate
from dflash.data.sources import open_source
from dflash.errors import DflashError
from dflash.signals import Stop

TINY = str(Path(__file__).parent / "assets" / "tiny-chat")
Trigger = Callable[[Path, pytest.MonkeyPatch], Any]


def answered(folder: Path, record: dict[str, Any], out: str = "out.jsonl", **settings: Any) -> Any:
    (folder / "p.jsonl").write_text(json.dumps(record) + "\n")
    return regenerate(RegenerateConfig(data=(str(folder / "p.jsonl"),), out=str(folder / out), **settings))


def no_folder(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    return answered(folder, {"prompt": "p"}, out="none/out.jsonl", server="http://127.0.0.1:9", model="m")


def ids_for_a_server(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    return answered(folder, {"input_ids": [3, 4]}, server="http://127.0.0.1:9", model="m")


def strict_template(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    (folder / "t.jinja").write_text("{{ raise_exception('Roles must alternate. Mend them') }}")
    return answered(folder, {"prompt": "p"}, target=TINY, chat_template=str(folder / "t.jinja"))


def full_memory(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    patch.setattr(generate.Generator, "answer", full)
    return answered(folder, {"prompt": "p"}, target=TINY, batch_size=8)


def no_datasets(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    patch.setitem(sys.modules, "datasets", None)
    return open_source("someone/chats")


def unknown_dataset(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    def load_dataset(name: str, **settings: Any) -> Any:
        raise RuntimeError(f"Dataset {name} is not there.\nSee the docs.")

    patch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return list(open_source("someone/chats").lines())


def no_file_to_read(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    patch.chdir(folder)  # a socket's path may have 107 bytes
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("chats.jsonl")
    return list(open_source(os.path.join(".", "chats.jsonl")).lines())


def small_embedding(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    (folder / "d.jsonl").write_text('{"prompt": "p", "response": "rrr"}\n')
    config = DataConfig(data=(str(folder / "d.jsonl"),), buckets=(64,), holdout=0.0)
    return prepare(config, make_tokenizer(CHATML), folder / "out", (), vocab_size=50)


def stopped(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """A stop that comes between the turns of a conversation with a server."""
    stop = Stop()
    stop.signum = signal.SIGINT
    config = RegenerateConfig(data=("p",), out=str(folder / "o.jsonl"), server="http://127.0.0.1:9", model="m")
    item = Item(Prompt(id=0, file="p", line=1, turns=(({"role": "user", "content": "p"},),)), 0, {})
    return list(play_server([[item]], config, stop))


CASES: list[tuple[str, Trigger]] = [
    ("none is no folder, so out.jsonl cannot be written there; make it first.", no_folder),
    ("p.jsonl, line 1: a server's chat takes no token ids; answer them with --target.", ids_for_a_server),
    ("p.jsonl, line 1: the chat template cannot render it (Roles must alternate); correct the line.", strict_template),
    ("Out of memory with 8 prompts of up to 20 tokens at once; give a smaller --batch-size.", full_memory),
    ("someone/chats does not exist; if it names a Hugging Face dataset, install", no_datasets),
    ("`datasets` cannot load it either (Dataset someone/chats is not there); give a JSONL file.", unknown_dataset),
    ("chats.jsonl cannot be read (No such device or address); give a file that can be.", no_file_to_read),
    ("d.jsonl, line 1: it holds the token id 2", small_embedding),
    ("Stopped by SIGINT: the answers that were finished are in", stopped),
]


@pytest.mark.parametrize(("words", "trigger"), CASES, ids=[trigger.__name__ for _, trigger in CASES])
def test_an_error_is_one_sentence_that_says_what_to_do(
    words: str, trigger: Trigger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DflashError) as caught:
        trigger(tmp_path, monkeypatch)
    assert words in str(caught.value)
    assert complaint(str(caught.value)) is None
