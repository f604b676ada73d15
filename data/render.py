"""Conversation -> documents: token ids and the mask of what the target would have to generate.

For assistant turn i, P is the rendering of messages[:i] with the generation prompt, F that of messages[:i+1] without.
What follows P in F is the turn; its constant tail (the same whatever the content) is found by rendering another
content, and the turn ends in that tail at the first stop token, else at the last special token, else before the tail.
So no generation tags and no patterns per model are needed, at the price of three renderings a turn.

A document holds several turns where each one, up to its end, is a prefix of the document; where a template rewrites
history (thinking models drop earlier reasoning) a turn gets a document of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.data.conversations import BadLineError, Conversation, Message
from dflash.data.limit import within
from dflash.errors import DflashError, cause

Tokens = NDArray[np.int32]
Mask = NDArray[np.uint8]
Document = tuple[Tokens, Mask]

NO_ANSWER = "no_answer"
# Names under which templates let a prompt start with an empty think block.
THINKING_SWITCHES = ("enable_thinking", "thinking")
REASONING_PROBE = "zqxj"
TEMPLATE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """A tokenizer with the settings under which it renders."""

    tokenizer: Any
    turns: str = "all"
    template_args: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None
    seconds: float = TEMPLATE_SECONDS  # for one rendering
    _tails: dict[str, list[int]] = field(default_factory=dict, repr=False)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(self.tokenizer.all_special_ids))

    @cached_property
    def switches(self) -> tuple[str, ...]:
        template = self.tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template or ""]
        return tuple(name for name in THINKING_SWITCHES if any(name in text for text in texts))

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def tail_tokens(self, tail: str, probe: str) -> list[int]:
        """Tokens of a turn's tail behind another content. Tails hardly vary, so they are kept."""
        key = probe + tail
        if key not in self._tails:
            if len(self._tails) > 1000:
                self._tails.clear()
            self._tails[key] = self.tokens(key)
        return self._tails[key]

    def text(self, conversation: Conversation, messages: Sequence[Message], prompt: bool = False, **switch: Any) -> str:
        """The template's rendering; with `prompt` it ends where the target starts to generate."""
        args = {**self.template_args, **conversation.template_args, **switch}
        return render_text(messages, self.tokenizer, args, conversation.tools, prompt, self.seconds)


@dataclass(frozen=True)
class Turn:
    """An assistant turn in its document: the target generates tokens[start:end]."""

    tokens: Tokens
    start: int
    end: int


class EndlessTemplateError(BadLineError):
    """The template was still running when its time was over."""


def render_text(
    messages: Sequence[Message],
    tokenizer: Any,
    template_args: Mapping[str, Any],
    tools: list[Any] | None,
    prompt: bool,
    seconds: float = TEMPLATE_SECONDS,
) -> str:
    """`messages` as the chat template writes them, in transformers' sandbox and for a limited time."""
    if not tokenizer.chat_template:
        raise DflashError("The tokenizer has no chat template; give one with --chat-template FILE.")
    try:
        return within(
            seconds,
            lambda: EndlessTemplateError(
                "endless_template", f"the chat template has not rendered it within {seconds:g} s"
            ),
            lambda: tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **template_args
            ),
        )
    except EndlessTemplateError:
        raise
    except Exception as error:  # a template can fail with any exception of Jinja's and of Python's
        raise BadLineError("template_error", f"the chat template cannot render it ({cause(error)})") from error


def render_prompt(
    messages: Sequence[Message],
    tokenizer: Any,
    template_args: Mapping[str, Any],
    tools: list[Any] | None = None,
) -> list[int]:
    """Token ids of a prompt as a server would make them, generation prompt included."""
    text = render_text(messages, tokenizer, template_args, tools, prompt=True)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def render_documents(conversation: Conversation, renderer: Renderer) -> list[Document] | str:
    """The conversation's documents, or the cause for which it has none."""
    if conversation.kind == "tokens":
        return _ready_tokens(conversation, renderer.vocab_size)
    if conversation.kind == "text":
        return [_plain_text(conversation.text, renderer.tokenizer)] if conversation.text else "empty_text"
    answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not answers:
        return NO_ANSWER
    if renderer.turns == "last":
        answers = answers[-1:]
    return merge_turns([_render_turn(conversation, number, renderer) for number in answers])


def merge_turns(turns: list[Turn]) -> list[Document]:
    """One document for all turns that are, up to their end, a prefix of a later turn's document."""
    documents: list[Document] = []
    for turn in reversed(turns):
        for tokens, mask in documents:
            if len(tokens) >= turn.end and np.array_equal(tokens[: turn.end], turn.tokens[: turn.end]):
                mask[turn.start : turn.end] = 1
                break
        else:
            mask = np.zeros(len(turn.tokens), np.uint8)
            mask[turn.start : turn.end] = 1
            documents.append((turn.tokens, mask))
    return documents[::-1]


def _ready_tokens(conversation: Conversation, vocab_size: int | None) -> list[Document] | str:
    if conversation.loss_mask is None:
        return NO_ANSWER
    tokens = np.array(conversation.input_ids, np.int32)
    if vocab_size is not None and tokens.max() >= vocab_size:
        raise BadLineError(
            "bad_tokens", f'"input_ids" holds {tokens.max()}, but the target\'s embedding has {vocab_size} rows'
        )
    return [(tokens, np.array(conversation.loss_mask, np.uint8))]


