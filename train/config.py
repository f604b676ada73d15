"""Settings of `dflash train` and `dflash export`. Imports nothing heavy: the command line loads it for --help."""

from dataclasses import dataclass

from dflash.config import REQUIRED, parse_size, setting
from dflash.errors import DflashError

LOSSES = ("ce", "ce-tokens", "kl")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run: shape, objective, optimiser, batch and folder. Lengths of time are in optimiser steps."""

    store: str = setting(REQUIRED, "The store that `dflash extract` wrote.")
    run: str = setting(REQUIRED, "The run folder; the same command again resumes it.")
    target: str | None = setting(None, "The target's folder, only to check that the store is of this target.")

    num_layers: int = setting(5, "Layers of the drafter.")
    block_size: int = setting(16, "Tokens of a block: the anchor and what is drafted in one pass.")
    num_heads: int | None = setting(None, "Query heads; the target's where its attention is plain.")
    num_kv_heads: int | None = setting(None, "Key and value heads; the target's where its attention is plain.")
    head_dim: int | None = setting(None, "Dimension of a head; the target's where its attention is plain.")
    intermediate_size: int | None = setting(
        None, "Width of the MLP; the target's if dense, else 3 times the hidden size."
    )
    mask_token: str | None = setting(None, "Id or text of the token that fills the slots to draft.")
    sliding_window: int | None = setting(
        None, "Positions that a sliding layer sees, its own included; attention is full unless given."
    )
    full_layers: int = setting(1, "With --sliding-window: how many of the last layers keep full attention.")

    steps: int | None = setting(None, "Optimiser steps; instead of --epochs.", instead_of="epochs")
    epochs: float | None = setting(None, "Passes over the rows (6 unless --steps is given).", instead_of="steps")
    token_budget: int | None = setting(
        None, "Padded context tokens of a micro-step: 12,288 on a GPU, 2,048 on a CPU, at least one row."
    )
    batch_tokens: int | None = setting(
        None, "Padded context tokens of an optimiser step: 4 budgets on a GPU, 1 on a CPU."
    )
    anchors: int | None = setting(None, "Most anchors of a micro-step; what fits unless given.")
    anchor_density: float = setting(1 / 6, "Anchors per supervised token.")

    loss: str = setting(
        "ce", "ce: the target's own argmax; ce-tokens: the data; kl: the stored top-k or last state.", choices=LOSSES
    )
    weights: str = setting("decay", "Weights of a block's slots.", choices=("decay", "dpace"))
    gamma: float | None = setting(None, "Decay of the weights, exp(-(j-1)/gamma); the paper's for the block size.")
    label_prefix: str = setting(
        "agree", "agree: score a slot while all before it agree with the target; any: score it anyway.",
        choices=("agree", "any"),
    )  # fmt: skip

    lr: float = setting(6e-4, "Peak learning rate; a cosine falls to zero from there.")
    warmup: float = setting(0.04, "Share of the steps in which the learning rate rises.")
    clip: float = setting(1.0, "Largest norm of the gradient.")
    optimizer: str = setting(
        "adamw", "adamw, or muon for the matrices and AdamW for the vectors.", choices=("adamw", "muon")
    )
    weight_decay: float = setting(0.0, "Weight decay, for matrices only.")
    ema: float | None = setting(
        None, "Decay of a running average of the weights, which is then validated and exported; none unless given."
    )
    seed: int = setting(0, "Seed of initialisation, order and anchors.")

    precision: str | None = setting(
        None,
        "Of the arithmetic; masters are always fp32. bf16 on a GPU, fp32 on a CPU; fp8 multiplies in e4m3, on Hopper "
        "and newer.",
        choices=("fp32", "bf16", "fp8"),
    )
    graph: str | None = setting(
        None,
        "bucket: a CUDA graph for every bucket, which a GPU runs by default; budget: one for all, padded to the "
        "largest; off: no graphs, as on a CPU.",
        choices=("bucket", "budget", "off"),
    )
    io: str = setting(
        "mmap",
        "mmap: rows come out of the page cache; direct: past it, for stores larger than the memory.",
        choices=("mmap", "direct"),
    )
    memory: str | None = setting(
        None, "GPU memory to stay within, like 24GB; the whole card's unless given.", metavar="SIZE"
    )
    deterministic: bool = setting(False, "Only kernels that repeat bit for bit, also on another day; slower on a GPU.")
    dry_run: bool = setting(
        False, "Capture every bucket, run three steps, print time and memory against the forecast, write nothing."
    )
    wandb: str | None = setting(None, "Send the figures to this project of wandb as well.", metavar="PROJECT")
    eval_every: int | None = setting(None, "Steps between validations on held-out rows; a tenth of the run.")
    save_every: int | None = setting(None, "Steps between checkpoints, those of --eval-every; a new best is kept too.")
    keep: int = setting(2, "Newest checkpoints to keep, beside the best.")
    partial: bool = setting(
        False, "Train on the rows that an unfinished store has; the run keeps to them when it is resumed."
    )
    init_from: str | None = setting(None, "A drafter's folder to start from; shapes and taps must be the same.")

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise DflashError("--steps and --epochs both say how long to train; give one of them.")
        at_least = {
            "num_layers": 1, "block_size": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "intermediate_size": 1,
            "steps": 0, "token_budget": 1, "batch_tokens": 1, "anchors": 1, "eval_every": 1, "save_every": 1, "keep": 1,
            "seed": 0, "full_layers": 0, "sliding_window": self.block_size,
        }  # fmt: skip
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise DflashError(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
        for name in ("epochs", "gamma", "lr", "clip", "anchor_density"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise DflashError(f"--{name.replace('_', '-')} must be a positive number, not {value}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise DflashError(f"--ema must lie between 0 and 1, like 0.999, not {self.ema}.")
        if self.memory is not None:
            parse_size(self.memory)
        if not 0 <= self.warmup <= 1 or not 0 <= self.weight_decay < float("inf"):
            raise DflashError(
                f"--warmup must lie between 0 and 1 and --weight-decay must not be negative, not {self.warmup} and "
                f"{self.weight_decay}."
            )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """`dflash export RUN|CHECKPOINT`: write a drafter as servers load it."""

    source: str = setting(
        REQUIRED,
        "A run folder (its best checkpoint is taken) or one checkpoint.",
        metavar="RUN|CHECKPOINT",
        positional=True,
    )
    out: str | None = setting(None, "Folder to write; RUN/export unless given.")
    layout: str = setting(
        "z-lab",
        "Whose loader reads it. z-lab: z-lab's class, vLLM and SGLang; speculators: vLLM's speculators loader.",
        choices=("z-lab", "speculators"),
    )
    target: str | None = setting(None, "The live target, to compare its tapped layers with the stored states.")
    trust_remote_code: bool = setting(False, "Run code that comes with the target.")
    dtype: str = setting("bfloat16", "Of the stored tensors.", choices=("bfloat16", "float16", "float32"))
