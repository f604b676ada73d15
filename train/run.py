"""The training stage: set up or resume, loop over optimiser steps, validate, save, summarise.

An optimiser step is `micros_per_step` micro-steps whose gradients and sums accumulate; ranks share them out and reduce
once. What a step does follows from (seed, step) alone, so a resumed run continues bit for bit.
"""

import json
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.config import as_dict, to_toml
from dflash.drafter import DrafterConfig
from dflash.errors import DflashError
from dflash.files import write_atomically
from dflash.progress import progress, say
from dflash.signals import Stop, catch_stop
from dflash.store import Store
from dflash.train import folder as run_folder
from dflash.train.config import TrainConfig
from dflash.train.optimiser import Flat, Optimiser, learning_rate
from dflash.train.order import Micro
from dflash.train.origin import origin_of
from dflash.train.reader import Layout, Reader
from dflash.train.runner import Captured, Eager, Parts, Pending, Runner
from dflash.train.setup import (
    Plan,
    Ranks,
    batch_plan,
    build,
    freeze_rows,
    join_ranks,
    open_store,
    rows_to_train_on,
    token_ids,
)
from dflash.train.step import Batch, Model, Objective
from dflash.train.validate import held_out_rows, validate

# What may differ between a run and its resumption: where things lie and how often it looks, not what it computes.
METRICS_LAG = 4  # steps between an update and the reading of its figures
FREE_TO_CHANGE = ("store", "run", "target", "eval_every", "save_every", "keep")


def train(config: TrainConfig) -> dict[str, Any]:
    """Train, or resume, the run that `config` describes; returns the summary of design section 8."""
    ranks, device = join_ranks()
    store = open_store(config)
    rows = rows_to_train_on(config, store)
    plan = batch_plan(config, store, device, ranks.world, rows)
    model, objective, flat, optimiser, shape = build(config, store, device)
    trainer = Trainer(config, store, plan, model, objective, flat, optimiser, shape, ranks, device, rows)
    with catch_stop() as stop:
        result = trainer.run(stop)
    ranks.leave()
    return result


