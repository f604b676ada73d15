"""The command line: flags, exit codes, what goes to stdout and what to stderr."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from helpers_store import make_store

from dflash.cli import cli
from dflash.cli.options import ConfigCommand, spread, to_json
from dflash.config import REQUIRED, setting, to_toml
from dflash.errors import DflashError, DiskFullError, Interrupted

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("extract", "train", "export", "eval", "regenerate", "inspect-shard", "verify", "report", "pack", "doctor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class First:
    store: str = setting(REQUIRED, "Where it lies.")
    layers: tuple[int, ...] | None = setting(None, "Which layers.")
    lr: float = setting(6e-4, "Peak learning rate.")
    seed: int = setting(7, "The seed.")
    loss: str = setting("ce", "Which loss.", choices=("ce", "kl"))
    dry_run: bool = setting(False, "Only look.")

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise DflashError(f"--lr must be above 0, not {self.lr}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Second:
    data: tuple[str, ...] = setting(REQUIRED, "Files.")
    seed: int = setting(7, "The seed.")
    template_args: dict[str, Any] = setting({}, "Arguments.")
    limit: int | None = setting(None, "How many.")


def run(arguments: list[str], function: Callable[..., dict[str, Any]] | None = None) -> tuple[Result, list[Any]]:
    """Run a command of both configs named `train`; gives the result and the configs that it was called with."""
    called: list[Any] = []

    def callback(*configs: Any) -> dict[str, Any]:
        called.extend(configs)
        return function(*configs) if function else {"ok": True, "n": 1}

    command = ConfigCommand(
        "train",
        callback=callback,
        configs=(First, Second),
        present=lambda result, *configs: f"for people: {result['n']}",
        example="dflash train …",
        help="Does it.",
    )
    return CliRunner().invoke(command, arguments), called


def test_flags_reach_both_configs_in_their_types() -> None:
    line = "--store s --data a b --layers 1,9,17 --lr 1e-3 --loss kl --dry-run --seed 3 --data c --limit 5"
    result, (first, second) = run([*line.split(), "--template-args", '{"x": [1]}'])
    assert result.exit_code == 0, result.output
    assert first == First(store="s", layers=(1, 9, 17), lr=1e-3, seed=3, loss="kl", dry_run=True)
    assert second == Second(data=("a", "b", "c"), seed=3, template_args={"x": [1]}, limit=5)
    assert result.stdout == "for people: 1\n"


def test_flags_win_over_toml_even_when_they_equal_the_default(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('[train]\nstore = "t"\ndata = ["d"]\nlr = 0.5\nseed = 9\ndry-run = true\n[extract]\nlayers = [1]\n')
    _, (first, second) = run(["--config", str(file), "--seed", "7", "--no-dry-run"])
    assert first == First(store="t", lr=0.5, seed=7)
    assert second == Second(data=("d",), seed=7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data a", "Missing option --store; give it: Where it lies."),
        ("--store s", "Missing option --data; give it: Files."),
        ("--store s --data", "--data"),
        ("--store s --data a --lr fast", '--lr must be a number, not "fast"'),
        ("--store s --data a --lr 0", "--lr must be above 0"),
        ("--store s --data a --layers 1,x", '--layers must be a whole number, not "x"'),
        ("--store s --data a --loss kll", "did you mean kl?"),
        ("--store s --data a --template-args [1]", "--template-args must be a JSON object"),
        ("--store s --data a --stroe t", "--stroe"),
        ("--store s --data a --config absent.toml", "absent.toml cannot be read"),
        ("stray --store s --data a", "stray"),
    ],
)
def test_usage_errors_leave_with_2_and_name_the_flag(arguments: str, words: str) -> None:
    result, called = run(arguments.split())
    assert result.exit_code == 2
    assert not called
    assert words in result.stderr
    assert result.stdout == ""


def raising(error: BaseException) -> Callable[..., dict[str, Any]]:
    def function(*configs: Any) -> dict[str, Any]:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (DflashError("chats.jsonl:3 is not JSON; mend the line."), 1, "chats.jsonl:3 is not JSON; mend the line."),
        (DiskFullError("The disk is full."), 28, "The disk is full."),
        (Interrupted("Stopped: 3 shards are kept."), 130, "3 shards are kept"),
        (Interrupted("Stopped: 3 shards are kept.", signal.SIGTERM), 143, "3 shards are kept"),
        (KeyboardInterrupt(), 130, "Stopped by SIGINT; run"),
        (OSError(28, "No space left on device", "/nvme/x"), 28, "/nvme/x"),
        (PermissionError(13, "Permission denied", "/nvme/x"), 1, "/nvme/x cannot be used: Permission denied"),
        (FileExistsError(17, "File exists", "runs/r"), 1, "runs/r cannot be used: File exists; name another place"),
        (NotADirectoryError(20, "Not a directory", "f/r"), 1, "f/r cannot be used: Not a directory; name another"),
        (
            OSError(5, "Input/output error", "/nvme/x"),
            1,
            "/nvme/x cannot be used: Input/output error; look at the disk",
        ),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_known_errors_are_one_line_on_stderr(error: BaseException, code: int, words: str, as_json: bool) -> None:
    result, _ = run(["--store", "s", "--data", "a", *(["--json"] if as_json else [])], raising(error))
    assert result.exit_code == code
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a bug"), FileNotFoundError(2, "none", "x")])
def test_what_is_not_known_keeps_its_traceback(error: Exception) -> None:
    result, _ = run(["--store", "s", "--data", "a"], raising(error))
    assert result.exception is error


def test_a_result_that_is_not_ok_is_printed_and_leaves_with_1() -> None:
    result, _ = run(["--store", "s", "--data", "a", "--json"], lambda *_: {"ok": False, "problems": [1]})
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"ok": False, "problems": [1]}


def test_only_the_first_rank_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result, called = run(["--store", "s", "--data", "a", "--json"])
    assert (result.exit_code, result.stdout, len(called)) == (0, "", 2)


def test_json_has_no_nan_and_knows_numpys_scalars() -> None:
    import numpy as np

    value = {"a": float("nan"), "b": [np.float32(0.5), np.int64(3)], "c": (float("inf"), True, None), 1: Path("x")}
    assert json.loads(to_json(value)) == {"a": None, "b": [0.5, 3], "c": [None, True, None], "1": "x"}


def test_print_config_is_toml_that_says_the_same(tmp_path: Path) -> None:
    arguments = ["--store", "s", "--data", "a", "b", "--layers", "1,2", "--lr", "0.25"]
    result, called = run([*arguments, "--print-config"])
    assert (result.exit_code, called) == (0, [])
    file = tmp_path / "f.toml"
    file.write_text(result.stdout)
    assert run(["--config", str(file)])[1] == run(arguments)[1]
    assert "# store must be given" in run(["--print-config"])[0].stdout


@pytest.mark.parametrize(
    ("arguments", "spread_out"),
    [
        ("--data a b --store s c", "--data a --data b --store s c"),
        ("--data=a b", "--data=a --data b"),
        ("--data --store s", "--data --store s"),
        ("x --data a -- b", "x --data a -- b"),
        ("--data", "--data"),
        ("--data - a", "--data - --data a"),
    ],
)
def test_several_values_after_one_flag(arguments: str, spread_out: str) -> None:
    assert spread(arguments.split(), {"--data"}) == spread_out.split()


def test_help_names_every_setting_with_its_default_and_an_example() -> None:
    text = run(["-h"])[0].stdout
    assert "--lr X" in text
    assert "[default: 0.0006]" in text
    assert "[required]" in text
    assert "--dry-run " in text
    assert "--no-dry-run" not in text
    assert "Example:\n    dflash train" in text


# --- the commands themselves ---------------------------------------------------------------------------------------


def test_the_commands_are_the_documented_ones() -> None:
    assert set(COMMANDS) <= set(cli.commands)


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "-h"], terminal_width=100)
    assert result.exit_code == 0
    assert cli.commands[name].help, f"{name} is missing its help"
    assert f"Example:\n    dflash {name} " in result.stdout
    assert "--json" in result.stdout
    assert "--config F.toml" in result.stdout


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_example_parses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = cli.commands[name]
    assert isinstance(command, ConfigCommand)
    called: list[Any] = []
    monkeypatch.setattr(command, "callback", lambda *configs: called.extend(configs) or {})
    example = command.epilog.split("dflash ")[1].split()
    result = CliRunner().invoke(cli, [*example, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert [type(config) for config in called] == list(command.configs)


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_reads_its_section_of_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its example as a file, sections of other commands beside it; and a misspelt key names the nearest."""
    command = cli.commands[name]
    assert isinstance(command, ConfigCommand)
    called: list[Any] = []
    monkeypatch.setattr(command, "callback", lambda *configs: called.extend(configs) or {})
    words = command.epilog.split("dflash ")[1].split()
    CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    given, file = list(called), tmp_path / "all.toml"
    called.clear()
    file.write_text(to_toml(name, *given) + "[regenerate]\nseed = 7\n" * (name != "regenerate"))
    assert CliRunner().invoke(cli, [name, "--config", str(file), "--json"]).exit_code == 0
    assert called == given
    key = next(iter(command.settings))
    file.write_text(f"[{name}]\n{key}x = 1\n")
    result = CliRunner().invoke(cli, [name, "--config", str(file)])
    assert result.exit_code == 2
    assert f"all.toml [{name}] has no setting '{key}x'; did you mean {key}?" in result.stderr


