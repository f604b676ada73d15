"""bench/half_hour.py on tiny-chat: from prompts to the table, in pieces as in one go."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_stages
import numpy as np
import pytest
from _half_hour_summary import mean_of
from _stages import Done, Stages, Stopped
from bench_stages import half_hour

ROOT = Path(__file__).resolve().parents[1]
SMALLER = [
    *("--set", "greedy=--limit 40 --max-new-tokens 32", "--set", "sampled=--limit 16 --max-new-tokens 32"),
    *("--set", "turns=--samples 16 --max-new-tokens 32"),
    *("--set", "turns-greedy=--max-new-tokens 32", "--set", "train=--steps 12 --eval-every 6 --anchors 32"),
    *("--set", "train=--token-budget 448 --batch-tokens 448", "--set", "eval=--limit 4 --max-new-tokens 32"),
    *("--set", "served=--max-new-tokens 32"),
]


def words(out: Path, recipe: str) -> list[str]:
    """The command line; same-prompts has fewer stages."""
    given = ["--recipe", recipe, "--out", str(out), "--quick"]
    pairs = zip(SMALLER[::2], SMALLER[1::2], strict=True)
    return [
        *given,
        *(each for pair in pairs if recipe == "best" or not pair[1].startswith(("turns", "sampled")) for each in pair),
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """A folder in which `best` was made, the stages in order, and what was printed."""
    out = tmp_path_factory.mktemp("half-hour")
    with pytest.MonkeyPatch.context() as monkeypatch:
        called = bench_stages.in_this_process(monkeypatch)
        assert half_hour.main(words(out, "best")) == 0
    return out, called, (out / "best" / "summary" / "summary.md").read_text()


def test_every_stage_is_made_once_and_in_order(made: tuple[Path, list[str], str]) -> None:
    _, called, _ = made
    assert called[:7] == [
        "greedy", "best/turns", "best/turns-greedy", "best/sampled", "best/extract", "best/train", "best/export"
    ]  # fmt: skip
    sets = [f"best/eval_{name}-T{temperature}" for temperature in "01" for name in ("one", "two")]
    assert called[7:13] == [*sets[:2], "best/simulated", "best/served", *sets[2:]]
    assert called[13:] == ["best/report"]


def test_the_summary_tells_all_that_the_results_page_wants(made: tuple[Path, list[str], str]) -> None:
    out, called, text = made
    cells = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line
    }
    for name in ("eval_one", "eval_two"):
        greedy, drawn = (json.loads((out / f"best/{name}-T{t}.json").read_text())["result"] for t in "01")
        assert cells[name][1] == str(greedy["answers"]) == "4"
        assert cells[name][2].startswith(f"{greedy['acceptance_length']['pooled']:.2f} [")
        assert cells[name][4:7] == ["4", "0", "0"]
        assert cells[name][7].startswith(f"{drawn['acceptance_length']['pooled']:.2f} [")
    assert cells["average"][2].count("[") == 1
    for name in called:
        assert f"| {name} |" in text, "every stage with its seconds and its command"
    for word in (
        "start, compilation and capture",
        "anchors each, waiting for data",
        "since the first start",
    ):
        assert word in text
    about = json.loads((out / "best/summary/summary.json").read_text())
    assert about["average"]["0"]["pooled"][0] == pytest.approx(
        np.mean([about["stages"][f"best/eval_{n}-T0"]["result"]["acceptance_length"]["pooled"] for n in ("one", "two")])
    )


def test_what_validation_simulates_is_what_is_served_on_the_same_prompts(made: tuple[Path, list[str], str]) -> None:
    out, _, text = made
    about = json.loads((out / "best/summary/summary.json").read_text())["stages"]
    rows = next(e for e in about["best/simulated"]["result"]["by_category"] if e["category"] == "greedy")
    served = about["best/served"]["result"]
    assert rows["answers"] == served["answers"] > 0
    assert rows["pooled"] == served["acceptance_length"]["pooled"], "in fp32 no tie tells them apart"
    assert "simulated ÷ served 1.000" in text


def test_the_summary_is_few_small_files(made: tuple[Path, list[str], str]) -> None:
    files = list((made[0] / "best" / "summary").iterdir())
    assert {"summary.md", "summary.json", "metrics.jsonl", "log.txt", "report.html"} <= {file.name for file in files}
    assert len(files) <= 8
    assert all(file.is_file() and file.stat().st_size < 16 << 20 for file in files)


def test_what_is_done_is_not_done_again(
    made: tuple[Path, list[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, called, text = made
    again = bench_stages.in_this_process(monkeypatch)
    assert half_hour.main(words(out, "best")) == 0
    assert again == []
    assert capsys.readouterr().out.count("(done before)") == len(called)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table == [line for line in (out / "best/summary/summary.md").read_text().splitlines() if line[:1] == "|"]


def test_another_line_on_the_same_folder_is_refused_with_what_differs(
    made: tuple[Path, list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert half_hour.main([*words(made[0], "best"), "--set", "train=--steps 13"]) == 1
    assert "train.json was made with" in (said := capsys.readouterr().err)
    assert "delete it and what followed" in said


def start(out: Path, recipe: str, *more: str) -> subprocess.Popen[str]:
    line = [sys.executable, str(ROOT / "bench" / "half_hour.py"), *words(out, recipe), *more]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    while not what():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_stopped_in_training_it_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    more = ("--set", "train=--steps 30 --eval-every 15")
    called = bench_stages.in_this_process(monkeypatch)
    run = Stages.run

    def until(end: str) -> None:
        """What comes before the stage `end`, in this process."""

        def run_until(stages: Stages, name: str, *rest: str) -> Done:
            if name.endswith(end):
                raise Stopped("here")
            return run(stages, name, *rest)

        monkeypatch.setattr(Stages, "run", run_until)
        assert half_hour.main([*words(out, "same-prompts"), *more]) == 75

    until("train")
    assert called == ["greedy", "same-prompts/extract"]

    process = start(out, "same-prompts", *more)
    wait_for((out / "same-prompts/run/checkpoints/step-000000").exists, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()
    assert process.returncode == 75, said
    assert "stopped by SIGTERM; the same line goes on" in said[1]
    assert said[0].count("(done before)") == 2
    assert json.loads((out / "same-prompts/train.cut").read_text())["parts"] == 1
    assert "the same command resumes" in (out / "same-prompts/summary/log.txt").read_text()

    until("T0")
    assert called[2:] == ["same-prompts/train", "same-prompts/export"]
    steps = [json.loads(line) for line in (out / "same-prompts/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, 31))
    assert "the last of its 2 processes" in (out / "same-prompts/summary/summary.md").read_text()
    assert not (out / "same-prompts/train.cut").exists()


def test_a_command_is_told_to_stop_once(tmp_path: Path) -> None:
    """`timeout` tells us twice, and a command that is told twice drops what it has in hand."""
    told: list[str] = []
    stages = Stages(tmp_path, tmp_path)
    stages.running = [SimpleNamespace(terminate=lambda: told.append("stop"))]  # type: ignore[assignment]
    with stages:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert told == ["stop"]
    assert stages.why == "stopped by SIGINT"
    with pytest.raises(Stopped, match="SIGINT"):
        stages.run("next", "extract")


def test_a_command_that_fails_ends_it_with_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench_stages.in_this_process(monkeypatch)
        bad = ["--recipe", "same-prompts", "--out", str(tmp_path), "--quick", "--set", "greedy=--samples 2"]
        assert half_hour.main(bad) == 1
    said = capsys.readouterr().err
    assert said.startswith("greedy failed (exit 2):")
    assert "--samples above 1 needs --temperature" in said
    assert (tmp_path / "same-prompts/summary/summary.md").exists()


def test_an_unknown_stage_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="name one of greedy"):
        half_hour.main(["--recipe", "same-prompts", "--out", str(tmp_path), "--set", "trian=--steps 3"])


def test_a_change_takes_the_place_of_the_recipes_flag() -> None:
    found = half_hour.flags_of("same-prompts", False, ["eval=--max-new-tokens 64 --limit 3", "greedy=--limit 9"])
    assert found["eval"] == ["--max-new-tokens", "64", "--limit", "3"]
    assert found["greedy"] == ["--max-new-tokens", "192", "--batch-size", "1024", "--limit", "9"]


def test_quick_and_real_recipes_have_the_same_stages() -> None:
    for recipe in half_hour.RECIPES.values():
        assert set(recipe) <= set(half_hour.QUICK)


def test_the_average_of_independent_sets_has_the_smaller_interval() -> None:
    one = {"acceptance_length": {"pooled": 2.0}, "acceptance_length_ci": {"pooled": [1.7, 2.6]}}
    two = {"acceptance_length": {"pooled": 3.0}, "acceptance_length_ci": {"pooled": [2.6, 3.8]}}
    assert mean_of([one, two], "pooled") == (2.5, [pytest.approx(2.25), pytest.approx(3.0)])
    without = {"acceptance_length": {"pooled": 3.0}, "acceptance_length_ci": {"pooled": None}}
    assert mean_of([one, without], "pooled") == (2.5, None)


def test_user_turns_are_kept_once_finished_plain_and_new(tmp_path: Path, tiny_target: Path) -> None:
    from dflash.target import load_tokenizer

    tokenizer = load_tokenizer(tiny_target)
    start = half_hour.write_turn_start(tiny_target, tmp_path / "start.jsonl")
    begin = json.loads(start.read_text())["input_ids"]
    assert tokenizer.decode(begin) == "<|im_start|>user\n"
    turns = [
        ("What is a good name for a cat?", "stop"), ("What is a good name for a cat", "stop"), ("Too short", "stop"),
        ("Name three rivers in Spain.", "stop"), ("Dear [name], how are you?", "stop"), ("Wie heißt der Fluß?", "stop"),
        ("Tell me all about the", "length"), ("How many legs has a spider?", "stop"),
    ]  # fmt: skip
    with (tmp_path / "raw.jsonl").open("w") as raw:
        for text, finish in turns:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            mask = [0] * len(begin) + [1] * len(ids)
            raw.write(
                json.dumps({"input_ids": begin + ids, "loss_mask": mask, "sampling": {"finish": [finish]}}) + "\n"
            )
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": ["name three rivers  in Spain"]}) + "\n")
    kept = half_hour.keep_user_turns(tmp_path / "raw.jsonl", tiny_target, tmp_path / "kept", [tmp_path / "eval.jsonl"])
    found = [json.loads(line)["prompt"] for line in (tmp_path / "kept").read_text().splitlines()]
    assert found == ["What is a good name for a cat?", "How many legs has a spider?"]
    assert kept == 2


def test_held_out_conversations_of_several_turns_are_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        [("user", "a"), ("assistant", "b")],
        [("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")],
    ]
    records = [{"messages": [{"role": role, "content": text} for role, text in line]} for line in lines]
    answers = tmp_path / "greedy.jsonl"
    answers.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = SimpleNamespace(file=np.array([0, 1, 0]), line=np.array([2, 1, 1]))
    trained = SimpleNamespace(file=np.array([0]), line=np.array([9]))
    plan = SimpleNamespace(files=(str(answers), "other"), rows={"v0448": rows, "b0448": trained})
    monkeypatch.setattr("dflash.store.Store.open", lambda store: SimpleNamespace(plan=plan))
    half_hour.write_held_out(tmp_path, answers, tmp_path / "out.jsonl")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == [records[0], {"turns": ["c", "e"]}]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_half_hour_asks_for_what_it_needs(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "installed").touch()

    def make(*given: str) -> subprocess.CompletedProcess[str]:
        line = ["make", "half-hour", "INSTALLED=installed", "PYTHON=echo", *given]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})

    missing = make("TARGET=t", "PROMPTS=p", "OUT=o")
    assert missing.returncode != 0
    assert "usage: make half-hour TARGET=" in missing.stderr
    done = make("TARGET=t", "PROMPTS=p", "EVAL=a b", "OUT=o", "RECIPE=same-prompts", "ARGS=--seconds 60")
    wanted = "bench/half_hour.py --recipe same-prompts --target t --prompts p --eval a b --out o --seconds 60"
    assert wanted in done.stdout.splitlines()
