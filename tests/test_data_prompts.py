"""Any input form is a prompt: its last user turn and what comes before it."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, make_tokenizer

from dflash.data.prompts import Prompt, read_prompts, render_prompt
from dflash.errors import DflashError

SYSTEM = {"role": "system", "content": "s"}
U1, A1, U2, A2 = (
    {"role": role, "content": text}
    for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
)


def read(folder: Path, *records: Any, limit: int | None = None) -> list[Prompt]:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_prompts([str(path)], limit)


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"prompt": "a"}, ((U1,),)),
        ({"prompt": "a", "response": "b"}, ((U1,),)),
        ({"messages": [SYSTEM, U1, A1, U2, A2]}, ((SYSTEM, U1, A1, U2),)),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ((U1,),)),
        ({"turns": ["a", "c"]}, ((U1,), (U2,))),
    ],
)
def test_forms(tmp_path: Path, record: dict[str, Any], turns: Any) -> None:
    (prompt,) = read(tmp_path, {**record, "category": "x"})
    assert prompt.turns == turns
    assert prompt.input_ids is None
    assert prompt.extra == {"category": "x"}


@pytest.mark.parametrize(
    ("record", "ids"),
    [
        ({"input_ids": [5, 6, 7]}, (5, 6, 7)),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}, (5, 6, 7)),
        ({"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 1, 0, 1, 1, 0]}, (5, 6, 7)),
    ],
)
def test_token_ids(tmp_path: Path, record: dict[str, Any], ids: Any) -> None:
    (prompt,) = read(tmp_path, record)
    assert prompt.input_ids == ids
    assert prompt.turns == ()


def test_prompts_are_numbered_and_limited(tmp_path: Path) -> None:
    prompts = read(tmp_path, *({"prompt": str(n)} for n in range(5)), limit=3)
    assert [(prompt.id, prompt.line) for prompt in prompts] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "holds no prompts"),
        ([{"prompt": "a"}, {"messages": [SYSTEM]}], "line 2: no user turn to answer"),
        ([{"text": "a"}], "line 1: no user turn to answer"),
        ([{"input_ids": [5, 6], "loss_mask": [1, 1]}], "line 1: supervised from its first token"),
    ],
)
def test_what_cannot_be_answered_is_named(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(DflashError, match=message):
        read(tmp_path, *records)


def test_a_rendered_prompt_ends_where_the_target_begins() -> None:
    tokenizer = make_tokenizer(CHATML)
    ids = render_prompt([U1, A1, U2], tokenizer, {})
    expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    assert tokenizer.decode(ids) == expected + "<|im_start|>assistant\n"


def test_the_shipped_prompts_are_many_varied_and_disjoint() -> None:
    folder = Path(__file__).parent.parent / "data"
    shipped, held_out = (read_prompts([str(folder / name)]) for name in ("quickstart.jsonl", "quickstart_eval.jsonl"))
    texts = [prompt.turns[0][0]["content"].lower() for prompt in shipped + held_out]
    assert len(shipped) >= 160
    assert len(held_out) == 8
    assert len(set(texts)) == len(texts)
    assert {prompt.extra["kind"] for prompt in held_out} == {prompt.extra["kind"] for prompt in shipped}
