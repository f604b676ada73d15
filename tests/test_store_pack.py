"""A packed store: the same arrays without holes, plain Zarr, read by our reader, checked by verify, crash-safe."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from helpers_store import fill_shard, make_store

from dflash.errors import DflashError, DiskFullError
from dflash.store import Store, inspect, pack, verify
from dflash.store.pack import block_of
from dflash.store.verify import retire

pack_module = sys.modules["dflash.store.pack"]
KINDS = [("bf16", "argmax", 64), ("bf16", "last-hidden", 40), ("lz4", "last-hidden", 40), ("int8", "topk:4", 40)]
HIDDEN = "shards/b0096/s000000.zarr/hidden/c.0.0.0"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of tests are small: blocks of 12 (of 96) and 16 (of 64) tokens leave some of a row's blocks out."""
    monkeypatch.setattr(pack_module, "BLOCK_TOKENS", 14)


def open_with_tensorstore(path: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(tensorstore.open(spec, read=True).result().read().result())


@pytest.mark.parametrize(("storage", "labels", "hidden_size"), KINDS)
@pytest.mark.parametrize("io", ["mmap", "direct"])
def test_every_row_reads_as_before_and_every_array_is_plain_zarr(
    tmp_path: Path, storage: str, labels: str, hidden_size: int, io: str
) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=14)
    pack(store.root, tmp_path / "p")
    packed = Store.open(tmp_path / "p", io=io)
    assert packed.missing() == []
    for bucket in store.buckets:
        for row in range(bucket.rows):
            ours, theirs = packed.read_row(bucket.name, row), store.read_row(bucket.name, row)
            assert ours.keys() == theirs.keys()
            for name, array in theirs.items():
                np.testing.assert_array_equal(ours[name], array, err_msg=name)
    for bucket, number in store.shards():
        inner = Path("shards", bucket, f"s{number:06d}.zarr")
        one, other = (zarr.open_group(str(root / inner), mode="r") for root in (store.root, packed.root))
        assert set(one.array_keys()) == set(other.array_keys())
        for name in one.array_keys():
            whole = np.asarray(one[name][:])
            np.testing.assert_array_equal(np.asarray(other[name][:]), whole, err_msg=name)
            np.testing.assert_array_equal(open_with_tensorstore(packed.root / inner / name), whole, err_msg=name)


