"""Safe to open: whatever stands in a store's files, reading it ends in our error or in a right answer.

Each example writes something hostile into one file of a small store and makes every checksum above it right again, so
that the parsers behind the checksums are reached. Then everything is opened and read. No other exception may come out,
no value may be wrong, and no more memory may be asked for than a small multiple of what the store holds.
"""

import contextlib
import copy
import hashlib
import io
import json
import os
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import make_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash.errors import DflashError
from dflash.files import canonical_json
from dflash.store import Store, StoreMeta, inspect, verify
from dflash.store.index import decode_line, encode_line
from dflash.store.layout import crc32c
from dflash.store.meta import with_crc

MEMORY = 32 << 20  # the store has 100 KB
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))  # `make soak` asks for more
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
Rows = dict[tuple[str, int], dict[str, np.ndarray]]

NUMBERS = [0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**40]
STRANGE: list[Any] = [
    *NUMBERS, 1.0, -0.5, 1e308, float("nan"), float("inf"), True, False, None, "", "..", "../../etc/passwd", "/etc",
    "\0", "\ud800", "b0016", "v0016", "topk:4", "topk:1024", "lz4", "int8", "tokens", "last-hidden", "x" * 5000, [], {},
    [[]], [0] * 5000, {"a": {"b": [1]}},
]  # fmt: skip
deep = st.integers(10, 3000).map(lambda n: ("deep", n))
values = st.sampled_from(STRANGE) | st.integers() | deep | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def text_of(value: Any) -> str:
    """Canonical JSON in which ("deep", n) becomes n nested lists, deeper than Python's own encoder goes."""
    marked = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    before, mark, after = marked.partition('["deep",')
    if not mark:
        return marked
    number, _, after = after.partition("]")
    return before + "[" * int(number) + "]" * int(number) + after


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, item in list(items)[:40]:
        yield from places(item, (*path, key))


def mutate(data: st.DataObject, value: Any) -> Any:
    """The JSON value with one to three things replaced, removed, added or doubled."""
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3), label="mutations")):
        path = data.draw(st.sampled_from(list(places(value))), label="where")
        new = copy.deepcopy(data.draw(values, label="what"))
        if not path:
            if data.draw(st.integers(0, 20)) == 0:
                return new
            continue
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        how = data.draw(st.sampled_from(["replace", "replace", "remove", "add", "near"]), label="how")
        if how == "remove":
            del inner[path[-1]]
        elif how == "add" and type(inner) is dict:
            inner[data.draw(st.sampled_from(["x", "crc32c", "rows", "__class__"]))] = new
        elif how == "add":
            inner.insert(path[-1], new)
        elif how == "near" and type(inner[path[-1]]) is int:
            inner[path[-1]] += data.draw(st.sampled_from([-1, 1, 2, 4096]))
        else:
            inner[path[-1]] = new
    return value


