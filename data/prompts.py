"""Prompts to be answered: any input form, reduced to its last user turn and what comes before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.data.conversations import Conversation, Message, read_conversations
from dflash.data.render import render_prompt
from dflash.errors import DflashError

__all__ = ["Prompt", "prompt_of", "read_prompts", "render_prompt"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`turns` are played one after the other: its messages are added to the conversation, then the target answers.

    Where `input_ids` is set, it is the whole prompt and `turns` is empty.
    """

    id: int  # its number among the prompts, from 0
    file: str
    line: int
    turns: tuple[tuple[Message, ...], ...] = ()
    input_ids: tuple[int, ...] | None = None
    tools: list[Any] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def read_prompts(paths: Sequence[str] | str, limit: int | None = None) -> list[Prompt]:
    """The prompts of the files in order, at most `limit`."""
    paths = (paths,) if isinstance(paths, str) else tuple(paths)
    prompts: list[Prompt] = []
    for conversation in read_conversations(paths):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(prompt_of(conversation, len(prompts), paths[conversation.file]))
    if not prompts:
        raise DflashError(f"{', '.join(paths)} holds no prompts; give a file with a prompt on each line.")
    return prompts


def prompt_of(conversation: Conversation, number: int, file: str) -> Prompt:
    """What to ask of a conversation; its answer to the last user turn, if there is one, is left out."""
    common: dict[str, Any] = {
        "id": number,
        "file": file,
        "line": conversation.line,
        "tools": conversation.tools,
        "template_args": conversation.template_args,
        "extra": conversation.extra,
    }
    messages = conversation.messages
    if conversation.kind == "turns":
        return Prompt(turns=tuple((message,) for message in messages), **common)
    if conversation.kind == "tokens":
        return Prompt(input_ids=_prompt_ids(conversation, file), **common)
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        place = f"{file}, line {conversation.line}"
        raise DflashError(f"{place}: no user turn to answer; give it one or leave the line out.")
    return Prompt(turns=(messages[: users[-1] + 1],), **common)


def _prompt_ids(conversation: Conversation, file: str) -> tuple[int, ...]:
    """All ids, or with a mask those before its last supervised stretch."""
    assert conversation.input_ids is not None
    ids, mask = conversation.input_ids, conversation.loss_mask
    if mask is None or not any(mask):
        return ids
    start = len(mask) - 1 - mask[::-1].index(1)
    while start and mask[start - 1]:
        start -= 1
    if not start:
        raise DflashError(
            f"{file}, line {conversation.line}: supervised from its first token; leave some of it "
            "unsupervised as the prompt."
        )
    return ids[:start]