@pytest.mark.parametrize(("storage", "labels", "hidden_size"), KINDS)
def test_verify_accepts_it_and_finds_every_kind_of_damage(
    tmp_path: Path, storage: str, labels: str, hidden_size: int
) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=14)
    pack(store.root, tmp_path / "p")
    found = verify(tmp_path / "p")
    assert found["ok"], found["problems"]
    assert found["shards"] == len(store.shards())
    if storage == "lz4":
        return
    file, n = tmp_path / "p" / HIDDEN, store.length("b0096", 0)
    assert n is not None
    token = np.dtype(np.int8 if storage == "int8" else np.uint16).itemsize * 3 * hidden_size
    content = file.read_bytes()
    stored = -(-n // 12) * 12 * token  # of row 0, in blocks of 12 tokens
    assert stored > n * token
    for at, row in ((3, 0), (stored - 1, 0), (stored + 5, 1), (len(content) - 30, None)):
        damaged = bytearray(content)
        damaged[at] ^= 0x40
        file.write_bytes(damaged)
        (problem,) = verify(tmp_path / "p")["problems"]
        assert (problem["shard"], problem["array"], problem["row"]) == ("b0096/s000000", "hidden", row), at
    file.write_bytes(content[:-1])
    assert [p["array"] for p in verify(tmp_path / "p")["problems"]] == ["hidden"]


def test_there_are_no_holes_so_a_plain_tar_is_no_larger(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", hidden_size=1024, buckets=(96,), documents=8)
    result = pack(store.root, tmp_path / "p")
    for file in (tmp_path / "p" / "shards").rglob("hidden/c.*"):
        assert file.stat().st_blocks * 512 >= file.stat().st_size
    packed, lengths = (tmp_path / "p" / HIDDEN).stat().st_size, store.plan.rows["b0096"].length[:4].astype(int)
    blocks = int((-(-lengths // 12) * 12).sum())
    assert packed == blocks * 6144 + 4 * 8 * 16 + 4
    assert packed < (store.root / HIDDEN).stat().st_size
    with tarfile.open(tmp_path / "p.tar", "w") as tar:
        tar.add(tmp_path / "p", ".")
    assert (tmp_path / "p.tar").stat().st_size < 1.1 * result["file_bytes"]
    (tmp_path / "again").mkdir()
    subprocess.run(["tar", "-xf", str(tmp_path / "p.tar"), "-C", str(tmp_path / "again")], check=True)
    assert verify(tmp_path / "again")["ok"]
    assert result["file_bytes"] < result["source_file_bytes"]


def test_an_object_store_drops_empty_folders_and_nothing_else(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=14)
    pack(store.root, tmp_path / "p")
    for folder in ("tmp", "lock"):
        shutil.rmtree(tmp_path / "p" / folder)
    assert Store.open(tmp_path / "p").missing() == []
    assert verify(tmp_path / "p")["ok"]


def test_rows_of_documents_that_were_left_out_stay_empty(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, buckets=(96,), fill=False)
    for shard in store.missing():
        fill_shard(store, *shard, empty=[1] if shard == ("b0096", 0) else [])
    pack(store.root, tmp_path / "p")
    packed = Store.open(tmp_path / "p")
    assert packed.length("b0096", 1) == 0
    assert len(packed.read_row("b0096", 1)["hidden"]) == 0
    np.testing.assert_array_equal(packed.read_row("b0096", 2)["hidden"], store.read_row("b0096", 2)["hidden"])
    assert verify(packed.root)["ok"]
    assert inspect(packed.root / "shards/b0096/s000000.zarr")["checksums"]["ok"]


def test_the_same_command_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """SIGKILL in the middle of the third shard: no store until all is there, then the same bytes as in one go."""
    store = make_store(tmp_path / "s", documents=24)
    code = (
        "import os, signal, sys\nfrom dflash.store import pack\nmodule = sys.modules['dflash.store.pack']\n"
        "write, module.THREADS, calls = module.pwrite_all, 1, []\n"
        "def dying(*args):\n    calls.append(0)\n    if len(calls) > 60: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(*args)\n"
        "module.pwrite_all = dying\nmodule.BLOCK_TOKENS = 14\npack(sys.argv[1], sys.argv[2])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    killed = subprocess.run(
        [sys.executable, "-c", code, store.root, tmp_path / "p"], env=environment, capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(DflashError, match=r"store\.json"):
        Store.open(tmp_path / "p")
    assert os.listdir(tmp_path / "p/tmp")
    result = pack(store.root, tmp_path / "p")
    assert 0 < result["packed"] < result["shards"] == len(store.shards())
    assert os.listdir(tmp_path / "p/tmp") == []
    assert verify(tmp_path / "p")["ok"]
    pack(store.root, tmp_path / "whole")
    for file in sorted(p for p in (tmp_path / "whole/shards").rglob("*") if p.is_file()):
        assert file.read_bytes() == (tmp_path / "p" / file.relative_to(tmp_path / "whole")).read_bytes(), file


def test_what_is_packed_is_not_packed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path / "s", documents=14)
    pack(store.root, tmp_path / "p")
    assert pack(store.root, tmp_path / "p")["packed"] == 0
    assert "nothing to do" in capsys.readouterr().err


def test_shards_that_the_source_got_later_are_added(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=14, fill=False)
    first, *others = store.missing()
    fill_shard(store, *first)
    assert pack(store.root, tmp_path / "p")["missing"]
    assert len(Store.open(tmp_path / "p").missing()) == len(others)
    for shard in others:
        fill_shard(store, *shard)
    assert pack(store.root, tmp_path / "p")["packed"] == len(others)
    assert verify(tmp_path / "p")["ok"]


@pytest.mark.parametrize("where", ["hidden/c.0.0.0", "labels/c.0.0", "lengths/c.0", "zarr.json"])
def test_a_damaged_source_is_never_packed(tmp_path: Path, where: str) -> None:
    store = make_store(tmp_path / "s", documents=14)
    file = store.root / "shards/b0096/s000001.zarr" / where
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.write_bytes(content)
    with pytest.raises(DflashError, match="b0096/s000001"):
        pack(store.root, tmp_path / "p")
    assert not (tmp_path / "p/store.json").exists()


def test_a_full_disk_has_its_own_exit_code_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = make_store(tmp_path / "s", documents=24), 0
    write = pack_module.pwrite_all

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(pack_module, "pwrite_all", full)
    with pytest.raises(DiskFullError) as raised:
        pack(store.root, tmp_path / "p")
    assert raised.value.exit_code == 28
    monkeypatch.setattr(pack_module, "pwrite_all", write)
    pack(store.root, tmp_path / "p")
    assert verify(tmp_path / "p")["ok"]


def test_only_a_new_folder_or_this_stores_own_pack_is_written_to(tmp_path: Path) -> None:
    store, other = make_store(tmp_path / "s", documents=8), make_store(tmp_path / "o", documents=8, seed=1)
    pack(other.root, tmp_path / "p")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for out, words in (
        ("p", "another store"),
        ("strange", "thesis"),
        ("file", "no folder|not a folder"),
        ("s/p", "in"),
    ):
        with pytest.raises(DflashError, match=words):
            pack(store.root, tmp_path / out)


@pytest.mark.parametrize("link", ["tmp", "lock", "index", "docs", "shards/b0096", "target/inner"])
def test_nothing_is_written_or_tidied_up_behind_a_symlink(tmp_path: Path, link: str) -> None:
    """An unfinished pack may come from anybody too."""
    store, outside = make_store(tmp_path / "s", documents=8), tmp_path / "outside"
    pack(store.root, tmp_path / "p")
    (tmp_path / "p/store.json").unlink()
    outside.mkdir()
    (outside / "thesis.tex").write_text("x")
    shutil.rmtree(tmp_path / "p" / link, ignore_errors=True)
    (tmp_path / "p" / link).symlink_to(outside)
    with pytest.raises(DflashError, match="is a symlink"):
        pack(store.root, tmp_path / "p")
    assert os.listdir(outside) == ["thesis.tex"]


def test_what_does_not_fit_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "s", documents=8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DflashError, match="free there"):
        pack(store.root, tmp_path / "new")


def test_blocks_divide_their_ceiling_and_are_of_about_64_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "BLOCK_TOKENS", 64)
    known = {770: 70, 1216: 64, 1728: 64, 2432: 64, 3296: 32, 8192: 64, 96: 48, 997: 1, 40: 40}
    assert {ceiling: block_of(ceiling) for ceiling in known} == known


def test_a_manifest_that_lies_about_blocks_is_refused(tmp_path: Path) -> None:
    """A block that does not divide the ceiling, or one for an array that has none, never reaches the arithmetic."""
    from dflash.store.manifest import read_manifest
    from dflash.store.meta import with_crc
    from dflash.store.zarr_json import group_document

    store = make_store(tmp_path / "s", documents=8)
    pack(store.root, tmp_path / "p")
    packed = Store.open(tmp_path / "p")
    manifest, _ = read_manifest(packed, ("b0096", 0))
    for array, block in (("hidden", 7), ("hidden", 1), ("labels", 16), ("hidden", 0), ("hidden", "16")):
        arrays = {**manifest["arrays"], array: {**manifest["arrays"][array], "block": block}}
        document = group_document(with_crc({**manifest, "arrays": arrays}))
        (tmp_path / "p/shards/b0096/s000000.zarr/zarr.json").write_bytes(document)
        with pytest.raises(DflashError, match="arrays"):
            read_manifest(packed, ("b0096", 0))


def test_a_shard_that_was_retired_in_the_pack_is_packed_again_and_a_remade_one_is_kept(tmp_path: Path) -> None:
    """The packed store has generations of its own: what `verify --repair` retired there needs a later one."""
    source = make_store(tmp_path / "source", documents=14)
    pack(source.root, tmp_path / "out")
    for remake in (False, True):
        damaged = tmp_path / "out" / HIDDEN
        content = bytearray(damaged.read_bytes())
        content[5] ^= 1
        damaged.write_bytes(content)
        assert verify(tmp_path / "out", repair=True)["retired"]
        if remake:  # as an extraction on the packed store would
            fill_shard(Store.open(tmp_path / "out"), "b0096", 0)
            assert verify(tmp_path / "out")["ok"]
        assert pack(source.root, tmp_path / "out")["packed"] == int(not remake)
        assert not Store.open(tmp_path / "out").missing()
        assert verify(tmp_path / "out")["ok"]


def test_a_shard_that_was_made_again_in_the_source_is_packed_again(tmp_path: Path) -> None:
    """Whatever the generations are: the pack's may be ahead of its source's."""
    source, out = make_store(tmp_path / "source", documents=14), tmp_path / "out"
    pack(source.root, out)
    for _ in range(2):
        with (out / HIDDEN).open("r+b") as file:
            file.write(b"\xff")
        verify(out, repair=True)
        pack(source.root, out)
    retire(source, [("b0096", 0)])
    fill_shard(source, "b0096", 0, empty=[1])  # another content
    assert source.index.entries["b0096", 0]["gen"] < Store.open(out).index.entries["b0096", 0]["gen"]
    assert pack(source.root, out)["packed"] == 1
    assert Store.open(out).length("b0096", 1) == 0
    assert pack(source.root, out)["packed"] == 0
    assert verify(out)["ok"]