def test_a_flag_wins_over_the_setting_that_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(cli.commands["train"], "callback", lambda *configs: called.extend(configs) or {})
    file = tmp_path / "f.toml"
    file.write_text('[train]\nstore = "s"\nrun = "r"\nepochs = 6\n')
    line = ["train", "--config", str(file), "--json"]
    assert CliRunner().invoke(cli, [*line, "--steps", "3"]).exit_code == 0
    assert (called[0].steps, called[0].epochs) == (3, None)
    both = CliRunner().invoke(cli, [*line, "--steps", "3", "--epochs", "2"])
    assert (both.exit_code, "give one of them" in both.stderr) == (2, True)


def test_print_config_shows_every_setting_of_train_below_one_line_that_explains_it() -> None:
    result = CliRunner().invoke(cli, ["train", "--store", "s", "--run", "r", "--print-config"], catch_exceptions=False)
    head, *rest = result.stdout.splitlines()
    assert head == "[train]"
    known = list(cli.commands["train"].settings.values())
    assert len(rest) == 2 * len(known)
    for one, help, value in zip(known, rest[::2], rest[1::2], strict=True):
        assert help == f"# {one.help}"
        assert value.startswith((f"{one.name} = ", f"# {one.name} is not set"))


def test_the_config_of_a_run_repeats_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "store", documents=12, held_out=3)
    line = "train --store store --run one --num-layers 1 --block-size 4 --steps 3 --mask-token 7 --lr 1e-3 --json"
    first = CliRunner().invoke(cli, line.split(), catch_exceptions=False)
    again = CliRunner().invoke(
        cli, ["train", "--config", "one/config.toml", "--run", "two", "--json"], catch_exceptions=False
    )
    assert (first.exit_code, again.exit_code) == (0, 0), again.output
    assert json.loads(again.stdout)["loss"] == json.loads(first.stdout)["loss"]
    weights = [
        (tmp_path / run / "checkpoints" / "step-000003" / "model.safetensors").read_bytes() for run in ("one", "two")
    ]
    assert weights[0] == weights[1]
    resumed = CliRunner().invoke(cli, ["train", "--config", "one/config.toml", "--json"], catch_exceptions=False)
    assert "one is complete" in resumed.stderr


