"""Shared fixtures. One torch thread: test processes share two cores, and results depend on the number of threads."""

from pathlib import Path

import pytest
import torch
from make_tiny import make_tiny
from raised import watch

ASSETS = Path(__file__).parent / "assets"

torch.set_num_threads(1)
watch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks about the whole session comes last."""
    items.sort(key=lambda item: item.name == "test_every_error_was_triggered_by_some_test")


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
