"""The model card of an export: what it is, of which target, from which data, how good, how to serve it."""

import json
from typing import Any

from dflash.checkpoint import Origin
from dflash.drafter import DrafterConfig

RECIPE = (
    "optimizer", "loss", "weights", "gamma", "label_prefix", "lr", "warmup", "clip", "weight_decay", "epochs", "seed",
    "precision", "init_from", "ema",
)  # fmt: skip
DEFINITIONS = """\
Simulated on held-out conversations, greedily: every cycle starts at an anchor whose token is known, the drafter fills
the block in one pass, and drafts count while they equal the target's own choices (argmax, or the data where the store
has no labels).

- **Acceptance length**: tokens that a cycle yields, accepted drafts + 1 (the target's own next token), so 1 to
  {block}. The first token of an answer comes from the prefill and is no cycle; the last cycle counts only the tokens
  that the answer has.
- **Pooled**: all tokens over all cycles. **Macro**: the mean of the answers' means.
- **Accepted** at slot j: share of cycles in which drafts 1 to j were all accepted. **Given those before**: of the
  cycles in which drafts 1 to j-1 were. Slots behind the end of an answer do not count.
"""


def model_card(
    origin: Origin, shape: DrafterConfig, state: dict[str, Any], validation: dict[str, Any], layout: str, dtype: str
) -> str:
    """README.md of the export."""
    lines = [
        "---",
        f"base_model: {origin.target}",
        "tags: [dflash, speculative-decoding]",
        "---",
        f"# DFlash drafter for {origin.target}",
        "",
        f"A drafter of block size {shape.block_size} with {shape.num_layers} layers ({layout} layout, {dtype}), "
        f"trained with dflash. It works with {origin.target} only: it reads that model's hidden states and uses its "
        "embedding and head.",
        "",
        *_target(origin, shape),
        *_data(state.get("counts") or {}),
        *_recipe(state),
        *_acceptance(validation, shape),
        *_serving(origin, shape, layout),
        "## Licence",
        "",
        "To be chosen by whoever publishes it; the licences of the target and of the data may bind you.",
        "",
    ]
    return "\n".join(lines)


def _target(origin: Origin, shape: DrafterConfig) -> list[str]:
    rope = json.dumps(shape.rope_scaling) if shape.rope_scaling else "none"
    facts = [
        ("target", origin.target),
        ("its weights' fingerprint", f"`{origin.weights}`"),
        ("its tokenizer's fingerprint", f"`{origin.tokenizer}`" if origin.tokenizer else "none (data came as tokens)"),
        ("template arguments in the data", f"`{json.dumps(origin.template_args)}`"),
        ("taps", f"{list(shape.taps)}: outputs of these decoder layers, counted from 0, of {shape.num_target_layers}"),
        ("mask token", str(shape.mask_token_id)),
        ("RoPE", f"theta {shape.rope_theta:g}, scaling {rope}, {shape.max_position_embeddings:,} positions"),
        (
            "embedding factor, softcap, logit scale",
            f"{origin.embed_factor:g}, {origin.softcap}, {origin.logit_scale:g}",
        ),
    ]
    return ["## Target", "", *(f"- {name}: {value}" for name, value in facts), ""]


def _data(counts: dict[str, Any]) -> list[str]:
    if not counts:
        return []
    held_out = counts.get("held_out") or {}
    facts = [
        ("conversations", counts.get("conversations")),
        ("documents", counts.get("documents")),
        ("tokens", counts.get("tokens")),
        ("supervised tokens", counts.get("supervised_tokens")),
        ("held out (documents)", held_out.get("documents")),
        ("truncated", counts.get("truncated")),
    ]
    dropped = ", ".join(f"{cause} {number:,}" for cause, number in (counts.get("dropped") or {}).items() if number)
    lines = [f"- {name}: {value:,}" for name, value in facts if isinstance(value, int)]
    return ["## Data", "", *lines, *([f"- dropped: {dropped}"] if dropped else []), ""]


def _recipe(state: dict[str, Any]) -> list[str]:
    settings = state["identity"]["settings"]
    chosen = {name: settings[name] for name in RECIPE if settings.get(name) not in (None, False)}
    steps = (state["identity"].get("derived") or {}).get("steps")
    line = f"Step {state['step']:,} of {steps:,}." if steps is not None else f"Step {state['step']:,}."
    return [
        "## Recipe", "", line, "", *(f"- {name}: {value}" for name, value in chosen.items()), "", "All settings:",
        "", "```json", json.dumps(settings, sort_keys=True), "```", "",
    ]  # fmt: skip


def _acceptance(validation: dict[str, Any], shape: DrafterConfig) -> list[str]:
    length = validation.get("acceptance_length") or {}
    if not length.get("pooled"):
        return ["## Acceptance", "", "Not measured at this step; `dflash eval` measures it.", ""]
    lines = [
        "## Acceptance",
        "",
        f"**{length['pooled']:.3f}** pooled, **{length['macro']:.3f}** macro.",
        "",
        DEFINITIONS.format(block=shape.block_size),
        "| slot | accepted | given those before |",
        "|---|---|---|",
    ]
    for slot in validation["per_slot"]:
        shares = [f"{slot[key]:.3f}" if slot[key] is not None else "" for key in ("acceptance", "conditional")]
        lines.append(f"| {slot['slot']} | {shares[0]} | {shares[1]} |")
    return [*lines, ""]


def _serving(origin: Origin, shape: DrafterConfig, layout: str) -> list[str]:
    drafts = shape.block_size - 1
    setting = json.dumps({"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": drafts})
    commands = [f"vllm serve {origin.target} --speculative-config '{setting}'"]
    if layout == "z-lab":
        commands += [
            f"python -m sglang.launch_server --model-path {origin.target} --speculative-algorithm DFLASH \\",
            "    --speculative-draft-model-path THIS_FOLDER",
        ]
    notes = [f"Exactly {drafts} speculative tokens: the block size less one. Mind the template arguments above."]
    if layout == "z-lab" and origin.embed_factor != 1.0:
        notes.append(
            f"The target multiplies its embedding by {origin.embed_factor:g}, and so must the server for the drafter. "
            "Where it does not, acceptance is poor: export with `--layout speculators`, which stores the product."
        )
    if layout == "speculators":
        notes.append("SGLang loads the z-lab layout only: export with `--layout z-lab` for it.")
    if len(set(shape.windows)) > 1:
        notes.append("Full and sliding layers together: vLLM needs its V2 model runner for them.")
    if shape.num_target_layers - 1 in shape.taps:
        notes.append(
            "The last layer is tapped before the final norm, as vLLM and SGLang read it; z-lab's own class would read "
            "it after the norm, so it cannot run this drafter."
        )
    return ["## Serving", "", "```", *commands, "```", "", *(line for note in notes for line in (note, ""))]
