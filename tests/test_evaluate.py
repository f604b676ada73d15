"""`dflash eval` on tiny targets: figures, comparisons, turns, wrong pairs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.checkpoint import Origin, load_drafter, write_drafter
from dflash.data.prompts import read_prompts, render_prompt
from dflash.drafter import Drafter, DrafterConfig, initialise
from dflash.errors import DflashError
from dflash.evaluate.config import EvalConfig
from dflash.evaluate.run import evaluate

VECTORS = Path(__file__).parent / "assets" / "vectors"
CASES = json.loads((VECTORS / "speculative_decoding.json").read_text())


def run(tmp_path: Path, lines: list[dict], **changes: Any) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {
        "drafter": str(VECTORS / "drafter"), "target": str(VECTORS / "target"), "prompts": (str(prompts),),
        "max_new_tokens": 64, "details": True,
    }  # fmt: skip
    return evaluate(EvalConfig(**(fields | changes)), read_prompts, render_prompt)


@pytest.fixture(scope="module")
def chat_drafter(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained drafter of tiny-chat."""
    folder = tmp_path_factory.mktemp("drafter")
    config = DrafterConfig(
        hidden_size=128, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
        rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=2048, vocab_size=320,
        block_size=4, taps=(1, 2), num_target_layers=6, mask_token_id=259,
    )  # fmt: skip
    drafter = Drafter(config)
    initialise(drafter, seed=0)
    write_drafter(folder, config, dict(drafter.named_parameters()), "float32")
    return folder


@pytest.mark.parametrize("batch_size", [1, 4])
def test_token_prompts_give_the_public_references_answers(tmp_path: Path, batch_size: int) -> None:
    result = run(tmp_path, [{"input_ids": case["prompt"]} for case in CASES], batch_size=batch_size)
    for response, case in zip(result["responses"], CASES, strict=True):
        assert response["prompt_ids"] + response["output_ids"] == case["output"]
        lengths = response["acceptance_lengths"]
        assert lengths[:-1] == case["acceptance_lengths"][: len(lengths) - 1]
    assert (result["identical"], result["ties"], result["wrong"]) == (len(CASES), 0, 0)
    assert result["lossless"] is True
    cycles = [response["acceptance_lengths"] for response in result["responses"]]
    assert result["acceptance_length"]["pooled"] == pytest.approx(sum(map(sum, cycles)) / sum(map(len, cycles)))
    means = [sum(lengths) / len(lengths) for lengths in cycles]
    assert result["acceptance_length"]["macro"] == pytest.approx(sum(means) / len(means))
    assert [slot["slot"] for slot in result["per_slot"]] == list(range(1, 8))
    assert result["per_slot"][0]["acceptance"] > result["per_slot"][6]["acceptance"]
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["baseline_tokens_per_second"])


def test_turns_are_played_with_the_targets_answers_between(tmp_path: Path, tiny_chat: Path, chat_drafter: Path) -> None:
    lines = [
        {"turns": ["Count from 3 to 8.", "Say dog two times.", "Print a loop to 3."]},
        {"prompt": "Tell me about the red cat."},
    ]
    result = run(tmp_path, lines, target=str(tiny_chat), drafter=str(chat_drafter), max_new_tokens=40)
    assert result["prompts"] == 2
    assert result["answers"] == len(result["responses"]) == 4
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    text = [tokenizer.decode(response["prompt_ids"]) for response in result["responses"]]
    answers = [tokenizer.decode(r["output_ids"], skip_special_tokens=True) for r in result["responses"]]
    third = text[2]
    assert third.index("Count from") < third.index(answers[0]) < third.index("Say dog") < third.rindex(answers[1])
    assert third.rindex(answers[1]) < third.index("Print a loop")
    assert result["wrong"] == 0


def test_sampled_answers_are_not_compared(tmp_path: Path) -> None:
    result = run(tmp_path, [{"input_ids": CASES[0]["prompt"]}], temperature=1.0)
    assert result["lossless"] is None
    assert result["acceptance_length"]["pooled"] >= 1


def test_a_drafter_of_another_target_is_refused_with_both_sides(tmp_path: Path, tiny_chat: Path) -> None:
    with pytest.raises(DflashError, match=r"hidden size 64.*tiny-chat has 128"):
        run(tmp_path, [{"input_ids": [1, 2, 3]}], target=str(tiny_chat))


def test_other_weights_of_the_same_shape_are_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(VECTORS / "drafter", tmp_path / "drafter")
    drafter = load_drafter(VECTORS / "drafter", torch.float32)
    tensors = dict(drafter.named_parameters())
    origin = Origin(target="other", weights="0" * 64, num_target_layers=8)
    write_drafter(tmp_path / "drafter", drafter.config, tensors, "float32", origin=origin)
    run(tmp_path, [{"input_ids": CASES[0]["prompt"]}], drafter=str(tmp_path / "drafter"), limit=1)
    assert "was trained for target weights 000000000000" in capsys.readouterr().err


def test_a_prompt_longer_than_the_target_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="holds 2048"):
        run(tmp_path, [{"input_ids": [5] * 2048}])


@pytest.mark.parametrize("change", [{"limit": 0}, {"batch_size": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}])
def test_settings_out_of_range_name_their_flag(change: dict) -> None:
    base = EvalConfig(drafter="d", target="t", prompts=("p",))
    flag = next(iter(change)).replace("_", "-")
    with pytest.raises(DflashError, match=f"--{flag}"):
        replace(base, **change)
