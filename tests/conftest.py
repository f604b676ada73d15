"""Shared fixtures. One torch thread: test processes share two cores, and results depend on the number of threads."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny import make_tiny
from raised import WATCH, is_watching, watch

ASSETS = Path(__file__).parent / "assets"

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
torch.set_num_threads(1)
watch()


FILES: set[str] = set()  # of this session, those of pytest-xdist's workers included
WRONG: set[str] = set()  # messages that were raised and are not one sentence with place and remedy
FINDINGS: dict[str, list[str]] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every message that was raised is one sentence with place and remedy; and in a session of every test file, every
    error of the program was raised. What is not so fails the session."""
    assert is_watching(), "a test has replaced the __init__ of an error, so that errors went unseen"
    FILES.update(item.path.name for item in getattr(session, "items", ()))
    WRONG.update(WATCH.wrong())
    worker = getattr(session.config, "workeroutput", None)
    if worker is not None:
        worker["raised"], worker["files"], worker["wrong"] = WATCH.places(), sorted(FILES), sorted(WRONG)
        return
    if session.exitstatus != pytest.ExitCode.OK:
        return
    wanted = {path.name for path in Path(__file__).parent.glob("test_*.py") if not path.name.startswith("test_gpu")}
    unseen = [] if wanted - FILES else [str(site) for site in WATCH.unseen()]
    if unseen:
        FINDINGS["errors that no test raises"] = unseen
    if WRONG:
        FINDINGS["messages that are not one sentence with place and remedy"] = sorted(WRONG)
    if FINDINGS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for title, lines in FINDINGS.items():
        terminalreporter.section(f"{len(lines)} {title}", red=True)
        for line in lines:
            terminalreporter.line(line)


class Workers:
    """What pytest-xdist's workers saw."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        told = getattr(node, "workeroutput", {})
        FILES.update(told.get("files", ()))
        WRONG.update(told.get("wrong", ()))
        WATCH.merge(told.get("raised", ()))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Workers())


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power, and waiting for the disk at every small file would be half of the suite's time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


@pytest.fixture(autouse=True)
def _random_values_are_not_judged(request: pytest.FixtureRequest) -> None:
    WATCH.judged = request.node.get_closest_marker("hypothesis") is None


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """An extraction sets the number of threads; the next test starts from one again."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 6-layer Qwen3 with a byte-level tokenizer: hidden 64, vocabulary 320, tied head."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def tiny_chat() -> Path:
    """A trained 6-layer Qwen3 that answers short chats (hidden 128, vocabulary 320)."""
    return ASSETS / "tiny-chat"
