"""`dflash eval` on tiny targets: figures, comparisons, turns, wrong pairs."""

import json
import re
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
    assert (result["identical"], result["ties"], result["wrong"]) == (None, None, None)
    assert result["acceptance_length"]["pooled"] >= 1


def test_the_figures_are_those_of_the_answers(tmp_path: Path) -> None:
    """Batched, over two categories and a file's name, with the cycles that --details shows."""
    lines = [{"input_ids": case["prompt"], "category": name} for case, name in zip(CASES, "aabb", strict=False)]
    lines += [{"input_ids": case["prompt"]} for case in CASES[4:]]
    result = run(tmp_path, lines, max_new_tokens=32)
    cycles = [response["acceptance_lengths"] for response in result["responses"]]
    everything = [length for lengths in cycles for length in lengths]
    assert result["cycles"] == len(everything)
    assert [each["cycles"] for each in result["histogram"]] == [everything.count(n) for n in range(1, 9)]
    by = {each["category"]: each for each in result["by_category"]}
    assert list(by) == ["a", "b", "prompts"]
    assert by["b"]["pooled"] == pytest.approx(sum(map(sum, cycles[2:4])) / sum(map(len, cycles[2:4])))
    low, high = result["acceptance_length_ci"]["pooled"]
    assert low < result["acceptance_length"]["pooled"] < high
    assert sum(each["cycles"] for each in result["by_context"]) == len(everything)
    assert 0 <= result["repeated_ngrams"]["share"] <= 1
    assert result["tokens"] == sum(len(response["output_ids"]) for response in result["responses"])
    assert json.loads(json.dumps(result)) == result


def test_two_drafters_are_paired_on_the_same_prompts(tmp_path: Path) -> None:
    """One is broken: it accepts almost nothing, its output is the target's all the same."""
    drafter = load_drafter(VECTORS / "drafter", torch.float32)
    with torch.no_grad():
        drafter.fc.weight.mul_(-3.0)
    (tmp_path / "broken").mkdir()
    write_drafter(tmp_path / "broken", drafter.config, dict(drafter.named_parameters()), "float32")
    lines = [{"input_ids": case["prompt"]} for case in CASES]
    alone = run(tmp_path, lines, max_new_tokens=24)
    result = run(tmp_path, lines, max_new_tokens=24, compare=str(tmp_path / "broken"))
    assert result["acceptance_length"] == alone["acceptance_length"]
    assert result["responses"] == alone["responses"]
    other = result["compare"]
    assert (other["identical"], other["lossless"]) == (len(CASES), True)
    assert other["acceptance_length"]["pooled"] < alone["acceptance_length"]["pooled"]
    difference = other["difference"]
    gap = alone["acceptance_length"]["pooled"] - other["acceptance_length"]["pooled"]
    assert difference["pooled"] == pytest.approx(gap)
    low, high = difference["pooled_ci"]
    assert 0 < low < gap < high
    assert difference["better"] > difference["equal"] + difference["worse"]
    assert sum(difference[name] for name in ("better", "equal", "worse")) == len(CASES)


# --- wrong pairs


def test_a_drafter_of_another_target_is_refused_with_both_sides(tmp_path: Path, tiny_chat: Path) -> None:
    with pytest.raises(DflashError, match=r"drafter was trained for a target with hidden size 64.*tiny-chat has 128"):
        run(tmp_path, [{"input_ids": [1, 2, 3]}], target=str(tiny_chat))


ORIGIN = Origin(target="org/mine", num_target_layers=6)
CHAT: list[dict[str, Any]] = [{"prompt": "Say dog two times."}]


def chat(tmp_path: Path, tiny_chat: Path, chat_drafter: Path, origin: Origin, **changes: Any) -> dict[str, Any]:
    """Evaluate tiny-chat's drafter as if it came from `origin`."""
    drafter = load_drafter(chat_drafter, torch.float32)
    (tmp_path / "drafter").mkdir()
    write_drafter(tmp_path / "drafter", drafter.config, dict(drafter.named_parameters()), "float32", origin=origin)
    fields = {"target": str(tiny_chat), "drafter": str(tmp_path / "drafter"), "max_new_tokens": 4}
    return run(tmp_path, CHAT, **(fields | changes))


