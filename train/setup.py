"""Everything a run is made of before its first step: store, drafter, batch plan, optimiser; checked in this order."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dflash.checkpoint import read_config, read_drafter
from dflash.drafter import Drafter, DrafterConfig, RopeTable, initialise
from dflash.errors import DflashError
from dflash.files import replacing
from dflash.loss import Head, decay_weights, default_gamma
from dflash.store import Store
from dflash.target import TargetSpec, read_frozen, resolve_target, weights_fingerprint
from dflash.threads import set_threads
from dflash.train.config import TrainConfig
from dflash.train.optimiser import Flat, Optimiser, flatten
from dflash.train.order import BucketRows, Order, anchors_of
from dflash.train.origin import check_start
from dflash.train.shape import drafter_config
from dflash.train.step import Model, Objective, tap_rms

MAX_ROWS = 64  # of a micro-batch
BLOCK_TOKENS = {"cuda": 32_768, "cpu": 2_048}  # most anchors × block of a micro-step unless --anchors says otherwise
TOKEN_BUDGET = {"cuda": 12_288, "cpu": 2_048}
BUDGETS_A_STEP = {"cuda": 4, "cpu": 1}
DEFAULT_EPOCHS = 6.0
ROWS = "rows.npz"  # of a partial run: the rows it keeps to
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Ranks:
    """This process among those of torchrun; alone without it."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_reduce(self, *tensors: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.world > 1:
            try:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            except RuntimeError as error:  # what gloo and NCCL raise when a peer is gone
                first = str(error).splitlines()[0]
                raise DflashError(
                    f"Rank {self.rank} lost another rank ({first}); the same command resumes from the last checkpoint."
                ) from None

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_reduce(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"))

    def leave(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks() -> tuple[Ranks, torch.device]:
    """The ranks of this run and the device of this one."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        set_threads()
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    return Ranks(rank, world), device


@dataclass(frozen=True)
class Plan:
    """How many steps, of how many micro-steps, in which order."""

    order: Order
    micros_per_step: int
    steps: int

    @property
    def largest(self) -> int:
        """Padded tokens of the largest micro-batch."""
        return max(bucket.rows_per_micro * bucket.ceiling for bucket in self.order.buckets)


def open_store(config: TrainConfig) -> Store:
    """The store, complete and of the right kind for the objective; else one sentence."""
    store = Store.open(config.store)
    missing = store.missing()
    if missing and not config.partial:
        raise DflashError(
            f"Store {config.store} lacks {len(missing)} of its {len(store.shards())} shards; the `dflash extract` "
            f"command that began it (--store {config.store}) completes it, --partial trains on what is there."
        )
    labels = store.meta.labels
    if config.loss == "kl" and not labels.startswith("topk:") and labels != "last-hidden":
        raise DflashError(
            f"--loss kl needs a store made with --labels topk:K or last-hidden; {config.store} has {labels}."
        )
    if config.loss == "ce" and labels == "tokens":
        raise DflashError(
            f"Store {config.store} has no labels of the target (--labels tokens); train with --loss ce-tokens."
        )
    if config.target is not None:
        found, stored = weights_fingerprint(resolve_target(config.target)), store.meta.target["weights"]
        if found != stored:
            raise DflashError(
                f"--target {config.target} (weights {found[:12]}) is not the target of store {config.store} "
                f"({store.meta.target['name']}, weights {stored[:12]}); use a store extracted from it."
            )
    return store


def rows_to_train_on(config: TrainConfig, store: Store) -> dict[str, np.ndarray] | None:
    """With --partial the rows whose shards are there, as the run froze them when it began; None for all."""
    if not config.partial:
        return None
    frozen = Path(config.run) / ROWS
    if frozen.exists():
        with np.load(frozen, allow_pickle=False) as rows:
            return {name: rows[name] for name in rows.files}
    return {
        bucket.name: np.array(
            [row for row in range(bucket.rows) if store.length(bucket.name, row) is not None], np.int64
        )
        for bucket in store.buckets
    }


def freeze_rows(config: TrainConfig, rows: dict[str, np.ndarray] | None) -> None:
    """Write the rows that a partial run keeps to."""
    if rows is not None:
        with replacing(Path(config.run) / ROWS) as sibling, sibling.open("wb") as file:
            np.savez(file, allow_pickle=False, **rows)


def batch_plan(
    config: TrainConfig, store: Store, device: torch.device, world: int, rows: dict[str, np.ndarray] | None = None
) -> Plan:
    """Micro-batches of every bucket that has rows to train on, and the number of optimiser steps."""
    budget = config.token_budget or TOKEN_BUDGET[device.type]
    most = config.anchors or max(1, BLOCK_TOKENS[device.type] // config.block_size)
    buckets = []
    for bucket in store.buckets:
        available = None if rows is None or bucket.held_out else rows[bucket.name]
        count = bucket.rows if available is None else len(available)
        if bucket.held_out or not count:
            continue
        rows_per_micro = max(1, min(MAX_ROWS, budget // bucket.ceiling, count))
        micros = -(-count // rows_per_micro)
        tokens = store.plan.rows[bucket.name].supervised
        supervised = int((tokens if available is None else tokens[available]).sum())
        anchors = anchors_of(supervised, micros, config.anchor_density, most)
        buckets.append(BucketRows(bucket.name, bucket.ceiling, count, rows_per_micro, anchors, available))
    if not buckets:
        raise DflashError(f"Store {config.store} has no rows to train on; extract more conversations.")
    order = Order(buckets, config.seed)
    batch_tokens = config.batch_tokens or BUDGETS_A_STEP[device.type] * budget
    micros_per_step = -(-batch_tokens // budget)
    micros_per_step = -(-micros_per_step // world) * world
    epochs = config.epochs or DEFAULT_EPOCHS
    steps = config.steps if config.steps is not None else math.ceil(epochs * order.micros_per_epoch / micros_per_step)
    return Plan(order, micros_per_step, steps)


def build(
    config: TrainConfig, store: Store, device: torch.device
) -> tuple[Model, Objective, Flat, Optimiser, DrafterConfig]:
    """The drafter (initialised from the seed or --init-from) in flat memory, with its frozen parts and optimiser."""
    spec = TargetSpec.read(store.target_folder, name=store.meta.target["name"])
    shape = drafter_config(config, store, spec)
    precision = config.precision or ("bf16" if device.type == "cuda" else "fp32")
    dtype = DTYPES[precision]
    frozen = read_frozen(store.target_folder, dtype=dtype, device=str(device))
    drafter = Drafter(shape)
    initialise(drafter, config.seed)
    if config.init_from is not None:
        warm_start(drafter, Path(config.init_from), store)
    flat = flatten(drafter, dtype, device)
    ceiling = max(bucket.ceiling for bucket in store.buckets)
    head = Head(frozen.head, spec.logit_scale / spec.logit_divisor, spec.softcap)
    model = Model(
        drafter=drafter,
        rope=RopeTable(shape, ceiling + shape.block_size, dtype, device),
        embed_VH=frozen.embed,
        embed_factor=spec.embed_factor,
        head=head,
        tap_rms=tap_rms(store, device),
    )
    gamma = config.gamma or default_gamma(shape.block_size)
    decay = decay_weights(shape.block_size, gamma, device) if config.weights == "decay" else None
    objective = Objective(loss=config.loss, decay_J=decay, prefix=config.label_prefix)
    return model, objective, flat, Optimiser(flat, weight_decay=config.weight_decay, clip=config.clip), shape


def warm_start(drafter: Drafter, folder: Path, store: Store) -> None:
    """Weights of another drafter of the same shape and taps; a difference is named."""
    theirs, origin = read_config(folder)
    check_start(drafter.config, theirs, origin, folder, store)
    _, tensors = read_drafter(folder)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def token_ids(store: Store) -> dict[str, Any]:
    """bos, eos and pad of the target's config, for the drafter's."""
    raw = json.loads((store.target_folder / "config.json").read_text())
    text = raw.get("text_config", raw)
    return {name: text.get(name, raw.get(name)) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
