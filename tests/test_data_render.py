"""The supervised text is what the target would generate, on templates of different structures."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from chat_templates import (
    ALWAYS_THINKING,
    CHANNELS,
    CHATML,
    CHATML_DEFAULT_SYSTEM,
    HEADER_IDS,
    HIDES_REASONING,
    MODEL_ROLE,
    NO_END,
    THINKING,
    TWO_TOKEN_END,
    WHITE_SPACE,
    make_tokenizer,
)

from dflash.data.conversations import BadLineError, parse_record
from dflash.data.render import Renderer, render_documents, render_prompt
from dflash.data.show import supervised_runs
from dflash.errors import DflashError

TINY = Path(__file__).parent / "assets" / "tiny-chat"
U1, A1 = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello, you."}
U2, A2 = {"role": "user", "content": "Más?"}, {"role": "assistant", "content": "Sí: ça va\n😀"}
SYSTEM = {"role": "system", "content": "Be brief."}
TWO_TURNS = [U1, A1, U2, A2]


def documents(record: dict[str, Any], tokenizer: Any, stop: tuple[str, ...] = (), **settings: Any) -> Any:
    stop_ids = frozenset(tokenizer.convert_tokens_to_ids(list(stop)))
    renderer = Renderer(tokenizer=tokenizer, stop_ids=stop_ids, **settings)
    return render_documents(parse_record(record, 0, 1), renderer)


def supervised(record: dict[str, Any], tokenizer: Any, stop: tuple[str, ...] = (), **settings: Any) -> list[list[str]]:
    """For each document the texts of its supervised stretches."""
    found = documents(record, tokenizer, stop, **settings)
    assert not isinstance(found, str), found
    return [
        [tokenizer.decode(tokens[start:end].tolist()) for start, end, on in supervised_runs(mask) if on]
        for tokens, mask in found
    ]


SIMPLE = [
    pytest.param(CHATML, "<|im_end|>", "", "<|im_end|>", id="chatml"),
    pytest.param(CHATML_DEFAULT_SYSTEM, "<|im_end|>", "", "<|im_end|>", id="chatml-default-system"),
    pytest.param(HEADER_IDS, "<|eot|>", "", "<|eot|>", id="header-ids"),
    pytest.param(MODEL_ROLE, "<end_of_turn>", "", "<end_of_turn>", id="model-role"),
    pytest.param(TWO_TOKEN_END, "<|eot|>", " ", "<|end|><|eot|>", id="two-token-end"),
    pytest.param(NO_END, "<|endoftext|>", "", "", id="no-end"),
    pytest.param(WHITE_SPACE, "<|im_end|>", "", " \n<|im_end|>", id="white-space"),
    pytest.param(CHANNELS, "<|return|>", "<|channel|>final<|message|>", "<|return|>", id="channels"),
]


@pytest.mark.parametrize(("template", "stop", "before", "after"), SIMPLE)
def test_every_turn_of_a_conversation_is_supervised_with_its_end(
    template: str, stop: str, before: str, after: str
) -> None:
    tokenizer = make_tokenizer(template)
    expected = [[before + A1["content"] + after, before + A2["content"] + after]]
    assert supervised({"messages": TWO_TURNS}, tokenizer, (stop,)) == expected


@pytest.mark.parametrize(("template", "stop", "before", "after"), SIMPLE)
def test_the_document_is_the_templates_own_rendering(template: str, stop: str, before: str, after: str) -> None:
    tokenizer = make_tokenizer(template)
    ((tokens, _),) = documents({"messages": TWO_TURNS}, tokenizer, (stop,))
    assert tokenizer.decode(tokens.tolist()) == tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)


@pytest.mark.parametrize(("template", "stop", "before", "after"), SIMPLE)
def test_one_letter_and_empty_answers(template: str, stop: str, before: str, after: str) -> None:
    tokenizer = make_tokenizer(template)
    messages = [U1, {"role": "assistant", "content": "0"}, U2, {"role": "assistant", "content": ""}]
    expected = [text for text in (before + "0" + after, before + after) if text]
    assert supervised({"messages": messages}, tokenizer, (stop,)) == [expected]


@pytest.mark.parametrize("content", ["0", "1", "01", "a0\n", "  b ", "\n", "ends <|im_end|> early", "<|im_end|>"])
def test_content_that_looks_like_the_probe_or_like_the_tail(content: str) -> None:
    message = {"role": "assistant", "content": content}
    expected = [[content + "<|im_end|>"]]
    assert supervised({"messages": [U1, message]}, make_tokenizer(CHATML), ("<|im_end|>",)) == expected


def test_content_that_the_template_trims_is_supervised_as_it_stands() -> None:
    messages = [U1, {"role": "assistant", "content": "  padded \n"}, U2, A2]
    expected = [["padded<|eot|>", A2["content"] + "<|eot|>"]]
    assert supervised({"messages": messages}, make_tokenizer(HEADER_IDS), ("<|eot|>",)) == expected


def test_turns_last_supervises_only_the_last_answer() -> None:
    tokenizer = make_tokenizer(CHATML)
    found = supervised({"messages": [*TWO_TURNS, U1]}, tokenizer, ("<|im_end|>",), turns="last")
    assert found == [[A2["content"] + "<|im_end|>"]]


def test_a_system_turn_is_context() -> None:
    tokenizer = make_tokenizer(CHATML_DEFAULT_SYSTEM)
    ((tokens, mask),) = documents({"messages": [SYSTEM, U1, A1]}, tokenizer, ("<|im_end|>",))
    text = tokenizer.decode(tokens.tolist())
    assert "Be brief." in text
    assert "Tiny" not in text
    assert tokenizer.decode(tokens[mask == 1].tolist()) == "Hello, you.<|im_end|>"


def test_without_stop_ids_the_last_special_token_of_the_tail_ends_the_turn() -> None:
    assert supervised({"messages": [U1, A1]}, make_tokenizer(TWO_TOKEN_END)) == [[" Hello, you.<|end|><|eot|>"]]
    assert supervised({"messages": [U1, A1]}, make_tokenizer(CHATML)) == [["Hello, you.<|im_end|>"]]


def test_the_first_stop_token_ends_the_turn() -> None:
    tokenizer = make_tokenizer(TWO_TOKEN_END)
    assert supervised({"messages": [U1, A1]}, tokenizer, ("<|end|>", "<|eot|>")) == [[" Hello, you.<|end|>"]]


def test_a_conversation_may_start_with_the_assistant() -> None:
    expected = [["Hello, you.<|im_end|>", A2["content"] + "<|im_end|>"]]
    for template in (CHATML, CHATML_DEFAULT_SYSTEM):
        assert supervised({"messages": [A1, U2, A2]}, make_tokenizer(template), ("<|im_end|>",)) == expected


class TestThinking:
    tokenizer = make_tokenizer(THINKING)
    stop = ("<|im_end|>",)
    R1: ClassVar = {**A1, "reasoning_content": "A greeting."}
    R2: ClassVar = {**A2, "reasoning_content": "Spanish,\n\nor French?"}

    def test_reasoning_is_supervised_and_every_turn_has_its_own_history(self) -> None:
        record = {"messages": [U1, self.R1, U2, self.R2]}
        assert supervised(record, self.tokenizer, self.stop) == [
            ["<think>\nA greeting.\n</think>\n\nHello, you.<|im_end|>"],
            ["<think>\nSpanish,\n\nor French?\n</think>\n\nSí: ça va\n😀<|im_end|>"],
        ]
        second = self.tokenizer.decode(documents(record, self.tokenizer, self.stop)[1][0].tolist())
        assert "A greeting." not in second
        assert "Hello, you." in second

    @pytest.mark.parametrize("template", [THINKING, ALWAYS_THINKING])
    def test_an_empty_think_block_is_context(self, template: str) -> None:
        tokenizer = make_tokenizer(template)
        record = {"messages": TWO_TURNS}
        assert supervised(record, tokenizer, self.stop) == [["Hello, you.<|im_end|>"], [A2["content"] + "<|im_end|>"]]
        for tokens, _ in documents(record, tokenizer, self.stop):
            assert "<think>\n\n</think>\n\n" in tokenizer.decode(tokens.tolist())

    def test_an_empty_think_block_is_context_without_a_switch(self) -> None:
        tokenizer = make_tokenizer(THINKING.replace("enable_thinking", "some_other_name"))
        assert supervised({"messages": [U1, A1]}, tokenizer, self.stop) == [["Hello, you.<|im_end|>"]]

    def test_a_prompt_that_opens_the_think_block_leaves_its_rest_to_the_target(self) -> None:
        tokenizer = make_tokenizer(ALWAYS_THINKING)
        expected = [["A greeting.\n</think>\n\nHello, you.<|im_end|>"]]
        assert supervised({"messages": [U1, self.R1]}, tokenizer, self.stop) == expected

    @pytest.mark.parametrize(
        "content", ["<think>\nA greeting.\n</think>\n\nHello, you.", "<think>A greeting.</think>Hello, you."]
    )
    def test_reasoning_inside_the_content_is_supervised_as_the_template_writes_it(self, content: str) -> None:
        inline = {"role": "assistant", "content": content}
        assert supervised({"messages": [U1, inline, U2, A2]}, self.tokenizer, self.stop) == [
            ["<think>\nA greeting.\n</think>\n\nHello, you.<|im_end|>"],
            [A2["content"] + "<|im_end|>"],
        ]

    def test_mixed_turns(self) -> None:
        assert supervised({"messages": [U1, A1, U2, self.R2]}, self.tokenizer, self.stop) == [
            ["Hello, you.<|im_end|>"],
            ["<think>\nSpanish,\n\nor French?\n</think>\n\nSí: ça va\n😀<|im_end|>"],
        ]

    def test_turns_whose_reasoning_the_template_keeps_share_a_document(self) -> None:
        call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
        asks = {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [call]}
        messages = [U1, asks, {"role": "tool", "content": "12:00"}, self.R2]
        assert supervised({"messages": messages, "tools": [call]}, self.tokenizer, self.stop) == [
            [
                "<think>\nLook.\n</think>\n\n<tool_call>clock</tool_call><|im_end|>",
                "<think>\nSpanish,\n\nor French?\n</think>\n\nSí: ça va\n😀<|im_end|>",
            ]
        ]

    def test_reasoning_that_a_channel_template_drops_fans_out(self) -> None:
        final = "<|start|>assistant<|channel|>final<|message|>"
        assert supervised({"messages": [U1, self.R1, U2, A2]}, make_tokenizer(CHANNELS), ("<|return|>",)) == [
            ["<|channel|>analysis<|message|>A greeting.<|end|>" + final + "Hello, you.<|return|>"],
            ["<|channel|>final<|message|>" + A2["content"] + "<|return|>"],
        ]

    def test_an_answer_that_the_template_hides_is_taken_from_the_data(self) -> None:
        tokenizer = make_tokenizer(HIDES_REASONING)
        answer = {"role": "assistant", "content": "One, two.</think>Two."}
        record = {"messages": [U1, answer]}
        assert supervised(record, tokenizer, ("<|eot|>",)) == [["One, two.</think>Two.<|eot|>"]]
        ((tokens, _),) = documents(record, tokenizer, ("<|eot|>",))
        assert tokenizer.decode(tokens.tolist()) == "<|user|>Hi there<|bot|><think>\nOne, two.</think>Two.<|eot|>"


def test_a_token_that_straddles_prompt_and_answer_is_split_as_for_a_server() -> None:
    tokenizer = make_tokenizer(CHATML, merges=(("Ċ", "H"),))
    ((tokens, mask),) = documents({"messages": [U1, A1]}, tokenizer, ("<|im_end|>",))
    prompt = render_prompt([U1], tokenizer, {})
    assert tokens[: len(prompt)].tolist() == prompt
    assert tokens.tolist() != tokenizer(tokenizer.apply_chat_template([U1, A1], tokenize=False))["input_ids"]
    assert mask[: len(prompt)].sum() == 0
    assert tokenizer.decode(tokens[mask == 1].tolist()) == "Hello, you.<|im_end|>"


def test_a_token_that_straddles_answer_and_tail_belongs_to_the_answer() -> None:
    tokenizer = make_tokenizer(NO_END, merges=((".", "Ċ"),))
    assert supervised({"messages": [U1, A1]}, tokenizer) == [["Hello, you.\n"]]


def test_an_answer_that_the_limit_cut_off_has_no_end() -> None:
    record = {"messages": TWO_TURNS, "sampling": {"finish": ["stop", "length"]}}
    expected = [["Hello, you.<|im_end|>", A2["content"]]]
    assert supervised(record, make_tokenizer(CHATML), ("<|im_end|>",)) == expected


def test_tools_and_arguments_reach_the_template() -> None:
    template = "{{ tools[0].name }} {{ style }}\n" + CHATML
    record = {"messages": [U1, A1], "tools": [{"name": "clock"}], "template_args": {"style": "plain"}}
    tokenizer = make_tokenizer(template)
    ((tokens, mask),) = documents(record, tokenizer, ("<|im_end|>",), template_args={"style": "loud"})
    assert tokenizer.decode(tokens.tolist()).startswith("clock plain\n<|im_start|>user")
    assert tokenizer.decode(tokens[mask == 1].tolist()) == "Hello, you.<|im_end|>"


def test_plain_text_is_all_supervised() -> None:
    tokenizer = make_tokenizer(None)
    ((tokens, mask),) = documents({"text": "Once upon"}, tokenizer)
    assert tokenizer.decode(tokens.tolist()) == "Once upon"
    assert mask.all()


def test_ready_tokens_are_taken_as_they_are() -> None:
    ((tokens, mask),) = documents({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, make_tokenizer(None))
    assert tokens.tolist() == [5, 6, 7]
    assert mask.tolist() == [0, 1, 1]
    assert tokens.dtype == np.int32
    assert mask.dtype == np.uint8


def test_ready_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(BadLineError, match="holds 320, but the target's embedding has 320 rows"):
        documents({"input_ids": [5, 320], "loss_mask": [1, 1]}, make_tokenizer(None), vocab_size=320)


@pytest.mark.parametrize("record", [{"messages": [SYSTEM]}, {"prompt": "p"}, {"turns": ["a", "b"]}, {"input_ids": [1]}])
def test_prompts_without_an_answer_are_dropped_by_cause(record: dict[str, Any]) -> None:
    assert documents(record, make_tokenizer(CHATML)) == "no_answer"


def test_a_template_that_refuses_a_conversation_says_why() -> None:
    with pytest.raises(BadLineError, match=r"chat template cannot render it .*roles must alternate"):
        documents({"messages": [U1, U2, A2]}, make_tokenizer(MODEL_ROLE))


def test_a_tokenizer_without_a_template_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DflashError, match="give one with --chat-template"):
        documents({"messages": [U1, A1]}, make_tokenizer(None))


def test_the_tiny_target() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    expected = [["Hello, you.<|im_end|>", A2["content"] + "<|im_end|>"]]
    assert supervised({"messages": TWO_TURNS}, tokenizer, ("<|im_end|>",)) == expected
