"""The lines of docs/launch.md, run as they stand there on two local processes; only paths and sizes are replaced."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_tasks import prompts

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "launch.md").read_text()
SMALL = ["--num-layers", "1", "--block-size", "4", "--steps", "2"]


def line_with(*words: str) -> str:
    """The one line of the page's blocks that holds these words."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
    found = [line.strip() for block in blocks for line in block.splitlines() if all(word in line for word in words)]
    assert len(found) == 1, (words, found)
    return found[0]


@pytest.fixture
def places(tmp_path: Path, tiny_target: Path) -> dict[str, str]:
    """What the page's paths become here."""
    chats = tmp_path / "chats.jsonl"
    answer = {"role": "assistant", "content": "one two three four"}
    chats.write_text("".join(
        json.dumps({"messages": [{"role": "user", "content": prompt}, answer]}) + "\n" for prompt in prompts(12, seed=0)
    ))  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "/models/8b": str(tiny_target), "chats.jsonl": str(chats), "/nvme/": f"{tmp_path}/", "/shared/": f"{tmp_path}/",
        "runs/first": f"{tmp_path}/run", "node0:29500": f"127.0.0.1:{port}",
    }  # fmt: skip


def start(line: str, places: dict[str, str], processes: int = 2) -> subprocess.Popen[str]:
    for name, place in places.items():
        line = line.replace(name, place)
    words = shlex.split(line.replace("--nproc-per-node 8", f"--nproc-per-node {processes}"))
    launchers = {"torchrun": ["torch.distributed.run"], "dflash": ["dflash"]}
    if words[0] in launchers:
        words = [sys.executable, "-m", *launchers[words[0]], *words[1:]]
    words += SMALL if "train" in words else ["--buckets", "64,128", "--num-taps", "3"] if "extract" in words else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(*processes: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """Output and errors of processes that must all succeed."""
    outputs = [process.communicate(timeout=240) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[:6000]
    return outputs


@pytest.mark.slow
def test_two_processes_of_one_machine_extract_and_train(places: dict[str, str], tmp_path: Path) -> None:
    ((out, errors),) = ended(start(line_with("torchrun", "extract"), places))
    assert out.count("Store complete") == 1
    assert errors.count("Warning: below 90 %") <= 1  # once, not once a process
    ((out, errors),) = ended(start(line_with("torchrun --nproc-per-node", "train"), places))
    assert out.count("Drafter trained") == 1
    assert errors.count("Mask token") == 1
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.slow
def test_workers_fill_one_store_and_two_machines_train_on_it(places: dict[str, str], tmp_path: Path) -> None:
    workers = [start(line_with(f"--worker {i}/2"), places) for i in (0, 1)]
    ended(*workers)
    ((out, _),) = ended(start(line_with("--worker 0/2").replace(" --worker 0/2", ""), places))
    assert "Store complete" in out
    line = line_with("--nnodes 2").replace("/nvme/store", "/shared/store").replace("/shared/runs", "runs")
    machines = [start(line, places, processes=1) for _ in range(2)]
    outputs = [out for out, _ in ended(*machines)]
    assert sorted("Drafter trained" in out for out in outputs) == [False, True]
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.slow
def test_a_store_is_packed_copied_and_verified(places: dict[str, str], tmp_path: Path) -> None:
    ended(start("dflash extract --target /models/8b --data chats.jsonl --store /nvme/store", places))
    (tmp_path / "nvme2").mkdir()
    elsewhere = {"/nvme2": str(tmp_path / "nvme2")} | places | {"/nvme ": f"{tmp_path} "}
    for words in (("dflash pack",), ("tar", "-cf"), ("tar", "-xf"), ("dflash verify",)):
        ((out, _),) = ended(start(line_with(*words), elsewhere))
    assert "sound" in out
