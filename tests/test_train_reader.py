"""Batches out of a store: the same bytes whichever reader brings them, refusals of the disk, what the loop says."""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers_store import make_store

from dflash.errors import DflashError
from dflash.store import Store, direct, pack, paths
from dflash.train import reader as reader_module
from dflash.train.config import TrainConfig
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Filler, Layout, Reader, huge
from dflash.train.run import train

CPU = torch.device("cpu")
# rows of `hidden` at ceilings 64 and 96: whole pages; whole pages at 64 only; none; compressed
KINDS = [("bf16", "last-hidden", 64), ("bf16", "topk:4", 72), ("int8", "argmax", 40), ("lz4", "argmax", 40)]


def micros(store: Store, rows_per_micro: int = 3) -> Iterator[Micro]:
    for bucket in store.buckets:
        shape = BucketRows(bucket.name, bucket.ceiling, bucket.rows, rows_per_micro, 4)
        for first in range(0, bucket.rows, rows_per_micro):
            yield Micro(shape, tuple(range(first, min(first + rows_per_micro, bucket.rows))))


def read_all(store: Store) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """Valid part of every row, by way of the reader's slots."""
    found = {}
    reader = Reader(store, Layout.of(store, 3 * 96), CPU)
    for micro, batch in reader.batches(micros(store)):
        for place, row in enumerate(micro.rows):
            n = int(batch.lengths[place])
            assert n == store.length(micro.bucket.name, row)
            assert int(batch.documents[place]) == store.plan.rows[micro.bucket.name].document[row]
            found[micro.bucket.name, row] = {
                name: np.array(reader_module._numpy(getattr(batch, name))[place, :n]) for name in store.array_names()
            }
        assert batch.lengths[len(micro.rows) :].tolist() == [0] * (3 - len(micro.rows))
    return found


def assert_same(found: dict[tuple[str, int], dict[str, np.ndarray]], store: Store) -> None:
    assert len(found) == sum(bucket.rows for bucket in store.buckets)
    for (bucket, row), arrays in found.items():
        for name, expected in store.read_row(bucket, row).items():
            np.testing.assert_array_equal(arrays[name], expected, err_msg=f"{bucket} {row} {name}")


@pytest.mark.parametrize(("storage", "labels", "hidden_size"), KINDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("io", ["mmap", "direct"])
def test_batches_hold_the_rows_of_the_store(
    tmp_path: Path, storage: str, labels: str, hidden_size: int, packed: bool, io: str
) -> None:
    plain = make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=26)
    if packed:
        pack(plain.root, tmp_path / "p")
    assert_same(read_all(Store.open(tmp_path / ("p" if packed else "s"), io=io)), plain)


def test_whole_pages_go_straight_to_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of 9 pages passes through a thread's buffer but for the part of a page at its end."""
    store = make_store(tmp_path / "s", buckets=(96,), documents=8)
    store.io, through = "direct", []
    fill = direct.DirectFile._fill

    def watched(self: Any, buffer: np.ndarray, start: int, needed: int) -> None:
        if np.shares_memory(buffer, direct._buffer()):
            through.append(needed)
        fill(self, buffer, start, needed)

    monkeypatch.setattr(direct.DirectFile, "_fill", watched)
    slot = Layout.of(store, 4 * 96).buffers(CPU, pin=False)
    assert slot["hidden"].data_ptr() % direct.ALIGN == 0
    Filler(store, Layout.of(store, 4 * 96)).fill(slot, Micro(BucketRows("b0096", 96, 8, 4, 4), (0, 1, 2, 3)))
    lengths = store.plan.rows["b0096"].length[:4].astype(int)
    assert through == [n for n in (lengths * 384 % 4096).tolist() if n]


def test_memory_for_the_disk_is_of_the_kind_that_comes_in_huge_pages() -> None:
    """Private and advised: in small pages the disk takes half as long again, and shared memory has no others."""
    memory = direct.aligned(8 << 20, 2 << 20)
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (....) ", line)
        if found and int(found[1], 16) <= direct.address(memory) < int(found[2], 16):
            break
    flags = next(line for line in lines if line.startswith("VmFlags:")).split()
    assert found is not None
    assert found[3] == "rw-p"
    assert "hg" in flags
    assert "sh" not in flags


