"""Documents, duplicates, hold-out, buckets and the row plan; every line is accounted for."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, THINKING, make_tokenizer

from dflash.data.config import DataConfig
from dflash.data.prepare import choose_held_out, prepare, splitmix64
from dflash.errors import DflashError
from dflash.store import Documents, Plan, Prepared

TOKENIZER = make_tokenizer(CHATML)
STOP = TOKENIZER.convert_tokens_to_ids(["<|im_end|>"])


def run(folder: Path, lines: Iterable[Any], tokenizer: Any = TOKENIZER, **settings: Any) -> Prepared:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    config = DataConfig(data=(str(path),), **{"buckets": (64, 128), "holdout": 0.0, **settings})
    return prepare(config, tokenizer, folder / "out", STOP)


def pair(number: int, length: int = 5) -> dict[str, str]:
    return {"prompt": f"question {number}", "response": "x" * length + str(number)}


def all_rows(prepared: Prepared, column: str) -> list[int]:
    return sorted(value for rows in prepared.plan.rows.values() for value in getattr(rows, column).tolist())


def test_documents_and_plan_lie_in_the_folder_and_agree(tmp_path: Path) -> None:
    prepared = run(tmp_path, [pair(n, 5 + 4 * n) for n in range(20)])
    documents = Documents.open(tmp_path / "out" / "docs")
    plan = Plan.load(tmp_path / "out" / "plan.npz")
    assert plan.fingerprint() == prepared.plan.fingerprint()
    assert all_rows(prepared, "document") == list(range(20))
    for name, rows in plan.rows.items():
        for row, document in enumerate(rows.document.tolist()):
            tokens, mask = documents[document]
            assert rows.length[row] == len(tokens) <= int(name[1:])
            assert rows.supervised[row] == mask.sum() > 0
            text = TOKENIZER.decode(tokens.tolist())
            assert f"question {rows.line[row] - 1}<" in text
    assert set(plan.rows) == {"b0064", "b0128"}
    assert plan.rows["b0128"].length.min() > 64


def test_lines_are_conversations_plus_dropped(tmp_path: Path) -> None:
    lines = [
        *(pair(n) for n in range(12)),
        pair(3),  # again
        {**pair(4), "id": 9},  # again, in what counts
        "",
        "{",
        {"prompt": "unanswered"},
        {"messages": [{"role": "system", "content": "only"}]},
        {"prompt": "empty answer", "response": ""},  # one supervised token, its end
        {"prompt": "p" * 200, "response": "beyond the ceiling"},
        {"prompt": "long answer", "response": "y" * 300},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]},
    ]
    counts = run(tmp_path, lines, skip_bad=True).counts
    assert counts["dropped"] == {
        "answer_beyond_ceiling": 1,
        "bad_json": 1,
        "blank_line": 1,
        "duplicate": 2,
        "no_answer": 2,
        "too_few_supervised": 2,
    }
    assert counts["conversations"] == 13
    assert counts["lines"] == len(lines) == counts["conversations"] + sum(counts["dropped"].values())
    assert counts["truncated"] == 1


def test_a_long_document_is_cut_at_its_end_to_the_largest_ceiling(tmp_path: Path) -> None:
    prepared = run(tmp_path, [{"prompt": "p", "response": "abc" * 100}])
    tokens, mask = prepared.documents[0]
    text = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "p"}, {"role": "assistant", "content": "abc" * 100}], tokenize=False
    )
    assert tokens.tolist() == TOKENIZER(text)["input_ids"][:128]
    assert mask[-1] == 1
    assert prepared.counts["tokens"] == 128
    assert prepared.counts["supervised_tokens"] == mask.sum() == all_rows(prepared, "supervised")[0]


def test_a_document_as_long_as_a_ceiling_belongs_to_it(tmp_path: Path) -> None:
    lines = [{"input_ids": [5] * length, "loss_mask": [1] * length} for length in (2, 64, 65, 128)]
    plan = run(tmp_path, lines).plan
    assert sorted(plan.rows["b0064"].length.tolist()) == [2, 64]
    assert sorted(plan.rows["b0128"].length.tolist()) == [65, 128]


def test_token_lines_need_no_tokenizer_but_text_does(tmp_path: Path) -> None:
    tokens = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    assert run(tmp_path, [tokens], tokenizer=None).counts["documents"] == 1
    with pytest.raises(DflashError, match="line 2: it is text, but the target has no tokenizer"):
        run(tmp_path, [tokens, pair(1)], tokenizer=None)


def test_documents_of_a_conversation_that_fans_out_share_its_number(tmp_path: Path) -> None:
    def thinking(number: int) -> dict[str, Any]:
        answer = {"role": "assistant", "content": f"a{number}", "reasoning_content": "r"}
        return {"messages": [{"role": "user", "content": "q"}, answer, {"role": "user", "content": "s"}, answer]}

    prepared = run(
        tmp_path, [thinking(n) for n in range(20)], tokenizer=make_tokenizer(THINKING), holdout=0.1, buckets=(128,)
    )
    assert prepared.counts["documents"] == 40
    assert all_rows(prepared, "conversation") == sorted([*range(20)] * 2)
    assert prepared.counts["held_out"] == {"conversations": 2, "documents": 4}
    trained, held = (set(prepared.plan.rows[name].conversation.tolist()) for name in ("b0128", "v0128"))
    assert len(held) == 2
    assert not trained & held


@pytest.mark.parametrize(
    ("conversations", "share", "expected"),
    [(9, 0.01, 0), (50, 0.01, 5), (80, 0.01, 8), (200, 0.01, 8), (5000, 0.01, 50), (200_000, 0.01, 1024), (99, 0.0, 0)],
)
def test_how_many_are_held_out(conversations: int, share: float, expected: int) -> None:
    keys = np.random.default_rng(5).bytes(16 * conversations)
    assert choose_held_out(keys, share).sum() == expected


def test_held_out_conversations_do_not_depend_on_order_or_seed(tmp_path: Path) -> None:
    def held(folder: str, lines: list[Any], seed: int) -> set[str]:
        prepared = run(tmp_path / folder, lines, holdout=0.1, seed=seed)
        rows = prepared.plan.rows["v0064"]
        assert len(rows) == 3
        return {TOKENIZER.decode(prepared.documents[d][0].tolist()) for d in rows.document.tolist()}

    lines = [pair(n) for n in range(30)]
    assert held("a", lines, 0) == held("b", lines[::-1], 7)


def test_answers_to_one_prompt_are_held_out_together(tmp_path: Path) -> None:
    lines = [{"prompt": f"question {n}", "response": f"answer {k}"} for k in range(2) for n in range(80)]
    prepared = run(tmp_path, lines, holdout=0.1)
    held = [(line - 1) % 80 for line in prepared.plan.rows["v0064"].line.tolist()]
    assert len(held) == 16
    assert len(set(held)) == 8


def test_the_plan_is_the_same_again_and_other_with_another_seed(tmp_path: Path) -> None:
    lines = [pair(n) for n in range(30)]
    first, again, other = (run(tmp_path, lines, seed=seed).plan for seed in (1, 1, 2))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    order = first.rows["b0064"].document.tolist()
    assert sorted(order) == list(range(30)) != order


def test_splitmix64_has_its_published_values() -> None:
    state = np.array([1234567], np.uint64)
    assert splitmix64(state).tolist() == [6457827717110365317]


def test_fingerprints_follow_content(tmp_path: Path) -> None:
    one = run(tmp_path / "one", [pair(1)]).fingerprints
    same = run(tmp_path / "same", [pair(1)]).fingerprints
    edited = run(tmp_path / "edited", [pair(2)]).fingerprints
    template = run(tmp_path / "template", [pair(1)], tokenizer=make_tokenizer(CHATML + " ")).fingerprints
    assert one == same
    assert edited["data"] != one["data"]
    assert template["template"] != one["template"]
    assert template["data"] == one["data"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no lines"),
        ([{"prompt": "a"}, {"prompt": "b"}], r"supervised \(2 lines, dropped: no_answer 2\); have the target answer"),
        ([{"prompt": "p" * 300, "response": "r"}], "begin beyond 128 tokens, so give --buckets a larger ceiling"),
        ([{"prompt": "p", "response": ""}], "too_few_supervised 1"),
    ],
)
def test_nothing_supervised_is_an_error_that_says_why(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DflashError, match=message):
        run(tmp_path, lines)


def test_show_prints_the_first_documents_with_the_supervised_part_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, [pair(n) for n in range(5)], show=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("--- document") == 2
    assert "<|im_start|>assistant\n⟦xxxxx1<|im_end|>⟧" in captured.err


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"buckets": ()}, "--buckets"), ({"buckets": (64, 64)}, "--buckets"), ({"buckets": (1,)}, "--buckets"),
     ({"holdout": 0.5}, "--holdout"), ({"turns": "some"}, "--turns"), ({"data": ()}, "--data"),
     ({"seed": -1}, "--seed")],
)  # fmt: skip
def test_settings_are_checked(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(DflashError, match=flag):
        DataConfig(**{"data": ("d.jsonl",), **settings})


def test_show_colours_the_supervised_part_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    run(tmp_path, [pair(1)], show=1)
    shown = capsys.readouterr().err
    assert "\x1b[1;32mxxxxx1<|im_end|>" in shown
    assert "\x1b[2m<|im_start|>user" in shown
    assert "⟦" not in shown
