"""Chat templates of different structures, written for the tests, and a byte-level tokenizer for them.

One id per byte, plus special tokens: what a test says of supervised text then holds to the byte.
"""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Tiny.<|im_end|>\n{% endif %}" + CHATML
)
HEADER_IDS = (
    "<|begin|>{% for m in messages %}<|start_header|>{{ m.role }}<|end_header|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
)
MODEL_ROLE = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Drops the reasoning of all turns but those after the last user turn, and puts an empty think block where none is.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% set reason = m.reasoning_content or '' %}"
    "{% if not reason and '</think>' in content %}{% set reason = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1] | trim %}{% endif %}"
    "{% if loop.index0 > ns.last %}<|im_start|>assistant\n<think>\n{{ reason | trim }}\n</think>\n\n{{ content }}"
    "{% else %}<|im_start|>assistant\n{{ content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Its generation prompt opens the think block, and no switch closes it.
ALWAYS_THINKING = THINKING.replace(
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
)
TWO_TOKEN_END = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|><|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
NO_END = (
    "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)
WHITE_SPACE = (
    "{% for m in messages %}\n <|im_start|> {{ m.role }}\n\n  {{ m.content }} \n<|im_end|>\n\n{% endfor %}"
    "{% if add_generation_prompt %}\n <|im_start|> assistant\n\n{{ '  ' }}{% endif %}"
)
# The answer goes to a channel that the target names itself; earlier analysis is dropped.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Hides the reasoning inside an answer, and its prompt says what the rendered turn does not.
HIDES_REASONING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|bot|>{{ m.content.split('</think>')[-1] }}<|eot|>"
    "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|><think>\n{% endif %}"
)

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>",
    "<|bot|>", "<|user|>",
)  # fmt: skip
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def make_tokenizer(template: str | None, eos: str = "<|im_end|>", merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """`merges` are pairs of byte-level texts (a newline is Ċ, a space is Ġ)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *alphabet, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(list(NOT_SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer
