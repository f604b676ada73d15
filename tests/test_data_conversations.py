"""Every input form is read; every damage is named with its file, line and what is wrong."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash.data.conversations import Conversation, read_conversations
from dflash.data.sources import combine_digests, data_fingerprint
from dflash.errors import DflashError

GOOD = '{"prompt": "p", "response": "r"}'


def write(folder: Path, *lines: str | bytes, end: bytes = b"\n") -> str:
    path = folder / "d.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + end)
    return str(path)


def read_one(folder: Path, record: dict[str, Any]) -> Conversation:
    (conversation,) = read_conversations([write(folder, json.dumps(record))])
    return conversation


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("record", "kind", "messages"),
    [
        ({"messages": [user("p"), assistant("r")]}, "messages", (user("p"), assistant("r"))),
        (
            {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "r"}]},
            "messages",
            (user("p"), assistant("r")),
        ),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "p"}]},
            "messages",
            ({"role": "system", "content": "s"}, user("p")),
        ),
        ({"prompt": "p", "response": "r"}, "messages", (user("p"), assistant("r"))),
        ({"prompt": "p"}, "messages", (user("p"),)),
        ({"prompt": "p", "text": "other"}, "messages", (user("p"),)),
        ({"turns": ["a", "b"]}, "turns", (user("a"), user("b"))),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
         "messages", (user("ab"),)),
    ],
)  # fmt: skip
def test_forms_of_messages(tmp_path: Path, record: dict[str, Any], kind: str, messages: Any) -> None:
    conversation = read_one(tmp_path, record)
    assert conversation.kind == kind
    assert conversation.messages == messages


def test_text_and_tokens(tmp_path: Path) -> None:
    assert read_one(tmp_path, {"text": "abc"}).text == "abc"
    conversation = read_one(tmp_path, {"input_ids": [3, 4], "loss_mask": [0, True]})
    assert (conversation.input_ids, conversation.loss_mask) == ((3, 4), (0, 1))
    assert read_one(tmp_path, {"input_ids": [3, 4]}).loss_mask is None


def test_tools_calls_and_reasoning_pass_through(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"}
    tool = {"role": "tool", "content": "1", "tool_call_id": "c"}
    record = {"messages": [user("p"), answer, tool], "tools": [{"n": 1}], "template_args": {"a": 2}, "id": 7}
    conversation = read_one(tmp_path, record)
    assert conversation.messages[1] == {**answer, "content": ""}
    assert conversation.messages[2] == tool
    assert conversation.tools == [{"n": 1}]
    assert conversation.template_args == {"a": 2}
    assert conversation.extra == {"id": 7}


BAD = [
    ("not JSON", "bad_json", r"not JSON \(Expecting value, column 1\)"),
    ('{"prompt": NaN}', "bad_json", "NaN is no JSON number"),
    (b'{"prompt": "caf\xe9"}', "not_utf8", r"not UTF-8 \(byte 16"),
    (r'{"prompt": "a\ud83d"}', "bad_unicode", "half of a surrogate pair"),
    ("[1, 2]", "bad_form", "a JSON list where an object"),
    ('{"question": "p"}', "bad_form", "needs one of the keys .* but has question"),
    ('{"messages": "p"}', "bad_form", '"messages" must be a list, not a string'),
    ('{"messages": []}', "empty_conversation", '"messages" is empty'),
    ('{"messages": ["p"]}', "bad_message", r"messages\[0\] must be an object, not a string"),
    ('{"messages": [{"role": "robot", "content": "x"}]}', "bad_role", r'messages\[0\] has the role "robot"; known'),
    ('{"messages": [{"role": ["user"], "content": "x"}]}', "bad_role", r'has the role \["user"\]'),
    ('{"messages": [{"role": "user", "content": 5}]}', "bad_content", r"\[0\].content must be a string, not a number"),
    ('{"messages": [{"role": "user"}]}', "bad_content", r"messages\[0\] \(user\) has no content"),
    ('{"messages": [{"role": "assistant", "content": null}]}', "bad_content", r"\(assistant\) has no content"),
    (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        "bad_content",
        'part of type "image"; only text',
    ),
    ('{"messages": [{"role": "user", "content": "x", "tool_calls": "f"}]}', "bad_message", r"\[0\].tool_calls must be"),
    ('{"conversations": ["p"]}', "bad_message", r"conversations\[0\] must be an object, not a string"),
    ('{"conversations": [{"from": "alien", "value": "x"}]}', "bad_role", 'is "from" "alien"; known are'),
    ('{"conversations": [{"from": "human", "value": 3}]}', "bad_content", r"conversations\[0\].value must be a string"),
    ('{"prompt": 3}', "bad_form", '"prompt" must be a string, not a number'),
    ('{"turns": ["a", 3]}', "bad_form", '"turns" must be a list'),
    ('{"input_ids": [1, -1], "loss_mask": [1, 1]}', "bad_tokens", '"input_ids" must be a list of token ids'),
    ('{"input_ids": [1, true], "loss_mask": [1, 1]}', "bad_tokens", '"input_ids" must be a list of token ids'),
    ('{"input_ids": [1, 2], "loss_mask": [1]}', "bad_tokens", r'as long as "input_ids" \(2\), not 1'),
    ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "bad_tokens", '"loss_mask" must hold only 0 and 1'),
    ('{"prompt": "p", "tools": "{"}', "bad_form", '"tools" is a string but not JSON'),
    ('{"prompt": "p", "tools": 3}', "bad_form", '"tools" must be a list'),
    ('{"prompt": "p", "template_args": 3}', "bad_form", '"template_args" must be an object'),
    ("[" * 100_000, "bad_json", "nested too deeply"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "cause", "message"), BAD)
def test_a_damaged_line_is_named(tmp_path: Path, line: str | bytes, cause: str, message: str) -> None:
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(DflashError, match=f"d.jsonl, line 2: .*{message}"):
        list(read_conversations([path]))


@pytest.mark.parametrize(("line", "cause", "message"), BAD)
def test_skip_bad_counts_it_by_cause_and_goes_on(tmp_path: Path, line: str | bytes, cause: str, message: str) -> None:
    bad: Counter[str] = Counter()
    read = list(read_conversations([write(tmp_path, GOOD, line, GOOD)], skip_bad=True, bad=bad))
    assert [conversation.line for conversation in read] == [1, 3]
    assert bad == {cause: 1}


def test_blank_lines_are_counted_but_no_error(tmp_path: Path) -> None:
    bad: Counter[str] = Counter()
    read = list(read_conversations([write(tmp_path, GOOD, "", "  \t", GOOD)], bad=bad))
    assert [conversation.line for conversation in read] == [1, 4]
    assert bad == {"blank_line": 2}


@pytest.mark.parametrize("line", [GOOD[:10], GOOD[:15], GOOD[:-1], '{"messages": [{"role": "user", "content": "p"'])
def test_a_cut_off_last_line_is_told_from_other_damage(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, GOOD, line, end=b"")
    with pytest.raises(DflashError, match="line 2: the line is cut off"):
        list(read_conversations([path]))


def test_a_last_line_without_newline_is_read(tmp_path: Path) -> None:
    assert len(list(read_conversations([write(tmp_path, GOOD, GOOD, end=b"")]))) == 2


def test_a_byte_order_mark_and_other_line_separators_are_no_damage(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a\u2028b\x85c", "response": "r"}, ensure_ascii=False)
    (first, second) = read_conversations([write(tmp_path, "\ufeff" + line, line + "\r")])
    assert first.messages[0]["content"] == second.messages[0]["content"] == "a\u2028b\x85c"


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"no\.jsonl does not exist"):
        list(read_conversations([str(tmp_path / "no.jsonl")]))
    with pytest.raises(DflashError, match="is a folder"):
        list(read_conversations([str(tmp_path)]))


def test_the_fingerprint_is_of_the_content_in_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(GOOD + "\n")
    two.write_text(GOOD + "\n\n")
    digests: list[str] = []
    list(read_conversations([str(one), str(two)], on_source=lambda source: digests.append(source.digest())))
    assert combine_digests(digests) == data_fingerprint((str(one), str(two)))
    assert data_fingerprint((str(two), str(one))) != data_fingerprint((str(one), str(two)))
    copy = tmp_path / "copy.jsonl"
    copy.write_text(one.read_text())
    assert data_fingerprint((str(copy),)) == data_fingerprint((str(one),))


def test_same_conversations_in_other_forms_are_the_same(tmp_path: Path) -> None:
    first = read_one(tmp_path, {"prompt": "p", "response": "r", "id": 1})
    second = read_one(tmp_path, {"messages": [user("p"), assistant("r")], "source": "x"})
    third = read_one(tmp_path, {"messages": [user("p"), assistant("other")]})
    assert first.canonical == second.canonical != third.canonical
    assert first.opening == third.opening