class Small:
    """A small store, what its rows are, and the way back to it after each example."""

    def __init__(self, root: Path, storage: str) -> None:
        self.root = root
        store = make_store(
            root, storage=storage, labels="topk:4", hidden_size=8, taps=(1, 2), buckets=(16,), documents=6, held_out=2
        )
        self.rows = read_all(store)
        self.files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self.manifests = sorted(root.glob("shards/*/*/zarr.json"))

    def read(self, name: str | Path) -> Any:
        return json.loads((self.root / name).read_bytes())

    def restore(self) -> None:
        for path, content in self.files.items():
            if not path.is_file() or path.is_symlink() or path.read_bytes() != content:
                path.write_bytes(content)

    def stamp_store(self, value: Any) -> None:
        """Write store.json, and make the shards of this very store, as far as it can be read."""
        if type(value) is dict:
            value.pop("crc32c", None)
            with contextlib.suppress(ValueError, RecursionError):
                value = {**value, "crc32c": crc32c(text_of(value).encode())}
        (self.root / "store.json").write_bytes((text_of(value) + "\n").encode(errors="surrogatepass"))
        with contextlib.suppress(DflashError, RecursionError):
            meta = StoreMeta.from_json(json.loads(text_of(value)))
            for path in self.manifests:
                group = self.read(path)
                group["attributes"] |= {"store": meta.fingerprint(), "plan": meta.fingerprints["plan"]}
                self.stamp_manifest(path, group)

    def stamp_files(self, *names: str) -> None:
        """Take the files of docs/ and plan.npz as they are now into store.json."""
        meta = self.read("store.json")
        for name in names:
            content = (self.root / name).read_bytes()
            about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            if name == "plan.npz":
                meta["fingerprints"]["plan_file"] = about
                with contextlib.suppress(DflashError):
                    from dflash.store import Plan

                    meta["fingerprints"]["plan"] = Plan.load(self.root / name).fingerprint()
            else:
                meta["fingerprints"]["docs"][name.partition("/")[2]] = about
        self.stamp_store(meta)

    def stamp_manifest(self, path: Path, group: Any) -> None:
        if type(group) is dict and type(group.get("attributes")) is dict:
            attributes = group["attributes"]
            attributes.pop("crc32c", None)
            with contextlib.suppress(ValueError, RecursionError):
                attributes["crc32c"] = crc32c(text_of(attributes).encode())
        text = text_of(group)
        if "[[[[" not in text:
            text = json.dumps(group, indent=1) + "\n"  # as it is spelled in a store
        content = text.encode(errors="surrogatepass")
        path.write_bytes(content)
        self.stamp_line(path.parent, {"zarr.json": crc32c(content)})

    def stamp_spelled(self, path: Path) -> None:
        """The same manifest with other spaces."""
        content = path.read_bytes().replace(b'"gen": 0', b'"gen":  0')
        path.write_bytes(content)
        self.stamp_line(path.parent, {"zarr.json": crc32c(content)})

    def stamp_line(self, shard: Path, checksums: dict[str, int]) -> None:
        lines = []
        for line in (self.root / "index/w000.jsonl").read_bytes().splitlines():
            entry = decode_line(line)
            if entry and (entry["bucket"], f"s{entry['number']:06d}.zarr") == (shard.parent.name, shard.name):
                entry["checksums"] |= checksums
            lines.append(encode_line(entry) if entry else line + b"\n")
        (self.root / "index/w000.jsonl").write_bytes(b"".join(lines))


def read_all(store: Store) -> Rows:
    return {(b.name, row): store.read_row(b.name, row) for b in store.buckets for row in range(b.rows)}


def check_message(error: DflashError) -> None:
    assert "\n" not in str(error), error
    assert len(str(error)) < 1000, error


def error_or_answer(small: Small, forged: bool = False) -> None:
    """Open and read everything, in every way. `forged`: the data itself was changed, so values may differ."""
    for look in (lambda: read_everything(small, forged), lambda: verify(small.root), lambda: inspect(small.root)):
        tracemalloc.start()
        try:
            look()
        except DflashError as error:
            check_message(error)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < MEMORY, f"{peak:,} bytes for a store of 100 KB"


def read_everything(small: Small, forged: bool) -> None:
    store = Store.open(small.root)
    for shard in store.missing():
        assert shard in store.shards()
    for bucket in store.buckets:
        for row in range(bucket.rows):
            try:
                arrays = store.read_row(bucket.name, row)
            except DflashError as error:
                check_message(error)
                continue
            right = small.rows.get((bucket.name, row))
            for name, array in arrays.items() if not forged else ():
                assert right is not None
                assert array.tobytes() == right[name][: len(array)].tobytes(), f"{name} of row {row}"


