"""Read conversations in every input form, line by line, with errors that name file, line and what is wrong.

Forms (first that fits): {"messages"}, ShareGPT {"conversations"}, {"input_ids"[, "loss_mask"]}, {"turns"}, {"prompt"[,
"response"]}, {"text"}. What else a line carries is kept in `extra`. Content is normalised as little as templates need:
lists of text parts are joined, a missing content is "". Reading streams; a file is never held in memory.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from dflash.data.sources import Source, open_source
from dflash.errors import DflashError
from dflash.files import canonical_json

Message = dict[str, Any]
Kind = Literal["messages", "turns", "text", "tokens"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
FORMS = "messages, conversations, input_ids, turns, prompt, text"


class BadLineError(Exception):
    """One line cannot be used; `cause` is the key it is counted under with --skip-bad."""

    def __init__(self, cause: str, what: str) -> None:
        super().__init__(what)
        self.cause = cause

    def at(self, place: str) -> DflashError:
        return DflashError(f"{place}: {self}; correct it, or let extract count and skip such lines with --skip-bad.")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One line of the data. `turns` holds user texts to be played one after the other, as user messages."""

    file: int
    line: int  # from 1
    kind: Kind
    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: list[Any] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None
    cut_off: frozenset[int] = frozenset()  # assistant turns (numbers of messages) that stop without an end
    extra: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def canonical(self) -> bytes:
        """What makes two conversations the same; where it was read and extras do not count."""
        args = self.template_args
        return _json_bytes([self.messages, self.text, self.tools, args, self.input_ids, self.loss_mask])

    @cached_property
    def opening(self) -> bytes:
        """What comes before the first answer: several answers to one prompt share it."""
        for number, message in enumerate(self.messages):
            if message["role"] == "assistant":
                return _json_bytes([self.messages[:number], self.tools])
        return self.canonical


def _json_bytes(value: Any) -> bytes:
    return canonical_json(value).encode()


def read_conversations(
    paths: Sequence[str],
    skip_bad: bool = False,
    bad: Counter[str] | None = None,
    on_source: Callable[[Source], None] | None = None,
) -> Iterator[Conversation]:
    """Every conversation of the files in order.

    Blank lines and, with `skip_bad`, damaged ones are counted in `bad` by cause; otherwise a damaged line raises.
    `on_source` is called with each source when it has been read to its end.
    """
    bad = Counter() if bad is None else bad
    for number, path in enumerate(paths):
        source = open_source(path)
        for line, raw in source.lines():
            if not raw.strip():
                bad["blank_line"] += 1
                continue
            try:
                yield parse_line(raw, number, line)
            except BadLineError as error:
                if not skip_bad:
                    raise error.at(f"{source.name}, line {line}") from error
                bad[error.cause] += 1
        if on_source:
            on_source(source)