@pytest.mark.parametrize(
    ("known", "changes", "message"),
    [
        ({"weights": "0" * 64}, {}, r"org/mine with the weights 000000000000, but .*tiny-chat has the weights \w{12};"),
        ({"tokenizer": "1" * 64}, {}, r"org/mine with the tokenizer 1{12}, but .*tiny-chat has the tokenizer"),
        ({"template": "2" * 64}, {}, "org/mine with the chat template 2{12}, but .*tiny-chat has the chat template"),
        ({"num_target_layers": 9}, {}, None),
        ({}, {"template_args": {"enable_thinking": False}}, None),  # this template does not know it: the same text
    ],
)
def test_what_the_drafter_was_not_trained_for_is_named_with_both_sides(
    tmp_path: Path, tiny_chat: Path, chat_drafter: Path, known: dict[str, Any], changes: dict[str, Any],
    message: str | None, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    origin = replace(ORIGIN, **known)
    if message is None:
        assert chat(tmp_path, tiny_chat, chat_drafter, origin, **changes)["lossless"]
        return
    with pytest.raises(DflashError, match=message) as caught:
        chat(tmp_path, tiny_chat, chat_drafter, origin, **changes)
    assert "--allow-mismatch" in str(caught.value)
    shutil.rmtree(tmp_path / "drafter")
    assert chat(tmp_path, tiny_chat, chat_drafter, origin, allow_mismatch=True, **changes)["lossless"]
    assert re.search(f"Warning: .*{message.rstrip(';')}", capsys.readouterr().err)


THINKING = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def test_thinking_on_in_the_data_and_off_here_is_refused(
    tmp_path: Path, tiny_chat: Path, chat_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on by default equals on by name, since both come to the same text."""
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    on = replace(ORIGIN, template_args={"enable_thinking": True})
    with pytest.raises(DflashError, match=r'arguments \{"enable_thinking": true\}, but here they are .*false\}'):
        chat(
            tmp_path, tiny_chat, chat_drafter, on, chat_template=str(template), template_args={"enable_thinking": False}
        )
    shutil.rmtree(tmp_path / "drafter")
    monkeypatch.setitem(CHAT[0], "template_args", {"enable_thinking": False})  # a line may bring its own
    with pytest.raises(DflashError, match=r"but here they are .*false\}"):
        chat(tmp_path, tiny_chat, chat_drafter, on, chat_template=str(template))
    monkeypatch.delitem(CHAT[0], "template_args")
    shutil.rmtree(tmp_path / "drafter")
    assert chat(tmp_path, tiny_chat, chat_drafter, on, chat_template=str(template))["lossless"]


def test_a_drafter_without_its_mask_token_is_refused(tmp_path: Path) -> None:
    shutil.copytree(VECTORS / "drafter", tmp_path / "drafter")
    document = json.loads((tmp_path / "drafter" / "config.json").read_text())
    del document["dflash_config"]["mask_token_id"]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(document))
    with pytest.raises(DflashError, match=r"drafter/config\.json: the field dflash_config\.mask_token_id is missing"):
        run(tmp_path, [{"input_ids": [1, 2, 3]}], drafter=str(tmp_path / "drafter"))


def test_ids_that_the_target_does_not_have_are_refused_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"prompts\.jsonl, line 2: the token id 99999 is none of target .* rows"):
        run(tmp_path, [{"input_ids": [5]}, {"input_ids": [5, 99_999]}])


def test_a_prompt_longer_than_the_target_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"prompts\.jsonl, line 1: .* holds 2048"):
        run(tmp_path, [{"input_ids": [5] * 2048}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": None}, "Missing option --target"),
        ({"prompts": ()}, "Missing option --prompts"),
        ({"store": "s"}, "leave out --target and --prompts"),
        ({"store": "s", "target": None, "prompts": (), "temperature": 1.0}, "leave out --temperature"),
    ],
)
def test_settings_that_do_not_go_together_say_which(change: dict, message: str) -> None:
    with pytest.raises(DflashError, match=message):
        replace(EvalConfig(drafter="d", target="t", prompts=("p",)), **change)


@pytest.mark.parametrize("change", [{"limit": 0}, {"batch_size": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}])
def test_settings_out_of_range_name_their_flag(change: dict) -> None:
    base = EvalConfig(drafter="d", target="t", prompts=("p",))
    flag = next(iter(change)).replace("_", "-")
    with pytest.raises(DflashError, match=f"--{flag}"):
        replace(base, **change)
