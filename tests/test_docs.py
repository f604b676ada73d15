"""README and docs/ against the program: every command line shown parses, every flag and every linked file exists."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash.cli import cli
from dflash.cli.options import ConfigCommand

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
GUIDES = {name: text for name, text in PAGES.items() if name not in ("log.md", "results.md", "benchmarks.md")}
PLACEHOLDER = "…"
TORCHRUN = re.compile(r"torchrun .*?-m (?:-- )?dflash ")
OTHERS = {  # flags of other programs that the pages name
    "--version", "--nproc-per-node", "--index-url", "--nnodes", "--rdzv-backend", "--rdzv-id", "--rdzv-endpoint",
    "--run-path", "--signal", "--array", "--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--level",
    "--sparse", "--speculative-config", "--model-path", "--speculative-algorithm", "--speculative-draft-model-path",
    "--num-anchors", "--json", "--help", "--config", "--print-config",
}  # fmt: skip


def shown_lines(text: str) -> list[str]:
    """`dflash …` lines of the code blocks and in back-quotes, without comments and launchers."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`((?:dflash|torchrun) [^`]+)`", prose)]
    lines = [TORCHRUN.sub("dflash ", line.removeprefix("srun ")) for line in lines]
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("dflash ")]


LINES = [
    (name, line)
    for name, text in GUIDES.items()
    for line in dict.fromkeys(shown_lines(text))
    if PLACEHOLDER not in line and line.split()[1:2] and line.split()[1] in cli.commands
]


def test_the_readme_describes_every_command() -> None:
    for name in cli.commands:
        assert re.search(rf"`?\b(dflash|make) {name}\b", README), f"README.md does not mention {name}"


@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda value: value[:60])
def test_a_line_that_a_page_shows_parses(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = shlex.split(line)[1:]
    command = cli.commands[name]
    assert isinstance(command, ConfigCommand)
    called: list[Any] = []
    monkeypatch.setattr(command, "callback", lambda *configs: called.extend(configs) or {})
    result = CliRunner().invoke(cli, [name, *arguments], catch_exceptions=False)
    # in a sentence a command may stand without the flags that it needs, never with one that it lacks
    fragment = "Missing " in result.output and f"`{line}`" in re.sub(r"\s+", " ", PAGES[page])
    assert result.exit_code == 0 or fragment, f"{page}: {line}\n{result.output}"


@pytest.mark.parametrize("page", sorted(GUIDES))
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    known = {option for command in cli.commands.values() for each in command.params for option in each.opts}
    named = set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", GUIDES[page]))
    assert not named - known - OTHERS


def test_the_flags_checked_are_many() -> None:
    assert len(LINES) > 40
    assert sum(len(re.findall(r"(?<![\w-])--[a-z]", text)) for text in GUIDES.values()) > 100


def test_the_readme_names_the_two_commands_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"make ([a-z][a-z-]+)", README))
    assert {"train", "test", "extract", "install"} <= named
    assert not named - targets


@pytest.mark.parametrize("page", sorted(PAGES))
def test_what_a_page_links_to_or_names_is_there(page: str) -> None:
    base = ROOT if page == "README.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        assert link.startswith("https://") or (base / link).exists(), f"{page} links to {link}"
    for name in re.findall(r"\b((?:docs|tests|bench|examples)/[\w.-]+\.\w+)", PAGES[page]):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert {name for name in PAGES if f"docs/{name}" in README} >= set(PAGES) - {"README.md"}


def test_the_costs_are_what_the_script_prints() -> None:
    done = subprocess.run([sys.executable, "bench/costs.py"], capture_output=True, text=True, check=True, cwd=ROOT)
    inside = PAGES["costs.md"].partition("<!-- made by bench/costs.py -->\n")[2].partition("<!-- end -->")[0]
    assert inside == done.stdout


def test_the_glossary_explains_the_words_of_the_readme() -> None:
    terms = {
        word
        for entry in re.findall(r"^- \*\*(.+?)\*\*", PAGES["glossary.md"], re.MULTILINE)
        for word in entry.split(", ")
    }
    table = README.partition("## Concepts")[2].partition("## ")[0]
    concepts = {word for entry in re.findall(r"^\| \*\*(.+?)\*\*", table, re.MULTILINE) for word in entry.split(", ")}
    assert len(concepts) > 8
    assert not {word for word in concepts if word not in terms and f"**{word}**" not in PAGES["glossary.md"]}
