"""One malformed store per error: every error that a store's files can cause is caused, and says which file it is.

Each case makes one thing wrong in a store of its own, and looks at it. Errors are taken from what the session remembers
(tests/raised.py), so that those which `verify` turns into problems count too; the last test compares what was caused
with what the sources can raise.
"""

import ast
import copy
import errno
import functools
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from raised import WATCH
from safetensors.numpy import save_file
from test_store_fuzz import Small, read_all

import dflash.store
from dflash.errors import DflashError
from dflash.store import ShardWriter, Store, acquire_lock, check_same, read_calib, verify
from dflash.store.index import decode_line, encode_line
from dflash.store.meta import read_meta
from dflash.store.recover import rebuild_index
from dflash.store.store import _check_room
from dflash.store.text import decode_row

Site = tuple[str, int]
Malform = Callable[[Small], Any]
SOURCES = Path(dflash.store.__file__).parent
# Errors about who is writing, about arguments and about other commands' outputs: not about a store's files.
ELSEWHERE = {"lock.py", "pack.py", "inspect.py", "forecast.py"}

SHARD = "shards/b0016/s000000.zarr"


def everything(small: Small) -> None:
    for look in (lambda: read_all(Store.open(small.root)), lambda: verify(small.root)):
        try:
            look()
        except DflashError:
            continue


def look(case: Callable[[Small], None]) -> Malform:
    """A case that only makes something wrong; then everything is looked at."""

    @functools.wraps(case)
    def whole(small: Small) -> None:
        case(small)
        everything(small)

    return whole


def meta(path: str, value: Any = None, drop: bool = False) -> Malform:
    """A field of store.json changed, with every checksum and fingerprint right again."""

    def case(small: Small) -> None:
        whole = small.read("store.json")
        *steps, last = [int(step) if step.isdigit() else step for step in path.split("/")]
        inner = whole
        for step in steps:
            inner = inner[step]
        if drop:
            del inner[last]
        else:
            inner[last] = value
        small.stamp_store(whole)

    return look(case)


def manifest(change: Callable[[Any], Any]) -> Malform:
    """The group document of a shard changed, with its own and the index's checksum right again."""

    def case(small: Small) -> None:
        path = small.root / SHARD / "zarr.json"
        group = small.read(path)
        change(group)
        small.stamp_manifest(path, group)

    return look(case)


def content(name: str, change: Callable[[bytes], bytes]) -> Malform:
    def case(small: Small) -> None:
        path = small.root / name
        path.write_bytes(change(path.read_bytes()))

    return look(case)


def docs(name: str, change: Callable[[bytes], bytes]) -> Malform:
    def case(small: Small) -> None:
        path = small.root / name
        path.write_bytes(change(path.read_bytes()))
        small.stamp_files(name)

    return look(case)


def plan(change: Callable[[dict[str, np.ndarray]], Any]) -> Malform:
    """Members of plan.npz changed; store.json knows the result."""

    def case(small: Small) -> None:
        with np.load(small.root / "plan.npz") as archive:
            members = {name: archive[name].copy() for name in archive.files}
        change(members)
        np.savez(small.root / "plan.npz", **members)
        small.stamp_files("plan.npz")

    return look(case)


def line(change: Callable[[dict[str, Any]], Any]) -> Malform:
    """The first index line changed, its checksum right."""

    def case(small: Small) -> None:
        path = small.root / "index/w000.jsonl"
        first, *rest = path.read_bytes().splitlines(keepends=True)
        entry = decode_line(first.strip())
        assert entry is not None
        change(entry)
        path.write_bytes(b"".join([encode_line(entry), *rest]))

    return look(case)


def instead(name: str, make: Callable[[Path], Any]) -> Malform:
    """Something else in the place of a file or folder."""

    def case(small: Small) -> None:
        path = small.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)

    return look(case)


def nothing(path: Path) -> None:
    pass


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda old: old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]


def put(members: dict[str, np.ndarray], name: str, at: int, value: int) -> None:
    members[name][at] = value


def calib(values: Any, name: str = "channel_rms") -> Malform:
    def case(small: Small) -> None:
        save_file({name: np.array(values, np.float32)}, small.root / "calib.safetensors")
        read_calib(small.root, 16)

    return case


def other_shard(small: Small) -> None:
    shutil.copy(small.root / "shards/b0016/s000001.zarr/zarr.json", small.root / SHARD / "zarr.json")