class Trainer:
    """One run: its parts, its place in time, and the loop."""

    def __init__(
        self, config: TrainConfig, store: Store, plan: Plan, model: Model, objective: Objective, flat: Flat,
        optimiser: Optimiser, shape: DrafterConfig, ranks: Ranks, device: torch.device,
        rows: dict[str, np.ndarray] | None,
    ) -> None:  # fmt: skip
        self.config, self.store, self.plan = config, store, plan
        self.model, self.objective, self.shape = model, objective, shape
        self.flat, self.optimiser = flat, optimiser
        self.ranks, self.device, self.rows = ranks, device, rows
        self.folder = Path(config.run)
        self.metrics: run_folder.Metrics | None = None  # of the first rank only
        self.step = 0
        self.best: dict[str, Any] | None = None
        self.last_validation: dict[str, Any] | None = None
        self.last_line: dict[str, Any] | None = None
        self.origin = origin_of(store)
        self.held_out = held_out_rows(store, rows)
        self.every = config.eval_every or max(1, plan.steps // 10)
        self.tokens_of = {bucket.name: store.plan.rows[bucket.name].length.tolist() for bucket in plan.order.buckets}
        self.pending: deque[tuple[Pending, dict[str, Any], dict[str, float]]] = deque()
        self.layout = Layout.of(store, plan.largest)

    def run(self, stop: Stop) -> dict[str, Any]:
        try:
            self._resume_or_begin()
            return self._train(stop)
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _make_runner(self) -> Runner:
        """Graphs are captured before any reader thread starts, and after weights and moments are in their places."""
        parts = Parts(self.model, self.objective, self.optimiser, self.config.seed, self.device)
        if self.device.type == "cpu":
            return Eager(parts)
        return Captured(parts, self.layout, self.plan.order.buckets, capture=self.config.graph != "off")

    def _train(self, stop: Stop) -> dict[str, Any]:
        if self.step == self.plan.steps:
            return self._summary(0, 0.0, 0.0, 0)
        self.runner = self._make_runner()
        began, first = time.perf_counter(), self.step
        reader = Reader(self.store, self.layout, self.device)
        tokens = 0
        with progress("Training", self.plan.steps - first, "steps") as advance:
            batches = reader.batches(self._micros())
            for _ in range(first, self.plan.steps):
                if self._stopped(stop):
                    self._save()
                    stop.check(
                        f"step {self.step} of {self.plan.steps} is kept in {self.folder}; the same command resumes."
                    )
                tokens += self._one_step(batches, reader)
                self._look(stop)
                advance(1)
        self._settle()
        self.runner.close()
        seconds = time.perf_counter() - began
        return self._summary(tokens, seconds, reader.waited, self.step - first)

    def _micros(self) -> Iterator[Micro]:
        """This rank's micro-steps from here to the end."""
        per_step, ranks = self.plan.micros_per_step, self.ranks
        for number in range(self.step * per_step + ranks.rank, self.plan.steps * per_step, ranks.world):
            yield self.plan.order.micro(number)

    def _one_step(self, batches: Iterator[tuple[Micro, Batch]], reader: Reader) -> int:
        """All micro-steps of this rank, the reduction and the update; returns this rank's valid tokens."""
        start, waited, tokens = time.perf_counter(), reader.waited, 0
        for _ in range(self.plan.micros_per_step // self.ranks.world):
            micro, batch = next(batches)
            tokens += sum(self.tokens_of[micro.bucket.name][row] for row in micro.rows)
            self.runner.micro(micro, batch, self.step)
        self.ranks.all_reduce(self.flat.grad, self.runner.sums.vector)
        lr = learning_rate(self.step, self.plan.steps, self.config.lr, self.config.warmup)
        outcome = self.runner.update(lr)
        self.step += 1
        seconds = time.perf_counter() - start
        times = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "data_wait": (reader.waited - waited) / seconds,
        }
        self.pending.append((Pending(outcome, self.device), {"step": self.step, "lr": lr, "tokens": tokens}, times))
        while len(self.pending) > METRICS_LAG:
            self._record()
        return tokens

    def _record(self) -> None:
        """Write the oldest step's line; on a GPU its values have been copied out meanwhile."""
        pending, about, times = self.pending.popleft()
        norm, skipped, numerator, denominator, anchors, *slots = pending.values()
        n = self.shape.block_size - 1
        scored, correct, prefix = slots[:n], slots[n : 2 * n], slots[2 * n :]
        self.last_line = {
            **about,
            "loss": numerator / denominator if denominator else None,
            "grad_norm": norm if denominator else None,
            "skipped": bool(skipped),
            "anchors": int(anchors),
            "accuracy": sum(correct) / sum(scored) if sum(scored) else None,
            "accepted_slots": [round(p / s, 6) if s else None for p, s in zip(prefix, scored, strict=True)],
            **times,
        }
        if self.metrics is not None:
            self.metrics.write(self.last_line)

    def _settle(self) -> None:
        """Write the lines of all steps done, before anything that reads them or stands behind them."""
        while self.pending:
            self._record()

    def _look(self, stop: Stop) -> None:
        """Validate and save where it is due. A stop is never delayed by a validation."""
        last = self.step == self.plan.steps
        if not stop and (last or self.step % self.every == 0):
            self._validate()
        if last or self.step % (self.config.save_every or self.every) == 0:
            self._save()

    def _validate(self) -> None:
        """Held-out acceptance. Only rank 0 does it; the others wait at the next reduction."""
        self._settle()
        if not self.held_out or self.metrics is None:
            return
        tally = validate(self.store, self.model, self.held_out)
        length = tally.acceptance_length()
        self.last_validation = {"step": self.step, "acceptance_length": length, "per_slot": tally.per_slot()}
        self.metrics.write({"step": self.step, "validation": self.last_validation})
        if length["pooled"] is None:
            return
        if self.best is None or length["pooled"] >= self.best["acceptance_length"]["pooled"]:
            self.best = {"step": self.step, "acceptance_length": length}
        loss = (self.last_line or {}).get("loss")
        loss_text = f"loss {loss:.3f}, " if loss is not None else ""
        say(
            f"Step {self.step} of {self.plan.steps}: {loss_text}acceptance length {length['pooled']:.2f} "
            f"on {len(self.held_out)} held-out rows (best {self.best['acceptance_length']['pooled']:.2f} "
            f"at step {self.best['step']})"
        )

    def _stopped(self, stop: Stop) -> bool:
        """Whether any rank was asked to stop: all leave after the same step."""
        if self.ranks.world == 1:
            return bool(stop)
        flag = torch.tensor(float(bool(stop)), device=self.device)
        self.ranks.all_reduce(flag)
        if bool(flag) and not stop:
            stop.signum = signal.SIGTERM
        return bool(flag)

    # --- the run folder

    def _identity(self) -> dict[str, Any]:
        """What a resumption must share with the run."""
        settings = {name: value for name, value in as_dict(self.config).items() if name not in FREE_TO_CHANGE}
        meta = self.store.meta
        derived: dict[str, Any] = {"steps": self.plan.steps, "micros_per_step": self.plan.micros_per_step}
        derived["anchors"] = {bucket.name: bucket.anchors for bucket in self.plan.order.buckets}
        store = {"plan": meta.fingerprints["plan"], "fingerprint": self.store.fingerprint}
        return {"store": store, "settings": settings, "derived": derived}

    def _resume_or_begin(self) -> None:
        if not self.ranks.first:
            self.ranks.barrier()  # the first rank has written what a new run begins with
        found = run_folder.checkpoints(self.folder)
        if found:
            self._load(found[-1])
        elif self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "config.toml", to_toml("train", self.config))
            freeze_rows(self.config, self.rows)
            environment = run_folder.environment(self.device)
            write_atomically(self.folder / "environment.json", json.dumps(environment, indent=1) + "\n")
        if self.ranks.first:
            self.metrics = run_folder.Metrics(self.folder, keep_until=self.step)
        if found and self.step >= self.plan.steps:
            say(f"{self.folder} is complete: all {self.step} steps are done.")
        elif found:
            say(f"Resuming {self.folder} at step {self.step} of {self.plan.steps}.")
        else:
            self._validate()
            self._save()
        if self.ranks.first:
            self.ranks.barrier()

    def _load(self, checkpoint: run_folder.Checkpoint) -> None:
        difference = run_folder.first_difference(checkpoint.state["identity"], self._identity())
        if difference is not None:
            name, old, new = difference
            raise DflashError(
                f"{self.folder} was begun with {name} = {old}, now it is {new}; use the old value, or another --run."
            )
        model, moments = checkpoint.tensors("model"), checkpoint.tensors("optimizer")
        for name, view in self.flat.views(self.flat.master).items():
            view.copy_(model[name])
        for kind, moment in self.optimiser.moments.items():
            for name, view in self.flat.views(moment).items():
                view.copy_(moments[f"{kind}.{name}"])
        for index, count in enumerate(self.optimiser.counts):
            count.copy_(moments[f"step.{index}"])
        self.flat.refresh()
        self.step = checkpoint.step
        self.best, self.last_validation = checkpoint.state["best"], checkpoint.state["validation"]
        self.last_line = checkpoint.state["line"]

    def _save(self) -> None:
        self._settle()
        if self.metrics is None:
            return
        self.metrics.sync()
        optimiser = {
            f"{kind}.{name}": view
            for kind, moment in self.optimiser.moments.items()
            for name, view in self.flat.views(moment).items()
        }
        optimiser |= {f"step.{index}": count for index, count in enumerate(self.optimiser.counts)}
        state = {
            "identity": self._identity(),
            "drafter": self.shape.__dict__ | {"taps": list(self.shape.taps)},
            "target": self.store.meta.target,
            "origin": self.origin.to_json(),
            "counts": self.store.meta.counts,
            "token_ids": token_ids(self.store),
            "store": str(Path(self.config.store).resolve()),
            "best": self.best,
            "validation": self.last_validation,
            "line": self.last_line,
        }
        run_folder.save_checkpoint(self.folder, self.step, self.flat.views(self.flat.master), optimiser, state)
        run_folder.prune(self.folder, self.config.keep, self.best["step"] if self.best else None)

    def _summary(self, tokens: int, seconds: float, waited: float, steps: int) -> dict[str, Any]:
        line, best = self.last_line or {}, self.best or {}
        return {
            "steps": self.step,
            "loss": line.get("loss"),
            "acceptance_length": (self.last_validation or {}).get("acceptance_length")
            or {"pooled": None, "macro": None},
            "checkpoint": str(self.folder / "checkpoints" / run_folder.checkpoint_name(self.step)),
            "tokens_per_second": tokens / seconds if steps else None,
            "data_wait": waited / seconds if steps else None,
            "seconds": seconds,
            "steps_per_second": steps / seconds if steps else None,
            "best": best or None,
            "run": str(self.folder),
            "store": self.config.store,
            "parameters": self.flat.master.numel(),
            "device": self.device.type,
        }
