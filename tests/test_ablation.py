"""bench/ablation.py on tiny-chat: the table of what matters, whole, cut off, and with a line that fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_stages
import pytest
from _stages import Done, Stages, demo
from bench_stages import ablation

ROOT = Path(__file__).resolve().parents[1]
LINES = ["any", "greedy", "block-8"]
SEEDS = (0, 1)


def words(out: Path, *lines: str) -> list[str]:
    target, prompts, sets = demo(out)
    given = ["--target", str(target), "--prompts", str(prompts), "--eval", *map(str, sets), "--out", str(out)]
    return [*given, "--quick", "--steps", "4", "--lines", *(lines or LINES)]


def table(out: Path) -> dict[str, list[str]]:
    """Cells of each line of the table, by its name."""
    text = (out / "ablation" / "summary" / "summary.md").read_text()
    rows = [line.removeprefix("|").removesuffix("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows[2:]}


def shorter(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Less of everything; names of the stages whose commands are run."""
    monkeypatch.setitem(ablation.QUICK, "answers", "--max-new-tokens 24 --batch-size 96 --limit 24")
    monkeypatch.setitem(ablation.QUICK, "eval", "--max-new-tokens 16 --limit 4")
    return bench_stages.in_this_process(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A whole table, made in two calls: the first was stopped before the second seed of `any` was trained."""
    out = tmp_path_factory.mktemp("ablation")
    with pytest.MonkeyPatch.context() as monkeypatch:
        called = shorter(monkeypatch)
        run = Stages.run

        def stop_there(stages: Stages, name: str, *rest: str) -> Done:
            if name == "ablation/any-1/train":
                stages.stop("that is enough")
            return run(stages, name, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Stages, "run", stop_there)
            assert ablation.main(words(out)) == 0
        (out / "first").write_text(json.dumps(table(out)))
        called.append("stopped")
        assert ablation.main(words(out)) == 0
    return out, called


def test_what_a_stop_leaves_is_marked_as_not_run(made: tuple[Path, list[str]]) -> None:
    first = json.loads((made[0] / "first").read_text())
    assert list(first) == ["base", *LINES]
    assert first["any"][-1].endswith("(seed 1 not run)")
    assert first["block-8"][-1].endswith("(seed 1 not run)")
    assert first["base"][-1] == ""
    assert "[" in first["any"][1]


def test_the_same_line_goes_on_and_makes_nothing_twice(made: tuple[Path, list[str]]) -> None:
    called = made[1]
    end = called.index("stopped")
    assert len(called) == len(set(called))
    assert called[:5] == ["greedy", "sampled", "ablation/mixed", "ablation/greedy", "ablation/base-0/train"]
    assert called[end + 1] == "ablation/any-1/train"
    assert len(called) - 1 == 4 + 2 * 4 * len(table(made[0]))


def test_the_table_is_whole(made: tuple[Path, list[str]]) -> None:
    out, _ = made
    found = table(out)
    assert list(found) == ["base", *LINES]
    for name, cells in found.items():
        results = {
            t: [json.loads((out / f"ablation/{name}-{s}/T{t}.json").read_text())["result"] for s in SEEDS] for t in "01"
        }
        for t, place in (("0", 1), ("1", 3)):
            mean = sum(result["acceptance_length"]["pooled"] for result in results[t]) / 2
            assert cells[place].startswith(f"{mean:.2f} [")
            if name != "base":
                less = sum(result["compare"]["difference"]["pooled"] for result in results[t]) / 2
                assert cells[place + 1].startswith(f"{less:.2f} [")
        assert "not run" not in " ".join(cells)
        assert len(cells) == 7
    about = json.loads((out / "ablation/summary/summary.json").read_text())
    assert about["failures"] == {}
    assert len(list((out / "ablation/summary").iterdir())) <= 8


def test_a_line_has_the_bases_flags_and_behind_them_its_own(made: tuple[Path, list[str]]) -> None:
    def line(name: str, seed: int) -> list[str]:
        found: list[str] = json.loads((made[0] / f"ablation/{name}-{seed}/train.json").read_text())["words"]
        return found

    for seed in SEEDS:
        base = line("base", seed)
        assert base[base.index("--seed") + 1] == str(seed)
        for name in LINES:
            _, store, more = ablation.LINES[name]
            same = [word.replace("base-", f"{name}-").replace("store-mixed", f"store-{store}") for word in base]
            assert line(name, seed) == [*same, *more.split()]


def test_checkpoints_of_exported_runs_do_not_stay(made: tuple[Path, list[str]]) -> None:
    assert (made[0] / "ablation/any-0/drafter/model.safetensors").exists()
    assert not (made[0] / "ablation/any-0/run/checkpoints").exists()
    assert (made[0] / "ablation/any-0/run/metrics.jsonl").exists()


def test_a_line_that_fails_is_marked_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = shorter(monkeypatch)
    monkeypatch.setitem(ablation.LINES, "any", ("nonsense", "mixed", "--label-prefix all"))
    assert ablation.main([*words(tmp_path, "any", "dpace"), "--seeds", "1"]) == 1
    found = table(tmp_path)
    assert found["any"][-1] == "failed"
    assert found["dpace"][-1] in ("better", "worse", "no difference")
    assert "any-0/train failed (exit 2)" in (said := capsys.readouterr().err)
    assert "--label-prefix" in said
    assert called[-1] == "ablation/dpace-0/T1"


def test_all_lines_of_the_issue_and_their_flags_are_understood() -> None:
    from dflash.cli import cli

    stores = {store for _, store, _ in (ablation.LINES | ablation.MORE).values()}
    assert stores == set(ablation.STORES)
    for _, _, more in (ablation.LINES | ablation.MORE).values():
        line = f"--store s --run r {ablation.FLAGS['train']} {more} --print-config".split()
        assert cli.main(["train", *line], standalone_mode=False) in (0, None)
    assert len(ablation.LINES) > 12


def result(pooled: float, ends: tuple[float, float], less: tuple[float, float] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"acceptance_length": {"pooled": pooled}, "acceptance_length_ci": {"pooled": list(ends)}}
    if less is not None:
        found["compare"] = {"difference": {"pooled": sum(less) / 2, "pooled_ci": list(less)}}
    return found


@pytest.mark.parametrize(
    ("seeds", "says"),
    [
        ([(0.01, 0.2), (0.05, 0.3)], "better"),
        ([(-0.2, -0.1), (-0.3, -0.01)], "worse"),
        ([(0.01, 0.2), (-0.1, 0.1)], "no difference"),
        ([(0.01, 0.2), (-0.2, -0.1)], "no difference"),
        ([(0.01, 0.2)], "better (seed 1 not run)"),
        ([], "not run"),
    ],
)
def test_a_line_is_better_where_every_seed_says_so(seeds: list[tuple[float, float]], says: str, tmp_path: Path) -> None:
    stages = Stages(tmp_path, tmp_path)
    for seed, ends in enumerate(seeds):
        for t in ("0", "1"):
            name = f"ablation/any-{seed}/T{t}"
            stages.done[name] = Done(name, [], 1.0, 1.0, 1, result(2.0, (1.9, 2.1), ends))
    lines = {name: ablation.LINES[name] for name in ("base", "any")}
    bench = ablation.Bench(stages, lines, SEEDS, 4, 1, {}, tmp_path, tmp_path, (tmp_path / "a",))
    ablation.write_summary(bench, {})
    (row,) = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("| any |")]
    assert row.removesuffix("|").split("|")[-1].strip() == says


def test_after_the_seconds_given_what_runs_is_stopped_and_the_rest_not_begun(tmp_path: Path) -> None:
    """The command in hand for real, in its own process: it is stopped as by hand, and what follows is not begun."""
    line = [sys.executable, str(ROOT / "bench" / "ablation.py"), *words(tmp_path), "--seconds", "0.01", "--jobs", "2"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {name: cells[-1] for name, cells in table(tmp_path).items()} == dict.fromkeys(["base", *LINES], "not run")
    assert "Stopped: 0.01 s are over; the same line goes on." in done.stdout
    assert not list(tmp_path.glob("*.json"))
    # at a hundredth of a second the second command may or may not have begun
    assert 1 <= len(list(tmp_path.glob("*.cut"))) <= 2, "what was in hand was stopped"
