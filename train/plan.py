"""What a run trains on: the store, fit for the objective; the rows; micro-batches and steps that follow from them."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash.errors import DflashError
from dflash.files import replacing
from dflash.progress import say
from dflash.store import Store
from dflash.target import resolve_target, weights_fingerprint
from dflash.train.config import TrainConfig
from dflash.train.folder import checkpoints
from dflash.train.order import BucketRows, Order, anchors_of

MAX_ROWS = 64  # of a micro-batch
BLOCK_TOKENS = {"cuda": 32_768, "cpu": 2_048}  # most anchors × block of a micro-step unless --anchors says otherwise
TOKEN_BUDGET = {"cuda": 12_288, "cpu": 2_048}
BUDGETS_A_STEP = {"cuda": 4, "cpu": 1}
DEFAULT_EPOCHS = 6.0
ROWS = "rows.npz"  # of a partial run: the rows it keeps to


@dataclass(frozen=True)
class Plan:
    """How many steps, of how many micro-steps, in which order."""

    order: Order
    micros_per_step: int
    steps: int

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(padded tokens, anchors) of each bucket's micro-batch."""
        return tuple((bucket.rows_per_micro * bucket.ceiling, bucket.anchors) for bucket in self.order.buckets)

    @property
    def largest(self) -> int:
        """Padded tokens of the largest micro-batch."""
        return max(tokens for tokens, _ in self.sizes)


def open_store(config: TrainConfig) -> Store:
    """The store, complete and of the right kind for the objective; else one sentence."""
    store = Store.open(config.store, io=config.io)
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
    if checkpoints(Path(config.run)):  # before its first one a run has not begun: what lies there is of another try
        if not frozen.exists():
            raise DflashError(
                f"{frozen} is missing, which has the rows of this --partial run; restore it, or name another --run."
            )
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
    asked = -(-batch_tokens // budget)
    micros_per_step = -(-asked // world) * world
    if micros_per_step != asked:
        say(f"A step has {micros_per_step} micro-steps instead of {asked}, the next multiple of the {world} ranks.")
    epochs = config.epochs or DEFAULT_EPOCHS
    steps = config.steps if config.steps is not None else math.ceil(epochs * order.micros_per_epoch / micros_per_step)
    return Plan(order, micros_per_step, steps)
