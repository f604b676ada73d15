"""`dflash report`: what runs and stores hold is on one page, nothing from outside is markup, nothing is fetched."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers_store import make_store

from dflash.cli import cli
from dflash.errors import DflashError
from dflash.report.build import report
from dflash.report.config import ReportConfig
from dflash.report.read import BINS, Series, _binned, read_run, read_store
from dflash.store import Store

NASTY = '<script>alert("x")</script>&$\\frac{1}{0}$_'
RUN_CHARTS = {"loss", "lr", "tokens_per_second", "data_wait", "acceptance", "slots", "per_slot"}
STORE_CHARTS = {"lengths", "taps"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store") / "store", documents=12, held_out=3).root


def make_run(folder: Path, store: Path | str, steps: int = 12, lr: float = 0.001, slots: int = 3) -> Path:
    """A run folder as `dflash train` leaves it."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        shares: list[float | None] = [step / steps / (slot + 1) for slot in range(slots)]
        lines.append({
            "step": step, "lr": lr, "tokens": 100, "loss": 50.0 / step, "grad_norm": 1.0, "accepted_slots": shares,
            "seconds": 0.1, "tokens_per_second": 1000.0 + step, "data_wait": 0.01,
        })  # fmt: skip
    lines[0] |= {"loss": None, "accepted_slots": [None] * slots}  # a step in which nothing was scored
    for step in (steps // 2, steps):
        per_slot = [{"slot": slot + 1, "acceptance": 0.5, "conditional": None} for slot in range(slots)]
        length = {"pooled": 1 + step / steps, "macro": 1.5}
        lines.append({"step": step, "validation": {"step": step, "acceptance_length": length, "per_slot": per_slot}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "lo')
    (folder / "config.toml").write_text(f"[train]\nstore = {json.dumps(str(store))}\nlr = {lr}\nnum_layers = 1\n")
    (folder / "environment.json").write_text('{"torch": "2.13.0", "device": "cpu"}')
    return folder


def evaluate(run: Path, name: str, pooled: float) -> None:
    """What `dflash eval --json > RUN/eval/NAME.json` leaves."""
    (run / "eval").mkdir(exist_ok=True)
    result = {"acceptance_length": {"pooled": pooled, "macro": None}, "speedup": 2.5, "answers": 7, "temperature": 0.0}
    (run / "eval" / f"{name}.json").write_text(json.dumps(result | {"identical": 6, "ties": 1, "wrong": 0}))


class Reader(HTMLParser):
    """Tags, attributes and text of a page; every tag that is opened must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def made(tmp_path: Path, *sources: Path) -> tuple[dict[str, Any], Reader]:
    result = report(ReportConfig(sources=tuple(map(str, sources)), out=str(tmp_path / "r.html")))
    return result, Reader(Path(result["page"]).read_text())


def test_a_run_shows_its_curves_its_sets_its_store_and_its_settings(tmp_path: Path, store: Path) -> None:
    run = make_run(tmp_path / "first", store)
    evaluate(run, "gsm8k", 3.25)
    result, page = made(tmp_path, run)
    assert {Path(each).stem for each in result["charts"]} == RUN_CHARTS | STORE_CHARTS | {"evaluations"}
    for each in result["charts"]:
        assert Path(each).read_bytes().startswith(b"\x89PNG")
    assert sum(tag == "svg" for tag, _ in page.tags) == len(result["charts"])
    text = "\n".join(page.text)
    for words in ("2.00", "gsm8k", "3.25", "6 identical, 1 ties, 0 wrong", "num_layers", "2.13.0", "Buckets", "b0064"):
        assert words in text, words
    assert result["stores"] == [str(store.resolve())]


def test_a_page_fetches_nothing_and_runs_nothing(tmp_path: Path, store: Path) -> None:
    _, page = made(tmp_path, make_run(tmp_path / "first", store))
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "xlink:href", "src"):
                assert (value or "").startswith("#"), (tag, value)
    source = (tmp_path / "r.html").read_text()
    assert "default-src 'none'" in source
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)


def test_what_comes_from_outside_is_text_and_never_markup(tmp_path: Path, store: Path) -> None:
    folder = NASTY.replace("/", "∕")  # a file's name takes all but the slash
    run = make_run(tmp_path / folder, store)
    other = make_run(tmp_path / "other", NASTY)
    evaluate(run, folder, 2.0)
    (run / "config.toml").write_text(f"[train]\nstore = {json.dumps(str(store))}\nmask_token = {json.dumps(NASTY)}\n")
    (run / "environment.json").write_text(json.dumps({"device": NASTY, NASTY: "x"}))
    _, page = made(tmp_path, run, other)
    assert "script" not in {tag for tag, _ in page.tags}
    assert any(NASTY in text for text in page.text)
    assert any(folder[:20] in text for text in page.text)


def test_runs_side_by_side_share_charts_and_differing_settings_come_first(tmp_path: Path, store: Path) -> None:
    runs = [make_run(tmp_path / name, store, lr=lr) for name, lr in (("a", 0.001), ("b", 0.002), ("c/a", 0.001))]
    result, page = made(tmp_path, *runs)
    assert {Path(each).stem for each in result["charts"]} == (RUN_CHARTS - {"slots"} | STORE_CHARTS) | {
        "slots_0", "slots_1", "slots_2"
    }  # fmt: skip
    source = (tmp_path / "r.html").read_text()
    differing = re.findall(r'<tr class="differs"><td>(\w+)</td>', source)
    assert differing == ["lr"]
    assert str(tmp_path / "c" / "a") in page.text  # two runs named `a` are told apart
    assert len(result["stores"]) == 1


def test_a_store_alone_is_shown_and_not_written_to(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(store.rglob("*"))
    result = report(ReportConfig(sources=(str(store),)))
    assert result["page"] == "report.html"
    assert {Path(each).stem for each in result["charts"]} == STORE_CHARTS
    assert sorted(store.rglob("*")) == before


def test_a_run_gets_its_page_beside_it_and_a_store_that_is_gone_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", tmp_path / "gone")
    result = report(ReportConfig(sources=(str(run),)))
    assert result["page"] == str(run / "report.html")
    assert result["stores"] == []
    assert (run / "report" / "loss.png").exists()


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", "gone")
    for step, layers in (("999999", 1), ("1000000", 2)):
        folder = run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"drafter": {"num_layers": layers}}))
    assert read_run(run).drafter == {"num_layers": 2}


def test_a_run_that_has_just_begun_is_a_page_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", "gone")
    (run / "metrics.jsonl").write_text("")
    result, page = made(tmp_path, run)
    assert result["charts"] == []
    assert "Configuration" in page.text


def test_an_incomplete_store_shows_what_it_has(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", documents=12, held_out=0, fill=False)
    result, page = made(tmp_path, store.root)
    assert {Path(each).stem for each in result["charts"]} == {"lengths"}
    assert "shards missing" in page.text


def test_bins_are_means_with_their_range_and_leave_out_what_is_not_finite() -> None:
    rng = np.random.default_rng(0)
    value = rng.random(5 * BINS)
    value[::7] = np.nan
    found = _binned(np.arange(len(value), dtype=np.float64), value)
    assert len(found.step) == BINS
    kept = np.flatnonzero(np.isfinite(value))
    parts = np.array_split(kept, [int(len(kept) * i / BINS) for i in range(1, BINS)])
    np.testing.assert_allclose(found.mean, [value[part].mean() for part in parts])
    np.testing.assert_allclose(found.step, [part.mean() for part in parts])
    np.testing.assert_array_equal(found.low, [value[part].min() for part in parts])
    np.testing.assert_array_equal(found.high, [value[part].max() for part in parts])


def test_few_steps_are_shown_as_they_are(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "first", "gone"))
    loss: Series = run.series["loss"]
    np.testing.assert_array_equal(loss.step, np.arange(2, 13))  # the first one scored nothing
    np.testing.assert_allclose(loss.mean, 50 / np.arange(2, 13))
    assert run.best is not None
    assert run.best["step"] == 12


def test_taps_have_the_rms_of_the_rows_read(store: Path) -> None:
    opened = Store.open(store)
    taps = read_store(store).taps
    squares = []
    for bucket, number in sorted(opened.index.entries):
        row = opened.bucket(bucket).rows_of(number)[0]
        hidden = opened.read_row(bucket, row)["hidden"][: opened.length(bucket, row)]
        squares.append(np.square((hidden.astype(np.uint32) << 16).view(np.float32).reshape(-1, 3, 64)))
    assert len(squares) <= 8
    expected = np.sqrt(np.concatenate(squares).mean(axis=(0, 2)))
    np.testing.assert_allclose([each["rms"] for each in taps], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: shutil.rmtree(run), "neither a run .* nor a store"),
        (lambda run: (run / "eval" / "x.json").write_text("{}"), r"x\.json is no result of `dflash eval --json`"),
        (lambda run: (run / "eval" / "x.json").write_text("{"), r"x\.json is not valid JSON"),
    ],
)
def test_what_cannot_be_shown_is_named(tmp_path: Path, spoil: Any, words: str) -> None:
    run = make_run(tmp_path / "first", "gone")
    evaluate(run, "x", 1.0)
    spoil(run)
    with pytest.raises(DflashError, match=words):
        report(ReportConfig(sources=(str(run),)))


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", documents=12, held_out=0)
    hidden = sorted((store.root / "shards").rglob("s000000.zarr/hidden/c.0.0.0"))[0]
    hidden.write_bytes(hidden.read_bytes()[:-4096])
    with pytest.raises(DflashError, match="hidden of shard b0064/s000000"):
        report(ReportConfig(sources=(str(store.root),), out=str(tmp_path / "r.html")))


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DflashError, match="pip install matplotlib"):
        report(ReportConfig(sources=(str(make_run(tmp_path / "first", "gone")),)))


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ReportConfig(sources=(str(make_run(tmp_path / "first", "gone")),), out=str(tmp_path / "file" / "r.html"))
    with pytest.raises(DflashError, match=r"file/r cannot be made .*name another page with --out"):
        report(config)


@pytest.mark.parametrize(
    ("words", "message"), [(["a"] * 9, "1 to 8 runs"), (["a", "--out", "r.txt"], r"r\.txt is no name of a page")]
)
def test_settings_that_cannot_be_are_usage_errors(words: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["report", *words])
    assert result.exit_code == 2
    assert re.search(message, result.stderr)


def test_the_command_prints_where_the_page_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", "gone")
    result = CliRunner().invoke(cli, ["report", str(run)], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"Report written: {run}/report.html" in result.stdout
    as_json = CliRunner().invoke(cli, ["report", str(run), "--json"], catch_exceptions=False)
    assert json.loads(as_json.stdout)["page"] == str(run / "report.html")
