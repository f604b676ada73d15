"""What a run will take of the device and the host, from shapes alone, and what to give up where a card is too small.

Calibrated on an H200 (tests/test_train_memory.py has the measured peaks). A step's memory is the tensors that the
compiled forward keeps for the backward, counted in multiples of the widths below, plus the larger of what the loss
and the first products of the backward need on top. Graphs share one pool, so the largest bucket decides.

Where that does not fit, cheap things go first (`LADDER`): fewer anchors a replay and several replays a batch, which
repeats the context's projections; then activation checkpointing (train/layerwise.py), which repeats the layers'
forward; then the embedding moves to pinned host memory, from where a step reads its anchors' rows alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dflash.drafter import DrafterConfig
from dflash.errors import DflashError
from dflash.flex import TILE, anchors_per_tile, round_up
from dflash.loss import CHUNK_LOGITS

# Kept for the backward, per block token and layer, in multiples of hidden size, query, key and MLP width: the residual
# and its normed copy, twice; queries before and behind RoPE and the attention's output; keys before and behind RoPE
# and values, again in [context | blocks]; gate, up and their product.
KEPT_HIDDEN, KEPT_QUERY, KEPT_KEY, KEPT_INNER = 4, 3, 4, 3
KEPT_CONTEXT_KEY = 3  # per context token and layer
BACKWARD_HIDDEN, BACKWARD_INNER = 2, 3  # alive in a layer's backward beside what was kept
CONTEXT = int(0.6e9)  # the CUDA context and libraries, outside the allocator
SLOTS, STAGES = 3, 2  # as in train/reader.py
SMALL_CHUNK = 1 << 27
REPLAY_TOKENS = (16_384, 8_192, 4_096, 2_048)  # block tokens of one replay
STATES, VALIDATION_SHARE, LOGIT_BYTES = 1 << 28, 4, 8  # of a validation's forward: dflash/simulate.py


@dataclass(frozen=True)
class Economy:
    """What a step does to need less; nothing of it changes what is computed."""

    anchors: int | None = None  # most of one replay
    layerwise: bool = False  # activation checkpointing
    host_embedding: bool = False
    chunk: int | None = None  # logits of one piece of the loss

    def __str__(self) -> str:
        words = [f"{self.anchors} anchors a replay"] if self.anchors is not None else []
        words += ["activation checkpointing"] if self.layerwise else []
        words += ["the embedding in host memory"] if self.host_embedding else []
        return ", ".join(words) or "nothing given up"


PLAIN = Economy()


@dataclass(frozen=True)
class Need:
    """The shapes that decide: the drafter's, the widest micro-batch's, and how parameters are kept."""

    shape: DrafterConfig
    sizes: tuple[tuple[int, int], ...]  # (context tokens, anchors) of each graph's micro-batch
    token_bytes: int  # of a stored context token
    compute_bytes: int = 2  # of a number in the compute dtype
    tied: bool = False  # the head is the embedding
    muon: bool = False
    ema: bool = False
    fp8: bool = False
    cuda: bool = True

    @property
    def largest(self) -> int:
        return max(context for context, _ in self.sizes)


@dataclass(frozen=True)
class Forecast:
    """Bytes: the first five on the device at a step's peak, of which `step` is the graphs' pool."""

    parameters: int  # masters and compute weights
    optimiser: int  # gradients, moments, average
    frozen: int  # embedding and head
    inputs: int  # static inputs and the stages before them
    step: int
    validation: int  # outside the pool, between steps
    pinned: int  # in host memory

    @property
    def device(self) -> int:
        """Of the allocator, at the peak of a step."""
        return self.parameters + self.optimiser + self.frozen + self.inputs + self.step

    @property
    def card(self) -> int:
        """What the card must have free."""
        return self.device + self.validation + CONTEXT

    def to_json(self) -> dict[str, int]:
        return self.__dict__ | {"device": self.device}


def parameters_of(shape: DrafterConfig) -> tuple[int, int]:
    """Numbers in matrices and in vectors."""
    hidden, query, key = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * shape.intermediate_size
    matrices = len(shape.taps) * hidden**2 + shape.num_layers * layer
    return matrices, 2 * hidden + shape.num_layers * 2 * (hidden + shape.head_dim)


def forecast(need: Need, economy: Economy = PLAIN) -> Forecast:
    matrices, vectors = parameters_of(need.shape)
    total, copies = matrices + vectors, need.compute_bytes if need.compute_bytes != 4 else 0
    moments = 4 * matrices + 8 * vectors if need.muon else 8 * total
    table = need.shape.vocab_size * need.shape.hidden_size * need.compute_bytes
    away = economy.host_embedding and not need.tied
    inputs = (1 + STAGES if need.cuda else SLOTS) * need.largest * need.token_bytes
    pinned = SLOTS * need.largest * need.token_bytes + (table if away else 0)
    return Forecast(
        parameters=(4 + copies) * total,
        optimiser=4 * total + moments + (4 * total if need.ema else 0),
        frozen=(table if need.tied or away else 2 * table) + (2 * table // need.compute_bytes if need.fp8 else 0),
        inputs=inputs,
        step=max(step_bytes(need, *each, economy) for each in need.sizes),
        validation=STATES + LOGIT_BYTES * (logits_at_once(need, economy) // VALIDATION_SHARE),
        pinned=pinned if need.cuda else 0,
    )


def logits_at_once(need: Need, economy: Economy) -> int:
    return economy.chunk or CHUNK_LOGITS["cuda" if need.cuda else "cpu"]


def step_bytes(need: Need, context: int, anchors: int, economy: Economy = PLAIN) -> int:
    """The most that one replay of a micro-batch has allocated."""
    shape, size = need.shape, need.compute_bytes
    anchors = round_up(min(anchors, economy.anchors or anchors), anchors_per_tile(shape.block_size))
    blocks, context = anchors * shape.block_size, round_up(context, TILE)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    widths = KEPT_HIDDEN * hidden + KEPT_QUERY * query + KEPT_KEY * key + KEPT_INNER * inner
    layer = size * (widths * blocks + KEPT_CONTEXT_KEY * key * context)
    ends = size * ((len(shape.taps) + 2) * hidden * context + 2 * hidden * blocks)
    scored = anchors * (shape.block_size - 1)
    chunk = min(logits_at_once(need, economy), scored * shape.vocab_size)
    loss = size * (chunk + 2 * scored * hidden)
    backward = size * (BACKWARD_HIDDEN * hidden + BACKWARD_INNER * inner) * blocks
    matrices, vectors = parameters_of(shape)
    if economy.layerwise:
        inputs = size * shape.num_layers * hidden * blocks
        gradients = size * (matrices // shape.num_layers)
        return ends + inputs + max(loss, layer + backward + gradients)
    gradients = size * (matrices + vectors)  # of all parameters, when the last activations go
    return max(ends + shape.num_layers * layer + max(loss, backward), layer + gradients)


def ladder(need: Need) -> Iterator[Economy]:
    """From nothing given up to everything; replays keep thousands of tokens, or products would run slow."""
    yield PLAIN
    if not need.cuda:
        return
    most = max(anchors for _, anchors in need.sizes)
    sizes = [max(1, tokens // need.shape.block_size) for tokens in REPLAY_TOKENS]
    for layerwise, away in ((False, False), (True, False), (True, True)):
        if away and need.tied:
            return
        for anchors in sizes:
            if anchors < most or layerwise:
                yield Economy(min(anchors, most), layerwise, away, SMALL_CHUNK)


def choose(need: Need, limit: int | None) -> Economy:
    """The first of the ladder that stays within `limit` bytes; else one sentence with what would fit."""
    last = PLAIN
    for economy in ladder(need):
        if limit is None or forecast(need, economy).card <= limit:
            return economy
        last = economy
    assert limit is not None, "without a limit the first one fits"
    raise DflashError(
        f"This run needs {gigabytes(forecast(need, last).card)} of device memory ({last}), but "
        f"{gigabytes(limit)} may be used; {what_fits(need, last, limit)}."
    )


def what_fits(need: Need, economy: Economy, limit: int) -> str:
    """A smaller run: fewer context tokens and anchors, else fewer layers too."""
    for layers in range(need.shape.num_layers, 0, -1):
        shape = replace(need.shape, num_layers=layers, layer_types=need.shape.layer_types[:layers])
        for share in (2, 4, 8, 16):
            context = need.largest // share
            anchors = max(1, max(anchors for _, anchors in need.sizes) // share)
            smaller = replace(need, shape=shape, sizes=((context, anchors),))
            if context and forecast(smaller, economy).card <= limit:
                fewer = f" --num-layers {layers}" if layers < need.shape.num_layers else ""
                return f"--token-budget {context} --anchors {anchors}{fewer} would fit, if no bucket is longer"
    return "no drafter of this width fits; use a larger card"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def sentence(found: Forecast, economy: Economy) -> str:
    """What is printed before a run starts."""
    parts = {
        "parameters": found.parameters, "gradients and optimiser": found.optimiser, "embedding and head": found.frozen,
        "inputs": found.inputs, "step": found.step,
    }  # fmt: skip
    listed = ", ".join(f"{name} {gigabytes(count)}" for name, count in parts.items())
    pinned = f"; {gigabytes(found.pinned)} pinned on the host" if found.pinned else ""
    return f"Memory: {gigabytes(found.device)} ({listed}){pinned}; {economy}."
