"""Data parallel on CPU processes: the trajectory of one process, whatever the ranks hold, lose, or number."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers_store import make_store
from test_train_run import config, lines

from dflash.errors import DflashError
from dflash.train import folder
from dflash.train.config import TrainConfig
from dflash.train.folder import checkpoints
from dflash.train.order import Micro
from dflash.train.ranks import Ranks, join_ranks
from dflash.train.reader import Filler
from dflash.train.run import train
from dflash.train.runner import Eager
from dflash.train.step import Batch

#: a server that has imported what is slow once; every rank is forked from it
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dflash.train.run", "transformers.models.qwen3.modeling_qwen3"])
SECONDS = 60
Hook = Callable[[int], None]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store") / "store"
    make_store(root)
    return root


def blind(rank: int) -> None:
    """No position of the longer bucket can be an anchor."""
    fill = Filler.fill

    def without(self: Filler, slot: dict[str, Any], micro: Micro) -> Batch:
        batch = fill(self, slot, micro)
        if micro.bucket.ceiling == 96:
            batch.loss_mask.zero_()
        return batch

    Filler.fill = without  # type: ignore[method-assign]


def dies(rank: int) -> None:
    """The last rank is killed in step 6, before its reduction is done."""
    micro = Eager.micro

    def killed(self: Eager, micro_: Micro, batch: Batch, step: int) -> None:
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        micro(self, micro_, batch, step)

    Eager.micro = killed  # type: ignore[method-assign]


def stops(rank: int) -> None:
    """The last rank alone is asked to stop, in step 6; the first is slow to save it, and torchrun would kill it as soon
    as another leaves."""
    save, find, runs = folder.save_checkpoint, folder.checkpoints, []

    def slow(run: Path, step: int, *rest: Any) -> Path:
        time.sleep(2.0 if step == 6 else 0.0)
        return save(run, step, *rest)

    def leave(self: Ranks) -> None:
        if not (runs[-1] / "checkpoints" / "step-000006").is_dir():
            os._exit(77)

    folder.save_checkpoint = slow
    folder.checkpoints = lambda run: runs.append(run) or find(run)
    Ranks.leave = leave  # type: ignore[method-assign]
    micro = Eager.micro

    def asked(self: Eager, micro_: Micro, batch: Batch, step: int) -> None:
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        micro(self, micro_, batch, step)

    Eager.micro = asked  # type: ignore[method-assign]


def sees_nothing(rank: int) -> None:
    """The last rank's machine does not have the run folder."""
    if rank == 1:
        folder.checkpoints = lambda run: []


