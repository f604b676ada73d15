"""Documents and the row plan: written, read back, and refused when they are not what they say."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dflash.errors import DflashError
from dflash.store import Bucket, Documents, DocumentsWriter, Plan, PlanRows


def write_documents(folder: Path, lengths: tuple[int, ...] = (5, 3, 9)) -> Documents:
    writer = DocumentsWriter(folder)
    for i, n in enumerate(lengths):
        assert writer.add(np.arange(n) + 100 * i, np.arange(n) % 2) == i
    return writer.close()


def plan_rows(lengths: tuple[int, ...] = (5, 3, 9), **changes: list[int]) -> PlanRows:
    n = len(lengths)
    columns = {
        "document": list(range(n)), "conversation": list(range(n)), "file": [0] * n, "line": list(range(1, n + 1)),
        "length": list(lengths), "supervised": [1] * n,
    } | changes  # fmt: skip
    dtypes = ("i8", "i8", "i4", "i8", "i4", "i4")
    return PlanRows(*(np.array(c, dtype=d) for c, d in zip(columns.values(), dtypes, strict=True)))


BUCKET = Bucket(ceiling=16, held_out=False, rows=3, rows_per_shard=2, rows_per_forward=1)


def test_documents_come_back_as_they_were_added(tmp_path: Path) -> None:
    write_documents(tmp_path / "docs")
    documents = Documents.open(tmp_path / "docs")
    assert len(documents) == 3
    tokens, mask = documents[1]
    assert tokens.tolist() == [100, 101, 102]
    assert mask.tolist() == [0, 1, 0]
    assert (tokens.dtype, mask.dtype) == (np.int32, np.uint8)
    assert sum(len(tokens) for tokens, _ in documents) == 17
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_no_documents_at_all_can_be_opened(tmp_path: Path) -> None:
    assert len(write_documents(tmp_path / "docs", ())) == 0


@pytest.mark.parametrize("name", ["tokens.i32", "mask.u8", "offsets.u64"])
@pytest.mark.parametrize("cut", [1, 8])
def test_a_cut_documents_file_is_refused(tmp_path: Path, name: str, cut: int) -> None:
    write_documents(tmp_path / "docs")
    path = tmp_path / "docs" / name
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DflashError, match="docs"):
        Documents.open(tmp_path / "docs")


def test_offsets_that_go_back_are_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "docs")
    np.array([0, 9, 5, 17], dtype="<u8").tofile(tmp_path / "docs" / "offsets.u64")
    with pytest.raises(DflashError, match=r"offsets\.u64"):
        Documents.open(tmp_path / "docs")


def test_missing_documents_name_the_file(tmp_path: Path) -> None:
    write_documents(tmp_path / "docs")
    (tmp_path / "docs" / "mask.u8").unlink()
    with pytest.raises(DflashError, match=r"mask\.u8"):
        Documents.open(tmp_path / "docs")


def test_a_plan_comes_back_with_its_fingerprint(tmp_path: Path) -> None:
    plan = Plan(files=("a.jsonl", "ü.jsonl"), rows={"b0016": plan_rows(), "v0016": plan_rows((4,), document=[9])})
    plan.save(tmp_path / "plan.npz")
    loaded = Plan.load(tmp_path / "plan.npz")
    assert loaded.files == plan.files
    assert loaded.rows.keys() == plan.rows.keys()
    assert loaded.rows["b0016"].length.tolist() == [5, 3, 9]
    assert loaded.rows["v0016"].document.tolist() == [9]
    assert loaded.fingerprint() == plan.fingerprint()
    with np.load(tmp_path / "plan.npz", allow_pickle=False) as plain:
        assert plain["v0016.split"].tolist() == [1]
        assert plain["b0016.split"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("field", ["document", "conversation", "line", "length", "supervised"])
def test_every_column_is_in_the_fingerprint(field: str) -> None:
    before = Plan(("a",), {"b0016": plan_rows()}).fingerprint()
    assert Plan(("a",), {"b0016": plan_rows(**{field: [7, 6, 5]})}).fingerprint() != before
    assert Plan(("b",), {"b0016": plan_rows()}).fingerprint() != before
    assert Plan(("a",), {"v0016": plan_rows()}).fingerprint() != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"document": [0, 1, 3]}, "does not have"),
        ({"document": [0, 1, -1]}, "does not have"),
        ({"document": [0, 1, 1]}, "already"),
        ({"length": [5, 3, 8]}, "length"),
        ({"file": [0, 0, 1]}, "source file"),
        ({"supervised": [1, 4, 1]}, "supervised"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, list[int]], message: str) -> None:
    documents = write_documents(tmp_path / "docs")
    Plan(("a",), {"b0016": plan_rows()}).check((BUCKET,), documents)
    with pytest.raises(DflashError, match=message):
        Plan(("a",), {"b0016": plan_rows(**changes)}).check((BUCKET,), documents)


def test_a_document_in_two_buckets_is_refused(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "docs")
    other = Bucket(ceiling=16, held_out=True, rows=1, rows_per_shard=2, rows_per_forward=1)
    plan = Plan(("a",), {"b0016": plan_rows(), "v0016": plan_rows((3,), document=[1])})
    with pytest.raises(DflashError, match="already"):
        plan.check((BUCKET, other), documents)


def member(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, array, allow_pickle=allow_pickle)
    return content.getvalue()


def rewrite(path: Path, name: str, content: bytes | None, compression: int = zipfile.ZIP_STORED) -> None:
    """Replace, add or (None) drop a member."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members.pop(name, None)
    if content is not None:
        members[name] = content
    with zipfile.ZipFile(path, "w", compression) as archive:
        for each, data in members.items():
            archive.writestr(each, data)


