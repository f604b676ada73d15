"""Tokenising in several processes gives what one gives; a template without an end, and a killed process, are named."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, make_tokenizer

from dflash.data import tokenise
from dflash.data.config import DataConfig
from dflash.data.prepare import prepare
from dflash.data.render import Renderer
from dflash.data.sources import open_source
from dflash.data.tokenise import Chunk, Job, Tokeniser, chunks_of
from dflash.errors import DflashError
from dflash.store import Prepared

ENDLESS = (
    "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}" + CHATML
)


def run(folder: Path, records: list[Any], tokenizer: Any, **settings: Any) -> Prepared:
    folder.mkdir()
    path = folder / "data.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    config = DataConfig(data=(str(path),), **{"buckets": (64, 128), "holdout": 0.1, **settings})
    return prepare(config, tokenizer, folder / "out", tokenizer.convert_tokens_to_ids(["<|im_end|>"]))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes from the first line on, a few lines a chunk."""
    monkeypatch.setattr(tokenise, "ALONE_CHUNKS", 0)
    monkeypatch.setattr(tokenise, "CHUNK_LINES", 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


def test_the_number_of_processes_changes_nothing(
    tmp_path: Path, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"prompt": f"question {n % 70}", "response": "x" * (n % 70)} for n in range(200)]
    records[50:50] = ["{", "", {"prompt": "unanswered"}, {"prompt": "é" * 3000, "response": "y"}]
    records.append({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "z" * 200}]})
    started = []
    real = tokenise.start_pool
    monkeypatch.setattr(tokenise, "start_pool", lambda *args: started.append(args) or real(*args))
    many = run(tmp_path / "many", records, make_tokenizer(CHATML), skip_bad=True)
    assert len(started) == 1
    monkeypatch.setattr(tokenise, "ALONE_CHUNKS", 1000)
    one = run(tmp_path / "one", records, make_tokenizer(CHATML), skip_bad=True)
    assert len(started) == 1
    assert many.counts == one.counts
    assert many.fingerprints == one.fingerprints
    for name in ("tokens.i32", "mask.u8", "offsets.u64"):
        assert (many.folder / "docs" / name).read_bytes() == (one.folder / "docs" / name).read_bytes()
    for bucket, rows in one.plan.rows.items():
        assert np.array_equal(many.plan.rows[bucket].document, rows.document)
        assert np.array_equal(many.plan.rows[bucket].line, rows.line)
    counts = one.counts
    assert counts["lines"] == 205 == counts["conversations"] + sum(counts["dropped"].values())
    assert set(counts["dropped_tokens"]) == {"answer_beyond_ceiling", "duplicate", "too_few_supervised", "truncated"}


def test_tokens_in_are_tokens_out_and_those_dropped_by_cause(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    records = [{"prompt": "p", "response": "r" * n} for n in (0, 1, 50, 120, 120, 150)]
    counts = run(tmp_path / "d", records, tokenizer, holdout=0.0).counts
    chats = [[{"role": "user", "content": "p"}, {"role": "assistant", "content": r["response"]}] for r in records]
    whole = sum(len(tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"]) for chat in chats)
    assert counts["tokens"] + sum(counts["dropped_tokens"].values()) == whole
    assert Counter(counts["dropped"]) == Counter(duplicate=1, too_few_supervised=1)
    assert counts["truncated"] == 2


@pytest.mark.parametrize("several", [False, True])
def test_a_template_without_an_end_is_named_with_its_line(
    several: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several:
        request.getfixturevalue("processes")
    records = [{"prompt": "fine", "response": f"answer {n}"} for n in range(12)] + [{"prompt": "loop", "response": "x"}]
    monkeypatch.setattr(Renderer, "__init__", _with_half_a_second(Renderer.__init__))
    with pytest.raises(DflashError, match=r"data\.jsonl, line 13: the chat template has not rendered it within 0\.5 s"):
        run(tmp_path / "d", records, make_tokenizer(ENDLESS))
    counts = run(tmp_path / "e", records, make_tokenizer(ENDLESS), skip_bad=True).counts
    assert counts["dropped"] == {"endless_template": 1}
    assert counts["conversations"] == 12
    assert signal.getsignal(signal.SIGALRM) != signal.SIG_IGN


def _with_half_a_second(made: Any) -> Any:
    return lambda self, **settings: made(self, **settings, seconds=0.5)


class Killer:
    """Pickles into a process, and kills it when it is used."""

    chat_template = CHATML
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    all_special_ids: list[int] = []  # noqa: RUF012

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_killed_process_is_one_sentence(processes: None) -> None:
    job = Job(Renderer(tokenizer=Killer()), 64)
    lines = [b'{"prompt": "p", "response": "r"}\n'] * 4
    with Tokeniser(job) as tokeniser, pytest.raises(DflashError, match="was killed"):
        list(tokeniser.outcomes([Chunk(0, 1, lines)]))


class Local(Killer):
    """Cannot be copied."""

    def __reduce__(self) -> Any:
        raise TypeError("holds a socket")


def test_a_tokenizer_that_cannot_be_copied_works_alone(processes: None, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [b'{"input_ids": [1, 2], "loss_mask": [1, 1]}\n'] * 4
    with Tokeniser(Job(Renderer(tokenizer=Local()), 64)) as tokeniser:
        found = list(tokeniser.outcomes([Chunk(0, 1, lines), Chunk(0, 5, lines)]))
    assert [outcome.line for outcome in found] == list(range(1, 9))
    assert "one process, since this tokenizer cannot be copied (holds a socket)" in capsys.readouterr().err


def test_where_no_process_can_be_started_one_does_the_work(
    processes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tokenise, "ProcessPoolExecutor", refuse)
    lines = [b'{"input_ids": [1, 2], "loss_mask": [1, 1]}\n'] * 4
    with Tokeniser(Job(Renderer(tokenizer=None), 64)) as tokeniser:
        assert len(list(tokeniser.outcomes([Chunk(0, 1, lines), Chunk(0, 5, lines)]))) == 8
    assert "cannot be started here" in capsys.readouterr().err


def test_few_chunks_are_under_way_at_once(processes: None, tmp_path: Path) -> None:
    """The lines are read as they are needed: memory does not grow with the data."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"input_ids": [1, 2], "loss_mask": [1, 1]}\n' * 2000)
    source = open_source(str(path))
    with Tokeniser(Job(Renderer(tokenizer=None), 64)) as tokeniser:
        ahead = 0
        for outcome in tokeniser.outcomes(chunks_of(source, 0)):
            ahead = max(ahead, source.count - outcome.line)
    assert source.count == outcome.line == 2000
    assert ahead <= (2 + tokenise.WAITING * 2) * 5


def test_long_lines_make_small_chunks_and_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "CHUNK_BYTES", 100)
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"a" * 300 + b"\nb\nc\n" + b"d" * 99 + b"\ne")
    found = list(chunks_of(open_source(str(path)), 3))
    assert [(chunk.file, chunk.first, len(chunk.lines)) for chunk in found] == [
        (3, 1, 1),
        (3, 2, 2),
        (3, 4, 1),
        (3, 5, 1),
    ]
    assert b"".join(line for chunk in found for line in chunk.lines) == path.read_bytes()


def test_a_line_of_a_megabyte(tmp_path: Path) -> None:
    records = [{"prompt": "p", "response": "ß" * 500_000}, {"prompt": "p", "response": "short"}]
    counts = run(tmp_path / "d", records, make_tokenizer(CHATML), holdout=0.0).counts
    assert (counts["documents"], counts["truncated"]) == (2, 1)
    assert counts["dropped_tokens"]["truncated"] > 900_000
