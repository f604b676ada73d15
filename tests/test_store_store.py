"""Making and opening a store."""

import gc
import os
import shutil
import weakref
from pathlib import Path

import pytest
from helpers_store import fill_shard, make_store

from dflash.errors import DflashError
from dflash.store import Store, create_store


def test_missing_counts_down_in_extraction_order(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    assert store.missing() == store.shards()
    assert [bucket for bucket, _ in store.shards()] == ["b0096", "b0096", "v0096", "b0064", "b0064", "v0064"]
    fill_shard(store, "v0096", 0)
    assert ("v0096", 0) not in store.missing()
    assert Store.open(store.root).missing() == store.missing()


def test_lines_of_other_writers_are_seen_after_a_reload(tmp_path: Path) -> None:
    one = make_store(tmp_path / "s", documents=10, fill=False)
    two = Store.open(one.root)
    fill_shard(two, "b0096", 1, worker=1)
    assert ("b0096", 1) in one.missing()
    one.reload_index()
    assert ("b0096", 1) not in one.missing()
    assert sorted(os.listdir(one.root / "index")) == ["w001.jsonl"]


def test_a_store_that_is_let_go_of_lets_its_maps_go(tmp_path: Path) -> None:
    """Maps keep files open and their pages in the cache; a run that opens a store anew must not pile them up."""
    made = make_store(tmp_path / "s", documents=10)
    store = Store.open(made.root)
    store.read_row("b0096", 0)
    opened = weakref.ref(store._cache.get(store, ("b0096", 0)))
    del store
    gc.collect()
    assert opened() is None


def test_shapes_and_dtypes_of_buffers(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False, labels="topk:4")
    assert store.array_names() == ("hidden", "topk_ids", "topk_logp", "input_ids", "labels", "loss_mask")
    shape, dtype = store.array_shape_dtype("hidden", 96)
    assert (shape, dtype.name) == ((96, 192), "uint16")
    shape, dtype = store.array_shape_dtype("topk_logp", 64)
    assert (shape, dtype.name) == ((64, 4), "float16")


@pytest.mark.parametrize(
    "name", ["docs/tokens.i32", "docs/mask.u8", "plan.npz", "target/config.json", "target/embed.safetensors"]
)
def test_a_cut_or_missing_file_beside_the_shards_stops_the_opening(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    path = store.root / name
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DflashError, match=name.partition("/")[0]):
        Store.open(store.root)
    path.unlink()
    with pytest.raises(DflashError, match=name.partition("/")[0]):
        Store.open(store.root)


def test_another_config_of_the_same_size_stops_the_opening(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    path = store.root / "target/config.json"
    path.write_text(path.read_text().replace('"vocab_size": 320', '"vocab_size": 321'))
    with pytest.raises(DflashError, match=r"target/config\.json.*sha256"):
        Store.open(store.root)


def test_the_plan_of_another_store_stops_the_opening(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    other = make_store(tmp_path / "o", documents=10, fill=False, seed=1)
    shutil.copy(other.root / "plan.npz", store.root / "plan.npz")
    with pytest.raises(DflashError, match=r"plan\.npz"):
        Store.open(store.root)


@pytest.mark.parametrize("name", ["docs/tokens.i32", "target/config.json", "plan.npz", "store.json", "docs", "target"])
def test_a_symlink_beside_the_shards_stops_the_opening(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    path = store.root / name
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(DflashError, match=f"{name}.*symlink"):
        Store.open(store.root)


def test_a_named_pipe_does_not_hang_the_opening(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    (store.root / "docs/mask.u8").unlink()
    os.mkfifo(store.root / "docs/mask.u8")
    with pytest.raises(DflashError, match="regular"):
        Store.open(store.root)


def test_the_root_itself_may_be_a_symlink(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    (tmp_path / "link").symlink_to(store.root)
    assert len(Store.open(tmp_path / "link").read_row("b0064", 0)["hidden"])


def test_a_store_is_not_made_twice_nor_among_other_files(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    with pytest.raises(DflashError, match="already"):
        make_store(tmp_path / "s", documents=10)
    assert Store.open(store.root).meta == store.meta
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").write_text("years of work")
    with pytest.raises(DflashError, match=r"thesis\.txt"):
        make_store(tmp_path / "home", documents=10)
    assert (tmp_path / "home/thesis.txt").read_text() == "years of work"


def test_what_an_interrupted_creation_left_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash.store import store as module

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            make_store(tmp_path / "s", documents=10)
    assert (tmp_path / "s/plan.npz").exists()
    with pytest.raises(DflashError, match="not a store"):
        Store.open(tmp_path / "s")
    shutil.rmtree(tmp_path / "s.scratch")
    store = make_store(tmp_path / "s", documents=10, seed=4)
    assert Store.open(store.root).missing() == []


def test_files_are_moved_in_and_nothing_is_copied(tmp_path: Path) -> None:
    """`create_store` takes the prepared folder's files away: at tens of gigabytes a copy would matter."""
    from dflash.store import DocumentsWriter, Plan, Prepared

    store = make_store(tmp_path / "s", documents=10, fill=False)
    folder = tmp_path / "prepared"
    writer = DocumentsWriter(folder / "docs")
    for tokens, mask in store.documents:
        writer.add(tokens, mask)
    documents = writer.close()
    store.plan.save(folder / "plan.npz")
    inode = (folder / "docs/tokens.i32").stat().st_ino
    shutil.copytree(store.root / "target", tmp_path / "target")
    prepared = Prepared(folder, documents, Plan.load(folder / "plan.npz"), {}, {})
    again = create_store(tmp_path / "again", store.meta, prepared, tmp_path / "target")
    assert (again.root / "docs/tokens.i32").stat().st_ino == inode
    assert again.meta.fingerprints == store.meta.fingerprints
    assert not (tmp_path / "target").exists()