LIE = member(np.zeros(3, dtype="<i4")).replace(b"(3,)", b"(1<", 1)
HUGE = member(np.zeros(3, dtype="<i4")).replace(b"'shape': (3,), }      ", b"'shape': (3000000,), }", 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("b0016.length.npy", member(np.array([5.0, 3, 9]))),
        ("b0016.length.npy", member(np.array([5, 3], dtype="<i4"))),
        ("b0016.length.npy", member(np.array([[5, 3, 9]], dtype="<i4"))),
        ("b0016.length.npy", member(np.array([5, 3, None], dtype=object), allow_pickle=True)),
        ("b0016.length.npy", HUGE),
        ("b0016.length.npy", LIE),
        ("b0016.length.npy", b"no array"),
        ("b0016.length.npy", None),
        ("b0016.split.npy", member(np.array([0, 1, 0], dtype=np.uint8))),
        ("b0016.more.npy", member(np.zeros(3, dtype="<i4"))),
        ("files.npy", None),
        ("files.npy", member(np.frombuffer(b'["a", 1]', dtype=np.uint8))),
        ("files.npy", member(np.frombuffer(b"[" * 100_000, dtype=np.uint8))),
    ],
)
def test_a_malformed_plan_is_refused(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / "plan.npz"
    Plan(("a",), {"b0016": plan_rows()}).save(path)
    rewrite(path, name, content)
    with pytest.raises(DflashError, match=r"plan\.npz"):
        Plan.load(path)


def test_a_compressed_member_is_refused_since_its_size_is_only_promised(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    Plan(("a",), {"b0016": plan_rows()}).save(path)
    rewrite(path, "b0016.line.npy", member(np.arange(3, dtype="<i8")), zipfile.ZIP_DEFLATED)
    with pytest.raises(DflashError, match="compressed"):
        Plan.load(path)


def test_no_plan_and_no_zip_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="missing"):
        Plan.load(tmp_path / "plan.npz")
    (tmp_path / "plan.npz").write_bytes(b"PK nothing")
    with pytest.raises(DflashError, match="damaged"):
        Plan.load(tmp_path / "plan.npz")