def run_rank(rank: int, world: int, port: int, settings: TrainConfig, hook: Hook | None, out: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    if hook is not None:
        hook(rank)
    try:
        out.put((rank, train(settings)))
    except DflashError as error:
        out.put((rank, str(error)))
        out.close()
        out.join_thread()
        os._exit(error.exit_code)  # a process whose peers are gone has nothing to tear down together


def run_ranks(world: int, settings: TrainConfig, hook: Hook | None = None) -> tuple[list[int], dict[int, Any]]:
    """Exit codes by rank, and what each rank that could say something returned or raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = PROCESSES.Queue()
    ranks = [PROCESSES.Process(target=run_rank, args=(r, world, port, settings, hook, out)) for r in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(SECONDS)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
    assert None not in codes, "a rank hangs"
    said = dict(out.get(timeout=SECONDS) for code in codes if code >= 0)
    return codes, said


def assert_same_trajectory(one: Path, other: Path) -> None:
    """Up to the order of fp32 sums."""
    for left, right in zip(lines(one), lines(other), strict=True):
        assert left["step"] == right["step"]
        if "validation" in left:
            continue
        assert right["anchors"] == left["anchors"]
        assert right["skipped"] == left["skipped"]
        for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
            assert (right[name] is None) == (left[name] is None)
            assert left[name] is None or right[name] == pytest.approx(left[name], rel=rel), (left["step"], name)


def test_two_ranks_follow_the_trajectory_of_one_with_uneven_rows(store: Path, tmp_path: Path) -> None:
    """20 rows a bucket in batches of 3 and 2, of two buckets: ranks hold different rows, and different numbers."""
    train(config(store, tmp_path / "one"))
    codes, said = run_ranks(2, config(store, tmp_path / "two"))
    assert codes == [0, 0]
    assert said[0]["steps"] == said[1]["steps"] == 12
    assert said[0]["ranks"] == 2
    assert_same_trajectory(tmp_path / "one", tmp_path / "two")


def test_a_rank_without_a_valid_anchor_adds_nothing_and_holds_nobody_up(store: Path, tmp_path: Path) -> None:
    codes, _ = run_ranks(2, config(store, tmp_path / "two"), blind)
    assert codes == [0, 0]
    fill = Filler.fill
    try:
        blind(0)
        train(config(store, tmp_path / "one"))
    finally:
        Filler.fill = fill
    assert_same_trajectory(tmp_path / "one", tmp_path / "two")
    skipped = [line["skipped"] for line in lines(tmp_path / "two") if "skipped" in line]
    assert True in skipped  # both ranks of a step were blind
    assert False in skipped


def test_after_a_rank_is_killed_the_others_say_so_and_any_number_resumes(store: Path, tmp_path: Path) -> None:
    train(config(store, tmp_path / "whole"))
    codes, said = run_ranks(2, config(store, tmp_path / "broken"), dies)
    assert codes == [1, -signal.SIGKILL]
    assert said[0].startswith("Rank 0 lost another rank")
    assert "\n" not in said[0]
    assert checkpoints(tmp_path / "broken")[-1].step == 4
    train(config(store, tmp_path / "broken"))  # alone
    assert_same_trajectory(tmp_path / "whole", tmp_path / "broken")
    newest = checkpoints(tmp_path / "broken")[-1].folder
    newest.rename(newest.with_name(".gone"))
    codes, said = run_ranks(2, config(store, tmp_path / "broken"))
    assert codes == [0, 0]
    assert_same_trajectory(tmp_path / "whole", tmp_path / "broken")


def test_a_stop_that_reaches_one_rank_stops_all_after_the_same_step(store: Path, tmp_path: Path) -> None:
    train(config(store, tmp_path / "whole"))
    codes, said = run_ranks(2, config(store, tmp_path / "broken"), stops)
    assert codes == [128 + signal.SIGTERM] * 2
    assert [text.startswith("Stopped by SIGTERM: step 6 of 12 is kept") for text in said.values()] == [True, True]
    assert checkpoints(tmp_path / "broken")[-1].step == 6
    train(config(store, tmp_path / "broken"))
    assert_same_trajectory(tmp_path / "whole", tmp_path / "broken")


def test_a_run_folder_that_not_every_rank_sees_is_refused(store: Path, tmp_path: Path) -> None:
    """A rank would begin anew and add its gradients to those of trained weights."""
    train(config(store, tmp_path / "run"))
    newest = checkpoints(tmp_path / "run")[-1].folder
    newest.rename(newest.with_name(".gone"))  # the run is at step 8
    codes, said = run_ranks(2, config(store, tmp_path / "run"), sees_nothing)
    assert codes == [1, 1]
    assert any("put it on a shared file system" in text for text in said.values())


def test_a_rank_without_a_gpu_of_its_own_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(DflashError, match=r"LOCAL_RANK is 2, but this machine has 2 GPUs; .*--nproc-per-node"):
        join_ranks()


def test_ranks_wait_for_a_long_validation_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own patience is ten minutes."""
    joined: dict[str, Any] = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **more: joined.update(more))
    assert join_ranks()[0] == Ranks(0, 2)
    assert joined["timeout"] >= timedelta(hours=1)


def test_a_number_of_ranks_that_changes_the_batch_is_refused(store: Path, tmp_path: Path) -> None:
    train(config(store, tmp_path / "run", steps=1))
    codes, said = run_ranks(3, config(store, tmp_path / "run", steps=1))
    assert codes == [1, 1, 1]
    assert "derived.micros_per_step = 2, now it is 3" in said[0]


def test_torchrun_starts_the_ranks_and_one_of_them_speaks(store: Path, tmp_path: Path) -> None:
    settings = config(store, tmp_path / "two", steps=2)
    names = ("store", "run", "num_layers", "block_size", "steps", "mask_token", "token_budget", "batch_tokens")
    words = [f"--{name.replace('_', '-')}={getattr(settings, name)}" for name in names]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--", "dflash"]
    result = subprocess.run(
        [*launch, "train", *words, "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 2
