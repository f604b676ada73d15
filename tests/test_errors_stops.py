"""What a stop by a signal says, of the commands whose own tests do not stop them: what is kept, and how to go on."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_store import make_store
from raised import complaint

from dflash.data.prompts import read_prompts, render_prompt
from dflash.errors import Interrupted
from dflash.evaluate.config import EvalConfig
from dflash.evaluate.run import evaluate
from dflash.store import pack

VECTORS = Path(__file__).parent / "assets" / "vectors"


def stopping_in(patch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """SIGTERM comes while this function of a module runs."""
    owner = sys.modules[module]
    function = getattr(owner, name)

    def stopped(*arguments: Any, **settings: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return function(*arguments, **settings)

    patch.setattr(owner, name, stopped)


def test_a_stopped_pack_keeps_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "s", documents=14)
    with monkeypatch.context() as patch:
        stopping_in(patch, "dflash.store.pack", "_check_space")
        with pytest.raises(Interrupted, match=r"SIGTERM: 0 of 6 shards are in .*; run the same command") as caught:
            pack(store.root, tmp_path / "p")
    assert complaint(str(caught.value)) is None
    assert pack(store.root, tmp_path / "p")["packed"] == 6


def test_a_stopped_evaluation_says_that_it_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = json.loads((VECTORS / "speculative_decoding.json").read_text())[0]["prompt"]
    (tmp_path / "p.jsonl").write_text(json.dumps({"input_ids": prompt}) + "\n")
    config = EvalConfig(
        drafter=str(VECTORS / "drafter"), target=str(VECTORS / "target"), prompts=(str(tmp_path / "p.jsonl"),)
    )
    stopping_in(monkeypatch, "dflash.evaluate.run", "batches")
    with pytest.raises(Interrupted, match=r"SIGTERM: nothing .* is kept; run `dflash eval` again\.") as caught:
        evaluate(config, read_prompts, render_prompt)
    assert caught.value.exit_code == 143
    assert complaint(str(caught.value)) is None
