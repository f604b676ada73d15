"""The README against the program: every command is described, every line that it shows is one that parses."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash.cli import cli
from dflash.cli.options import ConfigCommand

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PLACEHOLDER = "…"


def shown_lines(text: str) -> list[str]:
    """`dflash …` lines of the code blocks and in back-quotes, without comments."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("dflash ")]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`(dflash [^`]+)`", prose)]
    return [line.partition("  #")[0].strip() for line in lines]


LINES = [line for line in shown_lines(README) if line.split()[1] in cli.commands and PLACEHOLDER not in line]


def test_the_readme_describes_every_command() -> None:
    for name in cli.commands:
        assert re.search(rf"`?\b(dflash|make) {name}\b", README), f"README.md does not mention {name}"


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_the_readme_shows_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = shlex.split(line)[1:]
    command = cli.commands[name]
    assert isinstance(command, ConfigCommand)
    called: list[Any] = []
    monkeypatch.setattr(command, "callback", lambda *configs: called.extend(configs) or {})
    result = CliRunner().invoke(cli, [name, *arguments], catch_exceptions=False)
    bare = not arguments  # a command named in a sentence: its required flags are not there
    assert result.exit_code == (2 if bare else 0), f"{line}\n{result.output}"


def test_every_flag_that_the_readme_names_exists() -> None:
    known = {option for command in cli.commands.values() for each in command.params for option in each.opts}
    known |= {"--version", "--nproc-per-node", "--index-url", "-h", "-m"}
    named = set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", README))
    assert len(named) > 10
    assert not named - known


def test_the_readme_names_the_two_commands_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"make ([a-z][a-z-]+)", README))
    assert {"train", "test", "extract", "install"} <= named
    assert not named - targets