@pytest.fixture(scope="module", params=["bf16", "lz4", "int8"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp(request.param) / "s", request.param)


@pytest.fixture
def small(store: Small) -> Iterator[Small]:
    store.restore()
    yield store
    store.restore()


@fuzz
@given(data=st.data())
def test_store_json(small: Small, data: st.DataObject) -> None:
    small.restore()
    small.stamp_store(mutate(data, small.read("store.json")))
    error_or_answer(small)


@fuzz
@given(data=st.data())
def test_a_manifest(small: Small, data: st.DataObject) -> None:
    small.restore()
    path = data.draw(st.sampled_from(small.manifests))
    small.stamp_manifest(path, mutate(data, small.read(path)))
    error_or_answer(small)


@fuzz
@given(data=st.data())
def test_an_arrays_zarr_json(small: Small, data: st.DataObject) -> None:
    small.restore()
    path = data.draw(st.sampled_from(sorted(small.root.glob("shards/*/*/*/zarr.json"))))
    content = text_of(mutate(data, small.read(path))).encode(errors="surrogatepass")
    path.write_bytes(content)
    small.stamp_line(path.parent.parent, {f"{path.parent.name}/zarr.json": crc32c(content)})
    error_or_answer(small)


@fuzz
@given(data=st.data())
def test_an_index_line(small: Small, data: st.DataObject) -> None:
    small.restore()
    path = small.root / "index/w000.jsonl"
    lines = path.read_bytes().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    value = data.draw(st.sampled_from([decode_line(lines[at]), {"retire": ["b0016", 0], "gen": 0}]))
    text = text_of(mutate(data, value)).encode(errors="surrogatepass")
    lines[at] = text + b"\t%08x" % crc32c(text)
    path.write_bytes(b"\n".join(lines) + b"\n" * data.draw(st.booleans()))
    error_or_answer(small)


@fuzz
@given(data=st.data())
def test_plan_npz(small: Small, data: st.DataObject) -> None:
    """Members with other values, types and lengths, or bytes of the archive changed; store.json knows the result."""
    small.restore()
    path = small.root / "plan.npz"
    if data.draw(st.booleans(), label="bytes"):
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + 4] = data.draw(st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f", b"PK\x03\x04", b""]))
        path.write_bytes(content)
    else:
        with np.load(path) as archive:
            members = dict(archive)
        name = data.draw(st.sampled_from(sorted(members)))
        array = members[name]
        how = data.draw(st.sampled_from(["value", "dtype", "length", "shape", "gone", "object-like"]))
        if how == "value":
            low, high = np.iinfo(array.dtype).min, np.iinfo(array.dtype).max
            array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.integers(low, high))
        members[name] = {
            "value": array, "dtype": array.astype("<u8"), "length": array[:-1], "shape": array[None], "gone": array,
            "object-like": np.array(["x"]),
        }[how]  # fmt: skip
        if how == "gone":
            del members[name]
        np.savez(path, **members)
    small.stamp_files("plan.npz")
    error_or_answer(small, forged=True)


@fuzz
@given(data=st.data())
def test_docs(small: Small, data: st.DataObject) -> None:
    small.restore()
    name = data.draw(st.sampled_from(["docs/offsets.u64", "docs/tokens.i32", "docs/mask.u8"]))
    array = np.frombuffer((small.root / name).read_bytes(), "<u1" if name.endswith("u8") else "<u4").copy()
    for _ in range(data.draw(st.integers(1, 3))):
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.sampled_from([0, 1, 2, 127, 255]))
    cut = data.draw(st.integers(0, 9))
    (small.root / name).write_bytes(array.tobytes()[: len(array.tobytes()) - cut * data.draw(st.booleans())])
    small.stamp_files(name)
    error_or_answer(small, forged=True)


@fuzz
@given(data=st.data())
def test_a_footer(small: Small, data: st.DataObject) -> None:
    """Offsets and sizes that point anywhere, with a right checksum in the footer and in the index."""
    small.restore()
    path = data.draw(st.sampled_from(sorted(small.root.glob("shards/*/*/*/c.*"))))
    content = path.read_bytes()
    chunks = json.loads((path.parent / "zarr.json").read_bytes())["shape"][0] if path.name != "c.0" else 1
    index = np.frombuffer(content[-16 * chunks - 4 : -4], "<u8").copy()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(index) - 1))
        index[at] = data.draw(st.sampled_from([n for n in NUMBERS if 0 <= n < 2**64]) | st.integers(0, len(content)))
    footer = index.tobytes() + crc32c(index.tobytes()).to_bytes(4, "little")
    path.write_bytes(content[: -len(footer)] + footer)
    small.stamp_line(path.parent.parent, {f"{path.parent.name}/{path.name}": crc32c(footer)})
    error_or_answer(small)