def cut_while_read(small: Small) -> None:
    store = Store.open(small.root, io="direct")
    store.read_row("b0016", 0)
    os.truncate(small.root / SHARD / "hidden/c.0.0.0", 0)
    store.read_row("b0016", 0)


def failing_disk(small: Small) -> None:
    store = Store.open(small.root, io="direct")
    with mock.patch("os.preadv", side_effect=OSError(errno.EIO, "x")):
        store.read_row("b0016", 0)


def retired(small: Small) -> None:
    with (small.root / "index/w000.jsonl").open("ab") as file:
        file.write(encode_line({"retire": ["b0016", 0], "gen": 0}))


def without_check(small: Small) -> None:
    """The plan of store.json's own file fingerprint, but not of its content's."""
    whole = small.read("store.json")
    whole["fingerprints"]["plan"] = "0" * 64
    small.stamp_store(whole)


def huge(small: Small) -> None:
    whole = small.read("store.json")
    whole |= {"hidden_size": 1 << 20, "taps": list(range(1024))}
    whole["buckets"][0]["ceiling"] = 1 << 20
    small.stamp_store(whole)


def gone_writer(small: Small) -> None:
    writer = ShardWriter(Store.open(small.root), "b0016", 0, 0)
    writer.lengths[:] = 0
    writer.abandon()
    writer.commit([], "cpu")


def linked_tmp(small: Small) -> None:
    store = Store.open(small.root)
    shutil.rmtree(small.root / "tmp")
    (small.root / "tmp").symlink_to(small.root.parent)
    ShardWriter(store, "b0016", 0, 0)


def rebuild_beside_a_writer(small: Small) -> None:
    store = Store.open(small.root)
    with acquire_lock(small.root, 1, 2):
        rebuild_index(store)


def other_meta(small: Small) -> None:
    one = read_meta(small.root)
    check_same(one, replace(one, seed=9), small.root)


