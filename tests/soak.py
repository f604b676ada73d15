"""Kill real extractions at random instants, many times; then finish them and compare with runs that nobody disturbed.

Every worker is the command `dflash extract … --worker i/n` itself, in a process of its own. Importing torch takes
seconds, so the processes are forked from a server that has imported everything and run nothing (`forkserver`): a start
costs what the command itself costs. A worker is killed some random time after it began to write; in a part of the
rounds at any time after its start, so that the making of the store itself is hit too.

`python tests/soak.py [--kills 200] [--seed N]` (make soak) prints a line per store and the figures as JSON.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent
SERVER = multiprocessing.get_context("forkserver")
PRELOAD = [
    "torch", "transformers", "transformers.models.qwen3.modeling_qwen3", "numcodecs.blosc", "dflash.cli",
    "dflash.data.prepare", "dflash.data.sources", "dflash.extract.run", "soak",
]  # fmt: skip
FRESH = 0.15  # share of the rounds in which the kill does not wait for the first write
CREATION = 4  # kills of a store's first worker at any time since its start
LONGEST = 0.25  # seconds from the first write to the kill, at most
TERM = 0.15  # share of SIGTERM among the signals


@dataclass(frozen=True)
class Case:
    """A kind of store."""

    buckets: str
    storage: str
    labels: str
    documents: int
    shard_tokens: int = 192  # padded tokens a shard, so that a small store has many

    @property
    def longest(self) -> int:
        return int(self.buckets.rpartition(",")[2])


CASES = (
    Case("16,24,48", "bf16", "argmax", 900),
    Case("32,96", "int8", "topk:3", 500),
    Case("20,50", "lz4", "last-hidden", 700),
    Case("64", "bf16", "last-hidden", 300, 64),
)


@dataclass
class Figures:
    """What was done and what was found. `in_shard`: an unfinished shard lay in tmp/; `unindexed`: renamed, no line."""

    kills: int = 0
    terminated: int = 0
    stores: int = 0
    shards: int = 0
    starts: int = 0
    in_shard: int = 0
    unindexed: int = 0
    torn_lines: int = 0
    before_store: int = 0
    writers: set[int] = field(default_factory=set)
    seconds: float = 0.0

    def json(self) -> str:
        return json.dumps(asdict(self) | {"writers": sorted(self.writers), "seconds": round(self.seconds, 1)})


def run_command(words: list[str], shard_tokens: int, log: str) -> None:
    """In a process of its own: one dflash command, to its exit code."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from dflash import cli
    from dflash.store import layout

    layout.PADDED_TOKENS_PER_SHARD = shard_tokens
    sys.argv = ["dflash", *words]
    cli.main()


def start(words: list[str], log: Path, shard_tokens: int = 192) -> ForkServerProcess:
    SERVER.set_forkserver_preload(PRELOAD)
    process = SERVER.Process(target=run_command, args=(words, shard_tokens, str(log)))
    process.start()
    return process


def write_data(path: Path, case: Case, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for _ in range(case.documents):
            ids = rng.integers(3, 250, int(rng.integers(4, case.longest + 1))).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0, 0] + [1] * (len(ids) - 2)}) + "\n")
    return path