@fuzz
@given(data=st.data())
def test_rows_with_right_checksums_over_wrong_bytes(small: Small, data: st.DataObject) -> None:
    """What a decompressor is given, and ids that the embedding does not have."""
    small.restore()
    path = data.draw(st.sampled_from(sorted(small.root.glob("shards/*/*/*/c.*"))))
    group = small.read(path.parent.parent / "zarr.json")
    about, content = group["attributes"]["arrays"][path.parent.name], bytearray(path.read_bytes())
    chunks = len(about["crc32c"])
    index = np.frombuffer(bytes(content[-16 * chunks - 4 : -4]), "<u8").reshape(-1, 2)
    row = data.draw(st.integers(0, chunks - 1))
    start, size = (int(n) for n in index[row])
    for _ in range(data.draw(st.integers(1, 4))):
        at = start + data.draw(st.integers(0, 31) | st.integers(0, size - 1)) % size
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    about["crc32c"][row] = crc32c(bytes(content[start : start + size]))
    small.stamp_manifest(path.parent.parent / "zarr.json", group)
    error_or_answer(small, forged=True)


def raw_texts() -> list[bytes]:
    """JSON that no encoder of ours would write."""
    return [
        b"", b"{", b"null", b"[]", b"NaN", b'"x"', b"[" * 100_000, b"{" * 100_000, b'{"a":' * 100_000, b"9" * 100_000,
        b'{"format":1,"format":2}', b'{"format":NaN}', b'{"format":-Infinity}', b'{"format":1e999}', b"\xff\xfe{}",
        b"\xef\xbb\xbf{}", b'{"format":' + b"9" * 5000 + b"}", b'"\\ud800"', b"\0" * 64, b'{"format":1}' * 2,
    ]  # fmt: skip


@pytest.mark.parametrize("text", raw_texts(), ids=lambda text: f"{text[:12]!r}x{len(text)}")
@pytest.mark.parametrize("name", ["store.json", "shards/b0016/s000000.zarr/zarr.json", "index/w000.jsonl", "lock"])
def test_text_that_is_hardly_json(small: Small, name: str, text: bytes) -> None:
    from dflash.store import acquire_lock

    if name == "index/w000.jsonl":
        text = b"".join(line + b"\t%08x\n" % crc32c(line) for line in text.split(b"\n"))
    if name == "lock":
        (small.root / "lock/w001.json").write_bytes(text)
        with acquire_lock(small.root, 0, 2):
            pass
        (small.root / "lock/w001.json").unlink()
    else:
        (small.root / name).write_bytes(text)
        if name.startswith("shards"):
            small.stamp_line((small.root / name).parent, {"zarr.json": crc32c(text)})
    error_or_answer(small)


def test_duplicate_keys_do_not_hide_a_second_manifest(small: Small) -> None:
    path = small.manifests[0]
    text = path.read_bytes().replace(b'"gen": 0', b'"gen": 7, "gen": 0')
    assert text != path.read_bytes()
    path.write_bytes(text)
    small.stamp_line(path.parent, {"zarr.json": crc32c(text)})
    with pytest.raises(DflashError, match=r"zarr\.json"):
        Store.open(small.root).read_row("b0016", 0)


def zip_bytes(make: Callable[[zipfile.ZipFile], None], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        make(archive)
    return buffer.getvalue()


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


HEADER = "{'descr': '%s', 'fortran_order': False, 'shape': (%s,), }"
BOMBS: dict[str, Callable[[], bytes]] = {
    "deflated zeros": lambda: zip_bytes(lambda z: z.writestr("files.npy", bytes(200 << 20)), zipfile.ZIP_DEFLATED),
    "promised length": lambda: zip_bytes(lambda z: z.writestr("files.npy", npy(HEADER % ("<i8", 10**12)))),
    "pickle": lambda: zip_bytes(lambda z: z.writestr("files.npy", npy(HEADER % ("|O", 1), b"cos\nsystem\n(S'x'\ntR."))),
    "evaluated header": lambda: zip_bytes(lambda z: z.writestr("files.npy", npy("__import__('os').abort()"))),
    "member named like a path": lambda: zip_bytes(lambda z: z.writestr("../../x.npy", npy(HEADER % ("|u1", 0)))),
    "member twice": lambda: zip_bytes(twice),
    "no end": lambda: zip_bytes(lambda z: z.writestr("files.npy", npy(HEADER % ("|u1", 0))))[:-10],
    "size in the directory": lambda: grown(zip_bytes(lambda z: z.writestr("files.npy", npy(HEADER % ("|u1", 0))))),
}


def twice(archive: zipfile.ZipFile) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="Duplicate") if archive.namelist() else contextlib.nullcontext():
            archive.writestr("files.npy", npy(HEADER % ("|u1", 0)))