@pytest.mark.parametrize("refusing", ["open", "read"])
def test_where_o_direct_is_refused_the_page_cache_serves_and_one_line_says_so(
    tmp_path: Path, refusing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_store(tmp_path / "s", documents=26)
    store = Store.open(plain.root, io="direct")
    monkeypatch.setattr(direct, "_said", set())
    real_open, real_read = paths.open_inside, os.preadv

    def open_refused(root: Path, parts: tuple[str, ...], flags: int = os.O_RDONLY) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(root, parts, flags)

    def read_refused(descriptor: int, *rest: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(descriptor, *rest)

    if refusing == "open":
        monkeypatch.setattr(direct, "open_inside", open_refused)
    else:
        monkeypatch.setattr(direct.os, "preadv", read_refused)
    found = read_all(store)
    monkeypatch.undo()
    assert_same(found, plain)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "refuses O_DIRECT" in line
    assert str(store.root) in line


@pytest.mark.parametrize("io", ["mmap", "direct"])
def test_a_damaged_row_stops_the_loop_with_its_name(tmp_path: Path, io: str) -> None:
    store = make_store(tmp_path / "s", buckets=(96,), documents=8)
    with (store.root / "shards/b0096/s000001.zarr/hidden/c.0.0.0").open("r+b") as file:
        file.seek(36_864 + 100)
        file.write(b"\x01\x02\x03")
    with pytest.raises(DflashError, match="Row 1 of array hidden of shard b0096/s000001"):
        read_all(Store.open(store.root, io=io))


def test_a_file_that_shrinks_under_a_direct_reader_raises(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", buckets=(96,), documents=8)
    store.io = "direct"
    store.read_row("b0096", 0)
    os.truncate(store.root / "shards/b0096/s000000.zarr/hidden/c.0.0.0", 36_864)
    with pytest.raises(DflashError, match="ends before byte"):
        store.read_row("b0096", 2)


@pytest.mark.parametrize("past", [True, False])
def test_a_large_read_in_pieces_is_the_files_content(
    tmp_path: Path, past: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any start and size, in memory at any address: against the file itself."""
    monkeypatch.setattr(direct, "PIECE", 3 * 4096)
    monkeypatch.setattr(direct, "_local", SimpleNamespace())
    content = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    content.tofile(tmp_path / "file")
    file, memory, rng = direct.DirectFile(tmp_path, ("file",)), direct.aligned(120_000), np.random.default_rng(1)
    if not past:
        file._through_the_cache()
    for trial in range(60):
        start, size = int(rng.integers(0, 90_000)), int(rng.integers(0, 40_000))
        start -= start % 4096 * (trial % 2)
        size = min(size, len(content) - start)
        at = int(rng.integers(0, 4096)) if trial % 3 else 0
        target = memory[at : at + size]
        memory[:] = 0
        crc = file.read(start, target)
        np.testing.assert_array_equal(target, content[start : start + size])
        assert crc == direct.crc32c(content[start : start + size])
        assert not memory[:at].any()
        assert not memory[at + size :].any()


def test_a_run_is_the_same_bit_for_bit_with_either_reader(tmp_path: Path) -> None:
    make_store(tmp_path / "s", hidden_size=40)
    weights = {}
    for io in ("mmap", "direct"):
        result = train(
            TrainConfig(
                store=str(tmp_path / "s"), run=str(tmp_path / io), num_layers=1, block_size=4, steps=6, mask_token="7",
                token_budget=192, batch_tokens=384, io=io,
            )
        )  # fmt: skip
        assert 0 <= result["data_wait"] <= 1
        weights[io] = (Path(result["checkpoint"]) / "model.safetensors").read_bytes()
    assert weights["mmap"] == weights["direct"]


# --- advice


class Slow(Filler):
    """Fills as usual and says how fast each reader is."""

    rates: ClassVar[dict[str, float]] = {}

    @property
    def rate(self) -> float:
        return self.rates[self.store.io]


def advice(store: Store, io: str, share: float, monkeypatch: pytest.MonkeyPatch, **rates: float) -> str | None:
    monkeypatch.setattr(reader_module, "Filler", Slow)
    monkeypatch.setattr(Slow, "rates", rates)
    store.io = io
    reader = Reader(store, Layout.of(store, 3 * 96), CPU)
    return reader.advice(share, next(micros(store)))


def test_the_loop_says_when_the_other_reader_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "s", documents=8)
    said = advice(store, "mmap", 0.3, monkeypatch, mmap=1e9, direct=3e9)
    assert said == (
        "The loop waited for data 30% of its time. --io direct reads 3.00 GB/s a thread here, --io mmap 1.00: "
        "stop, and resume with it."
    )
    monkeypatch.setattr(reader_module, "available_memory", lambda: 1)
    said = advice(store, "direct", 0.3, monkeypatch, mmap=3e9, direct=1e9)
    assert said is not None
    assert "--io mmap reads 3.00 GB/s" in said


def test_it_says_nothing_while_data_is_quick_or_the_other_reader_no_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s", documents=8)
    assert advice(store, "mmap", 0.01, monkeypatch, mmap=1e9, direct=9e9) is None
    assert advice(store, "mmap", 0.9, monkeypatch, mmap=1e9, direct=1.1e9) is None


def test_a_store_that_fits_into_memory_is_better_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s", documents=8)
    monkeypatch.setattr(reader_module, "available_memory", lambda: 1 << 40)
    said = advice(store, "direct", 0.3, monkeypatch, mmap=1e9, direct=1e9)
    assert said is not None
    assert "--io mmap" in said
    assert "page cache" in said


def test_the_loop_asks_for_advice_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(tmp_path / "s")
    shares: list[float] = []

    def other(self: Reader, share: float, micro: Micro) -> str:
        shares.append(share)
        return "take the other reader"

    monkeypatch.setattr(Reader, "advice", other)
    train(
        TrainConfig(
            store=str(tmp_path / "s"), run=str(tmp_path / "r"), num_layers=1, block_size=4, steps=22, mask_token="7",
            token_budget=192, batch_tokens=192, eval_every=50,
        )
    )  # fmt: skip
    assert len(shares) == 1
    assert 0 <= shares[0] <= 1
    assert "take the other reader" in capsys.readouterr().err


# --- many shards


def test_the_first_batch_touches_the_files_of_its_own_shards_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes a store of 20,000 shards open in seconds (bench/many_shards.py times that)."""
    root = make_store(tmp_path / "s", documents=400, buckets=(64,)).root
    opened: list[tuple[str, ...]] = []
    real = paths.open_inside

    def watched(root: Path, parts: tuple[str, ...], flags: int = os.O_RDONLY) -> int:
        opened.append(parts)
        return real(root, parts, flags)

    monkeypatch.setattr(paths, "open_inside", watched)
    store = Store.open(root)
    assert len(store.shards()) > 100
    assert not [parts for parts in opened if parts[0] == "shards"]
    reader = Reader(store, Layout.of(store, 3 * 64), CPU)
    next(iter(reader.batches(iter([Micro(BucketRows("b0064", 64, 400, 3, 4), (3, 200, 201))]))))
    assert {parts[2] for parts in opened if parts[0] == "shards"} == {"s000000.zarr", "s000050.zarr"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slots_of_a_gpu_are_registered_huge_pages(tmp_path: Path) -> None:
    made = huge(3 << 20, dtype=torch.bfloat16, device=CPU, pin_memory=True)
    assert made.is_pinned()
    assert made.data_ptr() % (2 << 20) == 0
    made.fill_(3)
    there = torch.empty_like(made, device="cuda")
    there.copy_(made, non_blocking=True)
    torch.cuda.synchronize()
    assert (there == 3).all()
    store = make_store(tmp_path / "s", documents=26)
    for io in ("mmap", "direct"):
        store.io = io
        reader = Reader(store, Layout.of(store, 3 * 96), torch.device("cuda"))
        for micro, batch in reader.batches(micros(store)):
            for place, row in enumerate(micro.rows):
                n = int(batch.lengths[place])
                expected = store.read_row(micro.bucket.name, row)["hidden"]
                ours = batch.hidden[place, :n].cpu().view(torch.uint16).numpy()
                np.testing.assert_array_equal(ours, expected)