@pytest.mark.parametrize(
    "line",
    [
        "regenerate --data absent.jsonl --target absent --out o.jsonl",
        "extract --target absent --data absent.jsonl --store s",
        "train --store absent --run r",
        "export absent",
        "eval --drafter absent --target absent --prompts absent.jsonl",
        "inspect-shard absent",
        "verify absent",
        "report absent",
        "pack absent out",
    ],
)
def test_what_is_not_there_is_one_sentence_and_exit_code_1(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, [*line.split(), "--json"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "absent" in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not list(tmp_path.iterdir())


def test_json_is_alone_on_stdout_whatever_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(config: Any) -> dict[str, Any]:
        print("a library's banner")
        os.write(1, b"a banner from C\n")
        click.echo("progress")
        return {"steps": 3, "loss": 1.5}

    monkeypatch.setitem(sys.modules, "dflash.train.run", types.SimpleNamespace(train=noisy))
    result = CliRunner().invoke(cli, ["train", "--store", "s", "--run", "r", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"steps": 3, "loss": 1.5}
    assert len(result.stdout.splitlines()) == 1
    assert "a library's banner" in result.stderr


def test_the_banner_of_c_code_is_kept_off_stdout() -> None:
    code = (
        "import os; from dflash.cli.options import stdout_to_stderr\n"
        "with stdout_to_stderr(): os.write(1, b'banner'); print('word')\n"
        "print('result')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "result\n"
    assert "banner" in done.stderr
    assert "word" in done.stderr


def python_m_dflash(*arguments: str, importtime: bool = False) -> subprocess.CompletedProcess[str]:
    options = ["-X", "importtime"] if importtime else []
    line = [sys.executable, *options, "-m", "dflash", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("dflash insp", ["plain,inspect-shard"]),
        ("dflash train --num-l", ["plain,--num-layers"]),
        ("dflash train --loss ce-", ["plain,ce-tokens"]),
        ("dflash train --store s", ["file,s"]),  # the shell lists what is there
        ("dflash report run", ["file,run"]),
        ("dflash verify --config f", ["file,f"]),
        ("dflash train --steps 1", []),
    ],
)
def test_a_shell_completes_commands_flags_choices_and_paths(typed: str, offered: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_DFLASH_COMPLETE": "bash_complete"}
    line = [sys.executable, "-c", "from dflash.cli import main; main()"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=os.environ | words, check=True)
    assert done.stdout.split() == offered


def test_usage_error_of_the_program_itself() -> None:
    done = python_m_dflash("trian")
    assert done.returncode == 2
    assert "No such command" in done.stderr
    assert done.stdout == ""


def test_version_names_the_libraries() -> None:
    done = python_m_dflash("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("dflash 0.")
    assert "torch 2." in done.stdout
    assert "zarr 3." in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["train", "-h"], ["extract", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    done = python_m_dflash(*arguments, importtime=True)
    assert done.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "dflash.train.config" in loaded  # the list is read rightly: what is there is seen
    assert not loaded & {"torch", "transformers", "zarr", "numpy", "rich"}


def test_help_answers_in_half_a_second() -> None:
    times = []
    for _ in range(3):  # the best of three: this machine may have other work
        start = time.perf_counter()
        python_m_dflash("--help")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5