def npy(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


LONG = {"rows": 3, "lengths": [1, 1, 1]}
CASES: dict[str, tuple[str, Malform]] = {
    # store.json
    "no store.json": (r"not a store|is no store", instead("store.json", nothing)),
    "a file for a store": ("not a folder", lambda small: read_meta(small.root / "store.json")),
    "no JSON": (r"store\.json is not valid JSON", content("store.json", lambda old: old[:-20])),
    "JSON of another kind": (r"store\.json is not a JSON object", content("store.json", lambda old: b"[]\n")),
    "half of a character": (r"store\.json is damaged", content("store.json", lambda old: b'{"a":"\\ud800"}\n')),
    "store.json changed": ("crc32c", content("store.json", lambda old: old.replace(b'"seed":0', b'"seed":1'))),
    "store.json respelled": ("spelled", content("store.json", lambda old: old.replace(b'"data":', b'"data": '))),
    "store.json of 65 MiB": ("bytes, so it is not ours", look(lambda s: os.truncate(s.root / "store.json", 65 << 20))),
    "a newer format": ("newer dflash", meta("format", 2)),
    "no format": ("format", meta("format", 0)),
    "a field too many": ("unknown field 'surprise'", meta("surprise", 1)),
    "a field too few": ("lacks the field 'seed'", meta("seed", drop=True)),
    "a wrong value": ("field 'hidden_size' has the wrong value", meta("hidden_size", -8)),
    "unknown labels": ("labels is 'topk:0'", meta("labels", "topk:0")),
    "a bucket twice": ("names a bucket twice", meta("buckets/1/held_out", False)),
    "a tap twice": ("names a layer twice", meta("taps", [1, 1])),
    "a name that climbs": ("impossible file name", meta("fingerprints/docs", {"../x": {"bytes": 1, "sha256": ""}})),
    "rows too large": ("too large", look(huge)),
    "another seed": ("seed: it has 0, this command has 9", other_meta),
    # files beside the shards
    "a missing file": ("config.json in store .* is missing", instead("target/config.json", nothing)),
    "a longer file": ("bytes instead of", content("target/config.json", lambda old: old + b" ")),
    "another file": ("other sha256", content("target/config.json", flip(9))),
    "a listed symlink": ("symlink", instead("target/config.json", lambda path: path.symlink_to("/dev/null"))),
    "an unlisted symlink": ("symlink", look(lambda s: (s.root / "target/x.json").symlink_to("/dev/null"))),
    "a symlink for a folder": ("tmp in store .* is a symlink", instead("tmp", lambda path: path.symlink_to("/tmp"))),
    "a file for a folder": ("no folder", instead("index", Path.touch)),
    "a symlink in docs": ("symlink", instead("docs/mask.u8", lambda path: path.symlink_to("/dev/null"))),
    "a pipe": ("not a regular file", instead("docs/mask.u8", os.mkfifo)),
    "documents incomplete": ("lacks mask.u8", instead("docs/mask.u8", nothing)),
    "documents cut": ("impossible sizes", docs("docs/offsets.u64", lambda old: old[:-3])),
    "offsets that jump": ("does not fit the tokens", docs("docs/offsets.u64", flip(8 * 3 + 6))),
    "no tokenizer": ("tokenizer in", lambda s: decode_row(s.root / "docs", np.ones(2, "i4"), np.ones(2, "u1"))),
    "a folder that is not empty": ("no part of a store", lambda s: _check_room(SOURCES)),
    "a folder with a store": ("already holds a store", lambda s: _check_room(s.root)),
    "a file for a folder to write": ("not a folder", lambda s: _check_room(s.root / "plan.npz")),
    # plan.npz
    "no plan": (r"plan\.npz .*missing", instead("plan.npz", nothing)),
    "plan no archive": (r"plan\.npz is damaged", look(lambda s: (s.root / "plan.npz").write_bytes(b"x"))),
    "plan of other content": ("other fingerprint", look(without_check)),
    "plan without files": ("list of source files", plan(lambda m: m.pop("files"))),
    "plan files no list": ("list of source files", plan(lambda m: m.update(files=npy({"a": 1})))),
    "plan column missing": ("missing or not of type", plan(lambda m: m.pop("b0016.line"))),
    "plan columns differ": ("differ in length", plan(lambda m: m.update({"b0016.line": m["b0016.line"][:-1]}))),
    "plan split": ("split is not", plan(lambda m: put(m, "b0016.split", 0, 1))),
    "plan with a stranger": ("unknown member", plan(lambda m: m.update({"b0016.more": m["b0016.line"]}))),
    "plan of other buckets": ("different buckets", meta("buckets/0/rows", 5)),
    "a document that is not there": (r"docs/ does not have", plan(lambda m: put(m, "b0016.document", 0, 99))),
    "a document twice": ("already in another row", plan(lambda m: put(m, "b0016.document", 0, 1))),
    "another length": ("not its document's", plan(lambda m: put(m, "b0016.length", 0, 1))),
    "an unknown source": ("source file", plan(lambda m: put(m, "b0016.file", 0, 1))),
    "too much supervised": ("more supervised tokens", plan(lambda m: put(m, "b0016.supervised", 0, 99))),
    # index
    "a line of another bucket": ("no bucket 'b0099'", line(lambda e: e.update(bucket="b0099"))),
    "a line of no shard": ("no shard 99", line(lambda e: e.update(number=99))),
    "a line of other rows": ("do not fit bucket", line(lambda e: e.update(LONG))),
    "a line without checksums": ("no crc32c", line(lambda e: e["checksums"].update({"zarr.json": -1}))),
    "index while others write": ("being written to by worker 1", rebuild_beside_a_writer),
    # a shard's manifest
    "no manifest": ("zarr.json is missing", instead(f"{SHARD}/zarr.json", nothing)),
    "a socket for a manifest": ("cannot be read", instead(f"{SHARD}/zarr.json", bound_socket)),
    "no group": ("not the Zarr v3 group", manifest(lambda group: group.update(zarr_format=2))),
    "manifest spelled otherwise": ("spelled", look(lambda s: s.stamp_spelled(s.root / SHARD / "zarr.json"))),
    "swapped shards": ("name the folders as they were", look(other_shard)),
    "another store's": ("belongs to another store", manifest(lambda g: g["attributes"].update(store="0" * 64))),
    "other rows": ("not those of the plan", manifest(lambda g: g["attributes"]["documents"].reverse())),
    "half a row": ("lengths", manifest(lambda g: g["attributes"]["lengths"].__setitem__(0, 1))),
    "an array too few": ("'arrays'|the arrays", manifest(lambda g: g["attributes"]["arrays"].pop("labels"))),
    "an array of another size": ("size", manifest(lambda g: g["attributes"]["arrays"]["labels"].update(bytes=7))),
    "an array that is none": ("arrays.labels is not", manifest(lambda g: g["attributes"]["arrays"].update(labels=1))),
    "sums of other taps": (
        "quantisation",
        manifest(lambda g: g["attributes"].update(quantisation={"squared_error": [0.5], "squares": [0.5]})),
    ),
    "another manifest than the index's": ("not the index's", line(lambda e: e["checksums"].update({"zarr.json": 5}))),
    # arrays
    "no array": ("missing or cannot be read", instead(f"{SHARD}/hidden/c.0.0.0", nothing)),
    "an array cut": ("bytes instead of", content(f"{SHARD}/hidden/c.0.0.0", lambda old: old[:-4096])),
    "an array cut while it is read": ("ends before byte", cut_while_read),
    "a disk that fails": ("cannot be read at byte 0", failing_disk),
    "a footer": ("footer of array hidden", content(f"{SHARD}/hidden/c.0.0.0", flip(-20))),
    "a row": ("Row 0 of array hidden", content(f"{SHARD}/hidden/c.0.0.0", flip(0))),
    "an id outside the vocabulary": ("outside the vocabulary", meta("vocab_size", 7)),
    "a missing shard": ("is not there", look(retired)),
    "a row that is none": ("no row 99", lambda s: Store.open(s.root).read_row("b0016", 99)),
    "a bucket that is none": ("no bucket 'b0770'", lambda s: Store.open(s.root).read_row("b0770", 0)),
    # calib.safetensors
    "no channel RMS": ("calib.safetensors .*missing", lambda s: read_calib(s.root, 16)),
    "channel RMS damaged": ("calib.safetensors .*damaged", lambda s: (
        (s.root / "calib.safetensors").write_bytes(b"x" * 50), read_calib(s.root, 16))),
    "channel RMS of another width": ("of 16 values", calib([1.0] * 4)),
    "channel RMS zero": ("not a positive number", calib([1.0] * 15 + [0.0])),
    "another channel RMS": ("made with", manifest(lambda g: g["attributes"].update(calib="0" * 64))),
    # writing
    "a symlink for tmp": ("symlink", linked_tmp),
    "a writer that was given up": ("given up", gone_writer),
}  # fmt: skip


class Watch:
    """Every DflashError that is made, message and place; the session remembers it as well."""

    def __enter__(self) -> "Watch":
        self.before, WATCH.messages = WATCH.messages, {}
        return self

    def __exit__(self, *_: object) -> None:
        found, WATCH.messages = WATCH.messages, self.before
        self.messages = [message for messages in found.values() for message in messages]
        self.sites = {(Path(file).name, line) for file, line in found if file.startswith("dflash/store/")}
        for place, messages in found.items():
            WATCH.messages.setdefault(place, set()).update(messages)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Watch]:
    folder = tmp_path_factory.mktemp("errors")
    small = Small(folder / "s", "bf16")
    found = {}
    for number, (name, (_, malform)) in enumerate(CASES.items()):
        one = copy.copy(small)
        one.root = Path(shutil.copytree(small.root, folder / str(number)))
        one.manifests = sorted(one.root.glob("shards/*/*/zarr.json"))
        with Watch() as found[name]:
            try:
                malform(one)
            except DflashError:
                continue
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_store_is_named(seen: dict[str, Watch], name: str) -> None:
    messages, words = seen[name].messages, CASES[name][0]
    assert any(re.search(words, message) for message in messages), messages
    for message in messages:
        assert "\n" not in message
        assert message.endswith("."), message


def can_raise() -> dict[Site, int]:
    """Where the store's sources make an error about a file: (file, first line) -> last line."""
    found = {}
    for path in sorted(SOURCES.glob("*.py")):
        if path.name in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "DflashError":
                found[path.name, node.lineno] = node.end_lineno or node.lineno
    return found


def test_every_error_of_the_store_has_its_malformed_store(seen: dict[str, Watch]) -> None:
    sites = set().union(*(watch.sites for watch in seen.values()))
    possible = can_raise()
    assert len(possible) > 60
    missing = [
        f"{file}:{first}"
        for (file, first), last in possible.items()
        if not any(name == file and first <= at <= last for name, at in sites)
    ]
    assert missing == []