def _plain_text(text: str, tokenizer: Any) -> Document:
    """All is supervised but what the tokenizer puts before the text (bos), which no model generates."""
    encoded = tokenizer(text, add_special_tokens=True, return_special_tokens_mask=True, verbose=False)
    mask = np.ones(len(encoded["input_ids"]), np.uint8)
    added = np.array(encoded["special_tokens_mask"], np.uint8)
    leading = len(added) if added.all() else int(np.argmin(added))
    mask[:leading] = 0
    return np.array(encoded["input_ids"], np.int32), mask


def _render_turn(conversation: Conversation, number: int, renderer: Renderer) -> Turn:
    message = conversation.messages[number]
    full = renderer.text(conversation, conversation.messages[: number + 1])
    shown = message["content"].strip()
    probe = next(digit for digit in "012" if digit not in (shown[:1], shown[-1:]))
    probed = renderer.text(conversation, [*conversation.messages[:number], {**message, "content": probe}])
    prompt = _find_prompt(conversation, number, renderer, full, probed)
    if full.startswith(prompt):
        rest, rest_probed = full[len(prompt) :], probed[len(prompt) :] if probed.startswith(prompt) else probed
        tail = _common_suffix(rest, rest_probed)
    else:  # the template hides what this prompt makes the target say: take the answer from the data
        tail = _common_suffix(full, probed)
        rest = _shown(message["content"], full) + tail
    start, tokens = _tokenise(prompt, rest, renderer)
    tail_length = _common_suffix_length(tokens[start:], renderer.tail_tokens(tail, probe))
    ended = number not in conversation.cut_off
    end = _turn_end(tokens, len(tokens) - tail_length, renderer) if ended else len(tokens) - tail_length
    return Turn(np.array(tokens, np.int32), start, end)


def _find_prompt(conversation: Conversation, number: int, renderer: Renderer, full: str, probed: str) -> str:
    """What the server renders before this turn: where possible a prefix of `full`."""
    before, message = conversation.messages[:number], conversation.messages[number]
    try:
        plain = renderer.text(conversation, before, prompt=True)
    except BadLineError as error:
        if number or isinstance(error, EndlessTemplateError):
            raise
        plain = ""  # many templates cannot render a conversation of no messages
    reasons = bool(message.get("reasoning_content"))
    if full.startswith(plain) and plain and reasons:
        return plain
    fitting = [plain] if plain and full.startswith(plain) else []
    for name in renderer.switches:
        if name not in renderer.template_args and name not in conversation.template_args:
            for value in (False, True):
                variant = renderer.text(conversation, before, prompt=True, **{name: value}) if before else ""
                fitting += [variant] if variant and full.startswith(variant) else []
    if not fitting:
        hidden = number > 0 and not message.get("tool_calls")
        return plain if hidden else _common_prefix(full, probed)
    longest = max(fitting, key=len)
    if longest == plain and not reasons:
        return plain + _empty_reasoning(conversation, number, renderer, full, probed, plain)
    return longest


def _empty_reasoning(
    conversation: Conversation, number: int, renderer: Renderer, full: str, probed: str, prompt: str
) -> str:
    """The empty think block that the template puts before an answer without reasoning, or nothing.

    It is one if reasoning, where there is some, stands in the middle of just this text: no target would generate it.
    """
    inserted = _common_prefix(full, probed)[len(prompt) :]
    if not inserted or not probed.startswith(prompt):
        return ""
    messages = [*conversation.messages[:number]]
    messages.append({**conversation.messages[number], "reasoning_content": REASONING_PROBE})
    try:
        reasoned = renderer.text(conversation, messages)
    except EndlessTemplateError:
        raise
    except BadLineError:
        return ""  # this template knows no reasoning
    opening, found, rest = reasoned[len(prompt) :].partition(REASONING_PROBE)
    answer = full[len(prompt) + len(inserted) :]
    if not found or not reasoned.startswith(prompt) or not rest.endswith(answer):
        return ""
    return inserted if opening + rest[: len(rest) - len(answer)] == inserted else ""


def _shown(content: str, full: str) -> str:
    """The answer as the template writes it, which may strip it; as it is where the template drops a part."""
    return content if content in full or content.strip() not in full else content.strip()


def _tokenise(prompt: str, rest: str, renderer: Renderer) -> tuple[int, list[int]]:
    """(tokens of the prompt, all tokens). Tokens that would straddle the border are split, as they are for a server."""
    before, whole = renderer.tokens(prompt), renderer.tokens(prompt + rest)
    if whole[: len(before)] != before:
        whole = before + renderer.tokens(rest)
    return len(before), whole


def _turn_end(tokens: list[int], tail_start: int, renderer: Renderer) -> int:
    """Where the target stops: after the tail's first stop token, else its last special token, else before the tail."""
    for position in range(tail_start, len(tokens)):
        if tokens[position] in renderer.stop_ids:
            return position + 1
    for position in range(len(tokens) - 1, tail_start - 1, -1):
        if tokens[position] in renderer.special_ids:
            return position + 1
    return tail_start


def _common_prefix(a: str, b: str) -> str:
    """By halving, so that the comparing is done in C: texts may be long."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return a[:low]


def _common_suffix(a: str, b: str) -> str:
    length = len(_common_prefix(a[::-1], b[::-1]))
    return a[len(a) - length :]


def _common_suffix_length(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length
