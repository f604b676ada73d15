"""Every error that the program can raise: one sentence, a place, a remedy; over the whole suite, each is triggered.

The messages are read from the syntax trees (tests/raised.py). What the tests of a session raised is remembered by
conftest.py, which judges every message with its values, and fails a session of every test file that left one unseen.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import raised
from raised import BASES, WATCH, Site, Watch, complaint, is_watching, sites, sites_of, whole

from dflash.data.config import DataConfig
from dflash.errors import DflashError, Interrupted
from dflash.extract.config import ExtractConfig
from dflash.report.read import read_sources
from dflash.store.calib import read_calib
from dflash.store.layout import check_labels
from dflash.store.meta import read_meta
from dflash.target.files import as_dtype, resolve_target
from dflash.target.taps import default_taps
from dflash.train.config import TrainConfig
from dflash.train.folder import Checkpoint, read_checkpoint

SITES = sites()
TRAIN: dict[str, Any] = {"store": "s", "run": "r"}
EXTRACT: dict[str, Any] = {"target": "t", "store": "s"}

# Errors of settings, which are cheap to raise here; those of files and machines are raised by the modules' own tests.
TRIGGERS: list[tuple[str, Callable[[], Any]]] = [
    ("--steps and --epochs both", lambda: TrainConfig(**TRAIN, steps=1, epochs=1.0)),
    ("--num-layers must be at least 1", lambda: TrainConfig(**TRAIN, num_layers=0)),
    ("--lr must be a positive number", lambda: TrainConfig(**TRAIN, lr=0.0)),
    ("--num-taps must be at least 1", lambda: ExtractConfig(**EXTRACT, num_taps=0)),
    ("--labels must be", lambda: ExtractConfig(**EXTRACT, labels="topk:0")),
    ("--storage must be one of", lambda: ExtractConfig(**EXTRACT, storage="zip")),
    ("--threads must be at least 1", lambda: ExtractConfig(**EXTRACT, threads=0)),
    ("--worker '2/2' must be", lambda: ExtractConfig(**EXTRACT, worker="2/2")),
    ("--max-bad 'x' is no share", lambda: ExtractConfig(**EXTRACT, max_bad="x")),
    ("--show must be 0 or more", lambda: DataConfig(data=("a",), show=-1)),
    ("--seed must be from 0", lambda: DataConfig(data=("a",), seed=-1)),
    ("--data names no file", lambda: DataConfig(data=())),
]


def checkpoint(folder: Path, state: str) -> Any:
    (folder / "state.json").write_text(state)
    return read_checkpoint(folder)


def damaged_tensors(folder: Path) -> Any:
    (folder / "model.safetensors").write_bytes(b"x")
    return Checkpoint(folder, {"step": 1}).tensors("model")


def file_as(call: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """`call` with a file where a folder is asked for."""

    def trigger(folder: Path) -> Any:
        (folder / "file").write_text("{}")
        return call(folder / "file")

    return trigger


FILES: list[tuple[str, Callable[[Path], Any]]] = [
    ("is no checkpoint", read_checkpoint),
    ("has format 99", lambda folder: checkpoint(folder, '{"format": 99}')),
    ("is damaged", lambda folder: checkpoint(folder, "{")),
    ("model.safetensors cannot be read", damaged_tensors),
    ("is a file", file_as(lambda file: resolve_target(str(file)))),
    ("--dtype int4 is unknown", lambda folder: as_dtype("int4")),
    ("is not a folder, so it is no store", file_as(read_meta)),
    ("--num-taps 0 is too few", lambda folder: default_taps(6, 0)),
    ("calib.safetensors of the int8 store", lambda folder: read_calib(folder, 4)),
    ("is neither a run", lambda folder: read_sources((str(folder),))),
]


@pytest.mark.parametrize(("words", "trigger"), FILES, ids=[words for words, _ in FILES])
def test_a_file_that_cannot_be_used_is_named(words: str, trigger: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(DflashError) as caught:
        trigger(tmp_path)
    assert words in str(caught.value)
    assert complaint(str(caught.value)) is None


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.file}:{site.first}")
def test_a_message_is_one_sentence_with_place_and_remedy(site: Site) -> None:
    assert complaint(whole(site.template, site.kind)) is None, str(site)


@pytest.mark.parametrize(("words", "trigger"), TRIGGERS, ids=[words for words, _ in TRIGGERS])
def test_a_setting_that_cannot_be_is_named(words: str, trigger: Callable[[], Any]) -> None:
    with pytest.raises(DflashError) as caught:
        trigger()
    assert words in str(caught.value)
    assert complaint(str(caught.value)) is None


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("store.json is damaged; restore it from a copy.", None),
        ("store.json is damaged. Restore it from a copy.", "more than one sentence"),
        ("store.json is damaged.", "names no remedy"),
        ("It is damaged; restore the file.", "names no place"),
        ("store.json is damaged;\nrestore it.", "more than one line"),
        ("store.json is damaged; restore it", "does not end as a sentence"),
        ("--lr must be a number, not 'fast'.", None),
        ("--lr must be a number, not 'fast. Very fast'.", None),
        ("store.json isn't ours. Restore the user's own.", "more than one sentence"),
    ],
)
def test_the_rule_itself_tells_right_from_wrong(message: str, wrong: str | None) -> None:
    assert complaint(message) == wrong


def test_sites_are_found_whatever_the_form_of_their_message(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        'raise DflashError(f"{path} is gone; " "give another.")\n'
        'def f():\n    return DiskFullError("a" + "b")\n'
        'raise ValueError("not ours")\n'
        'raise BadLineError("cause", "it is torn")\n'
        "raise Failure(str(error), 3)\n"
        'raise ShardGivenUp("given up")\n'
    )
    found = sorted(site.template for site in sites_of(file))
    assert found == ["ab", "given up", "it is torn", "{path} is gone; give another."]
    assert len(SITES) > 300
    assert {site.kind for site in SITES} == {base.__name__ for base in BASES}


def test_what_is_raised_is_remembered_with_its_place() -> None:
    with pytest.raises(DflashError):
        TrainConfig(**TRAIN, steps=1, epochs=1.0)
    site = next(site for site in SITES if site.template.startswith("--steps and --epochs both"))
    assert WATCH.of(site)
    assert Interrupted("Stopped; run it again.", 15).exit_code == 143


def test_a_message_that_was_raised_is_judged_with_its_values() -> None:
    here, site = Watch(), SITES[0]
    here.messages[site.file, site.first] = {"--lr must be above 0.", "It is broken."}
    assert here.wrong() == [f"{site.file}:{site.first} names no place: It is broken."]


def test_who_replaces_an_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_watching()
    with monkeypatch.context() as inside:
        inside.delattr(DflashError, "__init__")
        assert not is_watching()
    assert is_watching()


def test_an_error_over_several_lines_out_of_a_thread_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    here, site = Watch(), next(site for site in SITES if site.template.startswith("{where}: labels is"))
    monkeypatch.setattr(raised, "WATCH", here)
    with ThreadPoolExecutor(1) as pool, pytest.raises(DflashError):
        pool.submit(check_labels, "all").result()
    assert site.last > site.first
    assert here.of(site) == {
        "store.json: labels is 'all'; it must be argmax, tokens, last-hidden or topk:K with K from 1 to 1024."
    }


def test_what_another_process_saw_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/conftest.py asks for `unseen` when a session of every file ends."""
    here, there = Watch(), Watch()
    site = SITES[0]
    there.messages[site.file, site.first] = {"seen there"}
    assert site in here.unseen()
    here.merge(there.places())
    assert here.of(site)
    assert site not in here.unseen()