def grown(content: bytes) -> bytes:
    """The central directory promises 2 GiB for both sizes of its member."""
    at = content.index(b"PK\x01\x02") + 20
    return content[:at] + (2**31 - 1).to_bytes(4, "little") * 2 + content[at + 8 :]


@pytest.mark.parametrize("bomb", BOMBS)
def test_archives_that_promise_too_much_are_refused(small: Small, bomb: str) -> None:
    (small.root / "plan.npz").write_bytes(BOMBS[bomb]())
    small.stamp_files("plan.npz")
    with pytest.raises(DflashError, match=r"plan\.npz"):
        Store.open(small.root)
    error_or_answer(small)


def test_an_overlapping_archive_is_refused(small: Small) -> None:
    """A directory of a thousand members that all are the same bytes."""
    one = zip_bytes(lambda z: z.writestr("files.npy", bytes(100_000)))
    at, end = one.index(b"PK\x01\x02"), one.index(b"PK\x05\x06")
    entry = one[at:end]
    many = b"".join(entry.replace(b"files.npy", b"f%04d.npy" % i) for i in range(1000))
    tail = bytearray(one[end:])
    tail[8:12] = (1000).to_bytes(2, "little") * 2
    tail[12:16] = len(many).to_bytes(4, "little")
    (small.root / "plan.npz").write_bytes(one[:at] + many + bytes(tail))
    small.stamp_files("plan.npz")
    with pytest.raises(DflashError, match="promise"):
        Store.open(small.root)
    error_or_answer(small)


LINKS = ["docs", "target", "index", "lock", "tmp", "shards", "shards/b0016", "shards/b0016/s000000.zarr",
         "shards/b0016/s000000.zarr/hidden", "shards/b0016/s000000.zarr/zarr.json", "store.json", "plan.npz",
         "docs/mask.u8", "target/config.json", "target/unlisted.json", "index/w000.jsonl", "lock/w000.json",
         "tmp/b0016-s000000-w000"]  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_nothing_outside_a_store_is_read_or_touched_through_a_symlink(small: Small, tmp_path: Path, name: str) -> None:
    """Everything that can be a link is one, to the same content outside; every command that writes is run."""
    from dflash.store import ShardWriter, acquire_lock, recover

    root, outside = tmp_path / "s", tmp_path / "outside"
    shutil.copytree(small.root, root)
    link = root / name
    if link.exists():
        link.rename(outside)
    else:
        outside.write_text("{}")
    if outside.is_dir():
        (outside / "letter.txt").write_text("not yours")
        (outside / "w000.json").write_text("{}")
    link.symlink_to(outside)

    def state() -> dict[Path, tuple[int, bytes | None]]:
        found = {p: (p.stat().st_ino, p.read_bytes() if p.is_file() else None) for p in outside.rglob("*")}
        return found | ({} if outside.is_dir() else {outside: (outside.stat().st_ino, outside.read_bytes())})

    def write() -> None:
        with acquire_lock(root, 0, 1):
            store = Store.open(root)
            recover(store)
            for shard in store.missing():
                ShardWriter(store, *shard, 0).abandon()

    before = state()
    looks: list[Callable[[], Any]] = [
        write, lambda: verify(root), lambda: inspect(root), lambda: verify(root, repair=True),
        lambda: verify(root, rebuild_index=True), lambda: read_all(Store.open(root)),
    ]  # fmt: skip
    errors = 0
    for look in looks:
        try:
            look()
        except DflashError as error:
            errors += 1
            check_message(error)
        assert state() == before
    assert (
        errors
        or name in ("tmp/b0016-s000000-w000", "lock/w000.json", "shards/b0016/s000000.zarr/zarr.json")
        or (name.startswith("shards/b0016/s000000.zarr") and not link.is_symlink())
    )


def test_canonical_json_of_the_tests_is_the_stores(small: Small) -> None:
    value = small.read("store.json")
    value.pop("crc32c")
    assert text_of(value) == canonical_json(value)
    small.stamp_store(dict(value))
    assert small.read("store.json") == with_crc(value)
    error_or_answer(small)
    assert verify(small.root)["ok"]