def parse_line(raw: bytes, file: int, line: int) -> Conversation:
    """A conversation from the bytes of one line; `BadLineError` says what is wrong with it."""
    try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadLineError("not_utf8", f"not UTF-8 (byte {error.start + 1} of the line)") from error
    try:
        record = json.loads(text, parse_constant=_no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise BadLineError("bad_json", "not JSON that can be read: nested too deeply") from error
        at_end = not raw.endswith(b"\n") and error.pos >= len(text.rstrip()) - 1
        if at_end or error.msg.startswith("Unterminated"):
            raise BadLineError("cut_off_line", "the line is cut off in the middle of its JSON") from error
        raise BadLineError("bad_json", f"not JSON ({error.msg}, column {error.colno})") from error
    if "\\ud" in text.lower():  # half of a surrogate pair is JSON, but no text that can be tokenised
        try:
            canonical_json(record).encode()
        except UnicodeEncodeError as error:
            raise BadLineError("bad_unicode", "holds half of a surrogate pair (\\ud8… without its partner)") from error
    if not isinstance(record, dict):
        what = f'a JSON {_type_name(record)} where an object such as {{"messages": …}} belongs'
        raise BadLineError("bad_form", what)
    return parse_record(record, file, line)


def parse_record(record: dict[str, Any], file: int, line: int) -> Conversation:
    """A conversation from one JSON object."""
    record = dict(record)
    common: dict[str, Any] = {"file": file, "line": line, "tools": _tools(record), "template_args": _args(record)}
    if "messages" in record:
        messages = _messages(record.pop("messages"), "messages", _message)
        cut_off = _cut_off(record, messages)
        return Conversation(kind="messages", messages=messages, cut_off=cut_off, **common, extra=record)
    if "conversations" in record:
        messages = _messages(record.pop("conversations"), "conversations", _sharegpt)
        system = record.pop("system", None)
        if isinstance(system, str) and system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        return Conversation(kind="messages", messages=messages, **common, extra=record)
    if "input_ids" in record:
        ids, mask = _tokens(record)
        return Conversation(kind="tokens", input_ids=ids, loss_mask=mask, **common, extra=record)
    if "turns" in record:
        texts = record.pop("turns")
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise BadLineError("bad_form", '"turns" must be a list of the user\'s texts')
        users = tuple({"role": "user", "content": text} for text in texts)
        return Conversation(kind="turns", messages=users, **common, extra=record)
    if "prompt" in record:
        messages = ({"role": "user", "content": _text(record, "prompt")},)
        if record.get("response") is not None:
            messages += ({"role": "assistant", "content": _text(record, "response")},)
        return Conversation(kind="messages", messages=messages, **common, extra=record)
    if "text" in record:
        return Conversation(kind="text", text=_text(record, "text"), **common, extra=record)
    keys = ", ".join(list(record)[:8]) or "none"
    raise BadLineError("bad_form", f"no known form: it needs one of the keys {FORMS}, but has {keys}")


def _no_constant(name: str) -> None:
    raise BadLineError("bad_json", f"not JSON ({name} is no JSON number)")


def _type_name(value: Any) -> str:
    names = {list: "list", dict: "object", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _text(record: dict[str, Any], key: str) -> str:
    value = record.pop(key)
    if not isinstance(value, str):
        raise BadLineError("bad_form", f'"{key}" must be a string, not a {_type_name(value)}')
    return value


def _tools(record: dict[str, Any]) -> list[Any] | None:
    tools = record.pop("tools", None)
    if isinstance(tools, str) and tools.strip():  # some ShareGPT files hold the list as a JSON text
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise BadLineError("bad_form", '"tools" is a string but not JSON') from error
    if tools and not isinstance(tools, list):
        raise BadLineError("bad_form", f'"tools" must be a list, not a {_type_name(tools)}')
    return tools or None


def _args(record: dict[str, Any]) -> dict[str, Any]:
    args = record.pop("template_args", None)
    if args is not None and not isinstance(args, dict):
        raise BadLineError("bad_form", f'"template_args" must be an object, not a {_type_name(args)}')
    return args or {}


def _messages(value: Any, key: str, parse: Callable[[Any, str], Message]) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise BadLineError("bad_form", f'"{key}" must be a list, not a {_type_name(value)}')
    if not value:
        raise BadLineError("empty_conversation", f'"{key}" is empty')
    return tuple(parse(entry, f"{key}[{number}]") for number, entry in enumerate(value))


def _message(entry: Any, place: str) -> Message:
    if not isinstance(entry, dict):
        raise BadLineError("bad_message", f"{place} must be an object, not a {_type_name(entry)}")
    role = entry.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise BadLineError("bad_role", f"{place} has the role {json.dumps(role)}; known roles are {known}")
    content = entry.get("content")
    if isinstance(content, list):
        content = _joined(content, place)
    for key in ("reasoning_content", "tool_calls"):
        kind = list if key == "tool_calls" else str
        if entry.get(key) is not None and not isinstance(entry[key], kind):
            raise BadLineError("bad_message", f"{place}.{key} must be a {_type_name(kind())}")
    if content is None:
        if role != "assistant" or not (entry.get("tool_calls") or entry.get("reasoning_content")):
            raise BadLineError("bad_content", f"{place} ({role}) has no content")
        content = ""
    if not isinstance(content, str):
        raise BadLineError("bad_content", f"{place}.content must be a string, not a {_type_name(content)}")
    return {**{k: v for k, v in entry.items() if v is not None}, "content": content}


def _joined(parts: list[Any], place: str) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _type_name(part)
            what = f"{place}.content has a part of type {json.dumps(kind)}; only text is read"
            raise BadLineError("bad_content", what)
    return "".join(part["text"] for part in parts)


def _sharegpt(entry: Any, place: str) -> Message:
    if not isinstance(entry, dict):
        raise BadLineError("bad_message", f"{place} must be an object, not a {_type_name(entry)}")
    speaker, value = entry.get("from"), entry.get("value")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise BadLineError("bad_role", f'{place} is "from" {json.dumps(speaker)}; known are {known}')
    if not isinstance(value, str):
        raise BadLineError("bad_content", f"{place}.value must be a string, not a {_type_name(value)}")
    rest = {key: each for key, each in entry.items() if key not in ("from", "value") and each is not None}
    return _message({**rest, "role": SHAREGPT_ROLES[speaker], "content": value}, place)


def _cut_off(record: dict[str, Any], messages: tuple[Message, ...]) -> frozenset[int]:
    """The answers that `regenerate` says were stopped by the limit: the target did not end them there."""
    sampling = record.get("sampling")
    finish = sampling.get("finish") if isinstance(sampling, dict) else None
    if not isinstance(finish, list):
        return frozenset()
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"][-len(finish) :]
    return frozenset(number for number, how in zip(answers, finish[-len(answers) :], strict=False) if how == "length")


def _tokens(record: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    ids, mask = record.pop("input_ids"), record.pop("loss_mask", None)
    if not isinstance(ids, list) or not ids or not all(type(each) is int and 0 <= each < 2**31 for each in ids):
        raise BadLineError("bad_tokens", '"input_ids" must be a list of token ids (whole numbers from 0)')
    if mask is None:
        return tuple(ids), None
    if not isinstance(mask, list) or len(mask) != len(ids):
        count = len(mask) if isinstance(mask, list) else _type_name(mask)
        raise BadLineError("bad_tokens", f'"loss_mask" must be a list as long as "input_ids" ({len(ids)}), not {count}')
    if not all(each in (0, 1) and not isinstance(each, float) for each in mask):
        raise BadLineError("bad_tokens", '"loss_mask" must hold only 0 and 1')
    return tuple(ids), tuple(int(each) for each in mask)