class Soak:
    """One store under fire."""

    def __init__(self, folder: Path, target: Path, case: Case, dice: random.Random, figures: Figures) -> None:
        self.folder, self.target, self.case, self.dice, self.figures = folder, target, case, dice, figures
        self.store = folder / "store"
        self.data = write_data(folder / "data.jsonl", case, dice.randrange(1 << 30))
        self.left: dict[int, set[int]] = {}  # per worker what lay in tmp/ when it was started, as inodes

    def words(self, store: Path, worker: int, workers: int) -> list[str]:
        return [
            "extract", "--target", str(self.target), "--data", str(self.data), "--store", str(store),
            "--num-taps", "2", "--device", "cpu", "--threads", "1", "--holdout", "0.05", "--forward-tokens", "96",
            "--buckets", self.case.buckets, "--storage", self.case.storage, "--labels", self.case.labels,
            "--worker", f"{worker}/{workers}", "--json",
        ]  # fmt: skip

    def start(self, store: Path, worker: int, workers: int) -> ForkServerProcess:
        self.figures.starts += 1
        self.left[worker] = set()
        self.left[worker] = self.unfinished(worker)
        return start(self.words(store, worker, workers), self.folder / f"w{worker}.log", self.case.shard_tokens)

    def complete(self, store: Path) -> None:
        process = self.start(store, 0, 1)
        process.join()
        assert process.exitcode == 0, (self.folder / "w0.log").read_text()[-2000:]

    def run(self, kills: int) -> None:
        """Kill until the store is complete or `kills` are done, finish, compare."""
        enough = self.figures.kills + kills
        for _ in range(min(kills, CREATION)):
            process = self.start(self.store, 0, 1)
            time.sleep(self.dice.uniform(0, 1.5))
            self.kill(process, 0)
            self.check_between()
        while self.figures.kills < enough and not self.is_complete():
            self.round(min(enough - self.figures.kills, self.dice.randint(2, 8)))
            self.check_between()
        self.complete(self.store)
        self.complete(self.folder / "unbroken")
        check_whole(self.store, self.folder / "unbroken")
        self.figures.stores += 1
        self.figures.shards += len(list((self.store / "shards").glob("*/*.zarr")))

    def round(self, kills: int) -> None:
        """Some writers at once; one after the other is struck and started again; in the end all are killed."""
        workers = self.dice.randint(1, 4)
        self.figures.writers.add(workers)
        processes = {i: self.start(self.store, i, workers) for i in range(workers)}
        for _ in range(kills):
            victim = self.dice.choice([i for i, p in processes.items() if p.is_alive()] or [0])
            if not self.wait(processes[victim], victim):
                break  # it had nothing to write any more
            if self.strike(processes[victim], victim):
                processes[victim] = self.start(self.store, victim, workers)
        for number, process in processes.items():
            self.kill(process, number)

    def wait(self, process: ForkServerProcess, worker: int) -> bool:
        """Until the worker has begun to write, and a random moment longer; false when it has ended."""
        if self.dice.random() < FRESH:
            time.sleep(self.dice.uniform(0, 1.0))
            return process.is_alive()
        before, deadline = self.lines(worker), time.monotonic() + 60
        while process.is_alive() and not self.unfinished(worker) and self.lines(worker) == before:
            assert time.monotonic() < deadline, f"worker {worker} does not begin to write"
            time.sleep(0.002)
        time.sleep(self.dice.uniform(0, LONGEST))
        return process.is_alive()

    def unfinished(self, worker: int) -> set[int]:
        """Shards in tmp/ that the worker has begun since its start."""
        found = set()
        for path in (self.store / "tmp").glob(f"*-w{worker:03d}"):
            with suppress(FileNotFoundError):
                found.add(path.stat().st_ino)
        return found - self.left[worker]

    def lines(self, worker: int) -> int:
        with suppress(FileNotFoundError):
            return (self.store / f"index/w{worker:03d}.jsonl").stat().st_size
        return -1

    def strike(self, process: ForkServerProcess, worker: int) -> bool:
        if self.dice.random() >= TERM:
            return self.kill(process, worker)
        process.terminate()
        process.join()
        # 143 by our own handling, 0 when the last shard had just been made, -15 before the command had begun
        assert process.exitcode in (143, 0, -signal.SIGTERM), self.log(worker)
        self.figures.terminated += process.exitcode == 143
        assert not self.unfinished(worker), "a worker that was asked to stop leaves nothing half-made"
        return True

    def kill(self, process: ForkServerProcess, worker: int) -> bool:
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0, self.log(worker)
            return False
        self.figures.kills += 1
        self.figures.in_shard += bool(self.unfinished(worker))
        self.figures.before_store += self.store.exists() and not (self.store / "store.json").exists()
        return True

    def log(self, worker: int) -> str:
        return (self.folder / f"w{worker}.log").read_text()[-3000:]

    def is_complete(self) -> bool:
        from dflash.store import Store

        return (self.store / "store.json").exists() and not Store.open(self.store).missing()

    def check_between(self) -> None:
        """All writers are dead: what is in the index is whole, and the rest is what a crash may leave."""
        from dflash.store import verify

        if not (self.store / "store.json").exists():
            return
        allowed = {"torn": "torn_lines", "on disk but not in the index": "unindexed"}
        for problem in verify(self.store)["problems"]:
            (kind,) = [name for name in allowed if name in problem["problem"]] or [None]
            assert kind is not None, problem
            setattr(self.figures, allowed[kind], getattr(self.figures, allowed[kind]) + 1)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def check_whole(store: Path, unbroken: Path) -> None:
    """Nothing lost, doubled, left over or different."""
    from dflash.store import Store, verify
    from dflash.store.index import decode_line

    result = verify(store)
    assert result["ok"], result["problems"]
    assert result["missing"] == []
    ours, theirs = files_of(store), files_of(unbroken)
    kept = ("shards/", "docs/", "target/", "plan.npz", "store.json", "calib.safetensors")
    for name in sorted(ours.keys() | theirs.keys()):
        if name.startswith(kept):
            assert ours.get(name) == theirs.get(name), f"{name} differs from the unbroken run's"
        else:
            assert name.startswith("index/w"), f"{name} was left behind"
    opened, documents = Store.open(store), []
    for bucket, number in opened.shards():
        manifest = json.loads((store / f"shards/{bucket}/s{number:06d}.zarr/zarr.json").read_text())
        documents += manifest["attributes"]["documents"]
    assert sorted(documents) == list(range(len(opened.documents))), "a document is lost or doubled"
    lines = [line for name in ours if name.startswith("index/") for line in ours[name].splitlines()]
    entries = [decode_line(line) or {} for line in lines]
    assert all(entries), "an index line is damaged"
    # A worker that starts may adopt what another has renamed and is about to write the line of: then there are two.
    said = {(e["bucket"], e["number"], json.dumps({**e, "worker": 0})) for e in entries}
    assert len({shard[:2] for shard in said}) == len(said) == len(opened.shards()), "index lines disagree"


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dflash-soak-"))
    yield folder
    shutil.rmtree(folder)  # not on failure: then it is the evidence


def soak(kills: int, seed: int, target: Path, folder: Path, cases: tuple[Case, ...] = CASES) -> Figures:
    """Stores of every case in turn, until `kills` processes were killed."""
    dice, figures, begun, number = random.Random(seed), Figures(), time.monotonic(), 0
    while figures.kills < kills or number < len(cases):
        one, case = folder / f"{number:03d}", cases[number % len(cases)]
        one.mkdir()
        Soak(one, target, case, dice, figures).run(max(kills - figures.kills, kills // len(cases)))
        shutil.rmtree(one)
        number += 1
        figures.seconds = time.monotonic() - begun
        print(f"{case}: {figures.json()}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    sys.path.insert(0, str(TESTS))
    from make_tiny import make_tiny

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", file=sys.stderr)
    with scratch() as folder:
        print(soak(asked.kills, asked.seed, make_tiny(folder / "target"), folder).json())


if __name__ == "__main__":
    main()
