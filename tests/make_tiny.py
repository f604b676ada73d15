"""Tiny random targets with a byte-level tokenizer and a chat template, made without any download.

python tests/make_tiny.py OUT [family] [seed]
"""

import sys
from pathlib import Path
from typing import Any

import torch

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
# family -> (prefix of the transformers classes, what differs from SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3-untied": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"head_dim": None}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "mistral": ("Mistral", {"sliding_window": 8, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": ("Gemma3Text:Gemma3", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3", {"head_dim": None}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "cohere": ("Cohere", {"logit_scale": 0.25, "head_dim": None}),
    "granite": ("Granite", {"logits_scaling": 6.0, "embedding_multiplier": 12.0, "head_dim": None}),
    "qwen3-next": ("Qwen3Next", EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32}),
    "qwen3.5": ("Qwen3_5Text:Qwen3_5", LINEAR | {"tie_word_embeddings": False}),
    "gemma3-vision": ("Gemma3", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "qwen3.5-vision": ("Qwen3_5", LINEAR | {"tie_word_embeddings": False}),
}
# The part of a multimodal target that reads pictures, as small as its config lets it be.
VISION: dict[str, dict[str, Any]] = {
    "gemma3-vision": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 16, "patch_size": 8,
    },
    "qwen3.5-vision": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "patch_size": 8,
        "num_position_embeddings": 16, "out_hidden_size": 64,
    },
}  # fmt: skip


def make_tokenizer() -> Any:
    """One token a byte behind the three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(SPECIAL + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(family: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    import transformers

    prefix, differs = FAMILIES[family]
    config_prefix, _, model_prefix = prefix.partition(":")
    settings = {k: v for k, v in (SHAPE | differs | changes).items() if v is not None or k == "bos_token_id"}
    kind, config_class = "ForCausalLM", getattr(transformers, f"{config_prefix}Config")
    if vision := VISION.get(family):
        text = getattr(transformers, f"{config_prefix}TextConfig")(**settings)
        kind, tied = "ForConditionalGeneration", settings["tie_word_embeddings"]
        config = config_class(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied)
    else:
        config = config_class(**settings)
    torch.manual_seed(seed)
    return getattr(transformers, f"{model_prefix or config_prefix}{kind}")(config).eval()


def make_tiny(
    out: Path, family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write a random target into the folder `out`; `changes` go to its config."""
    make_model(family, seed, **changes).to(dtype).save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    return out


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def make_gguf(path: Path, kind: str = "Q8_0", pre: str = "default") -> Any:
    """Write a random Llama as a GGUF file with matrices of type `kind`; return the model that went into it."""
    import gguf

    model, tokenizer = make_model("llama"), make_tokenizer()
    c, writer, quantised = model.config, gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType[kind]
    for add, value in (
        ("context_length", c.max_position_embeddings), ("embedding_length", c.hidden_size),
        ("block_count", c.num_hidden_layers), ("feed_forward_length", c.intermediate_size),
        ("head_count", c.num_attention_heads), ("head_count_kv", c.num_key_value_heads),
        ("layer_norm_rms_eps", c.rms_norm_eps), ("rope_freq_base", 10000.0), ("rope_dimension_count", c.head_dim),
        ("vocab_size", c.vocab_size), ("tokenizer_model", "gpt2"), ("tokenizer_pre", pre), ("eos_token_id", 2),
        ("pad_token_id", 0), ("chat_template", tokenizer.chat_template),
    ):  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    tokens += ["Ġt", *(f"[{i}]" for i in range(len(tokens) + 1, c.vocab_size))]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < len(SPECIAL) else 1 for i in range(len(tokens))])
    writer.add_token_merges(["Ġ t"])
    for name, tensor in model.state_dict().items():
        name, array = _as_in_gguf(name, tensor.float().numpy(), c)
        exact = array.ndim == 1 or kind == "F32"
        writer.add_tensor(
            name, array if exact else gguf.quants.quantize(array, quantised), raw_dtype=None if exact else quantised
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_in_gguf(name: str, array: Any, config: Any) -> tuple[str, Any]:
    """llama.cpp's name, and its order of the rows of Q and K: the halves of the rotary embedding interleaved."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module = name.removesuffix(".weight")
    if module in top:
        return f"{top[module]}.weight", array
    _, _, layer, rest = module.split(".", 3)
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}.get(rest)
    if heads:
        array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight", array


if __name__ == "__main__":
    arguments = sys.argv[1:]
    make_tiny(Path(arguments[0]), *(arguments[1:2] or ["qwen3"]), seed=int((arguments[2:] or ["0"])[0]))
