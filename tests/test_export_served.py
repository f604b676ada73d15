"""An export as a server reads it: config.json through transformers, tensors by name, a forward of transformers' parts.

Nothing of dflash's own drafter takes part here, so a name, an epsilon or a RoPE that only we understand would show.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_drafter import small_config
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash.checkpoint import write_drafter
from dflash.checkpoint.speculators import copies
from dflash.drafter import Drafter, initialise
from dflash.loss import Head
from dflash.train.gate import CheckRow, Ends, draft_logits

LENGTH, ANCHOR, LAYERS = 30, 17, 6


class Served:
    """The drafter of a folder, by the rules of its layout (facts: 1.2 to 1.4 for the forward, 2 for names and keys)."""

    def __init__(self, folder: Path) -> None:
        document = json.loads((folder / "config.json").read_text())
        if "speculators_model_type" in document:
            layer, self.mask = document["transformer_layer_config"], document["mask_token_id"]
            self.taps = [number - 1 for number in document["aux_hidden_state_layer_ids"]]
            assert document["sliding_window_non_causal"], "vLLM would make every layer causal"
        else:
            layer, self.mask = document, document["dflash_config"]["mask_token_id"]
            self.taps = document["dflash_config"]["target_layer_ids"]
        self.block = document["block_size"]
        self.config = Qwen3Config.from_dict(dict(layer))
        self.tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        norm = Qwen3RMSNorm(x.shape[-1], eps=self.config.rms_norm_eps)
        norm.weight.data = self.tensors[f"{name}.weight"]
        return norm(x)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """[1, heads, tokens, D] of [tokens, …]."""
        return self.linear(x, name).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)[None]

    @torch.no_grad()
    def draft(self, hidden_states: list[torch.Tensor], token: int, anchor: int, embed: torch.Tensor) -> torch.Tensor:
        """Outputs [B, H] of the block at `anchor`; hidden_states[k] as transformers counts them, k = 0 embeddings."""
        context = torch.cat([hidden_states[tap + 1][:anchor] for tap in self.taps], -1)
        context = self.norm(self.linear(context, "fc"), "hidden_norm")
        x = embed[torch.tensor([token, *[self.mask] * (self.block - 1)])]
        cos, sin = Qwen3RotaryEmbedding(self.config)(x, torch.arange(anchor + self.block)[None])
        for number in range(self.config.num_hidden_layers):
            x = self.layer(f"layers.{number}", x, context, cos, sin)
        return self.norm(x, "norm")

    def layer(
        self, name: str, x: torch.Tensor, context: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        h, attention = self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn"
        query = self.norm(self.heads(h, f"{attention}.q_proj"), f"{attention}.q_norm")
        both = torch.cat((context, h))
        key = self.norm(self.heads(both, f"{attention}.k_proj"), f"{attention}.k_norm")
        value = self.heads(both, f"{attention}.v_proj")
        _, key = apply_rotary_pos_emb(key, key, cos, sin)
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -len(h) :], sin[:, -len(h) :])
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = x + self.linear(out, f"{attention}.o_proj")
        h = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = self.linear(h, f"{name}.mlp.gate_proj"), self.linear(h, f"{name}.mlp.up_proj")
        return x + self.linear(F.silu(gate) * up, f"{name}.mlp.down_proj")


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"rope_theta": 5e5, "rms_norm_eps": 1e-3}, {"taps": (0, 2, 4), "block_size": 8},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }},
    ],
)  # fmt: skip
def test_a_server_drafts_what_was_trained(tmp_path: Path, changes: dict[str, Any], layout: str) -> None:
    config = small_config(**changes)
    drafter = Drafter(config)
    initialise(drafter, seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    hidden_states = [torch.randn(LENGTH, 32, generator=generator) for _ in range(LAYERS + 1)]
    embed, head = (torch.randn(50, 32, generator=generator) for _ in range(2))
    ids = torch.randint(50, (LENGTH,), generator=generator)
    factor = 3.0 if layout == "speculators" else 1.0
    copied = copies(embed, factor, head) if layout == "speculators" else None
    write_drafter(tmp_path, config, dict(drafter.named_parameters()), "float32", copies=copied)
    served = Served(tmp_path)
    own_embed = served.tensors.get("embed_tokens.weight", embed)
    own_head = served.tensors.get("lm_head.weight", head)
    theirs = served.draft(hidden_states, int(ids[ANCHOR]), ANCHOR, own_embed)[1:] @ own_head.T

    taps = torch.cat([hidden_states[tap + 1] for tap in config.taps], -1)  # tap t is the output of layer t
    row = CheckRow("row", taps[: ANCHOR + 1], ids[: ANCHOR + 1])  # its last anchor is at ANCHOR
    ours = draft_logits(drafter, row, Ends(embed, factor, Head(head)))[-1]
    assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()
