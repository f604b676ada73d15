"""The training stage: set up or resume, loop over optimiser steps, validate, save, summarise.

An optimiser step is `micros_per_step` micro-steps whose gradients and sums accumulate; ranks share them out and reduce
once. What a step does follows from (seed, step) alone, so a resumed run continues bit for bit.
"""

import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash.config import as_dict
from dflash.errors import Interrupted
from dflash.progress import progress, say
from dflash.signals import Stop, catch_stop
from dflash.train import folder as run_folder
from dflash.train import state
from dflash.train.config import TrainConfig
from dflash.train.dry import dry_run
from dflash.train.metrics import Metrics, open_metrics, step_line
from dflash.train.optimiser import learning_rate
from dflash.train.order import Micro
from dflash.train.ranks import determinism, join_ranks
from dflash.train.reader import Reader
from dflash.train.runner import Captured, Eager, Pending, Runner
from dflash.train.setup import Setup, set_up
from dflash.train.state import Place
from dflash.train.step import Batch
from dflash.train.validate import held_out_rows, validate

METRICS_LAG = 4  # steps between an update and the reading of its figures
ADVICE_AT = (20, 200)  # steps of this loop after which it says whether the other reader would be faster


def train(config: TrainConfig) -> dict[str, Any]:
    """Train, or resume, the run that `config` describes; returns the summary of design section 8."""
    with determinism(config.deterministic):
        ranks, device = join_ranks()
        setup = set_up(config, ranks, device)
        if config.dry_run:
            begun = time.perf_counter()
            runner = make_runner(setup)
            result = dry_run(setup, runner, time.perf_counter() - begun)
            runner.close()
        else:
            try:
                with catch_stop() as stop:
                    result = Trainer(setup).run(stop)
            except Interrupted:  # of all ranks together, so they can part in order
                ranks.leave()
                raise
        ranks.leave()
        return result


def make_runner(setup: Setup) -> Runner:
    """Graphs are captured before any reader thread starts, and after weights and moments are in their places."""
    graph = setup.config.graph
    if setup.device.type == "cpu":
        if graph not in (None, "off"):
            say(f"--graph {graph} needs a GPU; this run has none and goes step by step.")
        return Eager(setup.parts)
    return Captured(
        setup.parts,
        setup.layout,
        setup.plan.order.buckets,
        capture=graph != "off",
        budget=graph == "budget",
        economy=setup.economy,
        measure=setup.config.dry_run,
    )


class Trainer:
    """The loop of one run, and its place in time."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.plan, self.ranks = setup, setup.plan, setup.ranks
        self.folder = Path(setup.config.run)
        self.place = Place()
        self.metrics: Metrics | None = None  # of the first rank only
        self.held_out = held_out_rows(setup.store, setup.rows)
        self.every = setup.config.eval_every or max(1, self.plan.steps // 10)
        plan_rows = setup.store.plan.rows
        self.tokens_of = {bucket.name: plan_rows[bucket.name].length.tolist() for bucket in self.plan.order.buckets}
        self.pending: deque[tuple[Pending, dict[str, Any], dict[str, float]]] = deque()
        self.looked = 0.0  # seconds of validations and checkpoints
        self.warned = False  # of a gradient that is not finite

    def run(self, stop: Stop) -> dict[str, Any]:
        try:
            self._resume_or_begin()
            return self._train(stop)
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _resume_or_begin(self) -> None:
        if not self.ranks.first:
            self.ranks.barrier()  # the first rank has written what a new run begins with
        found = run_folder.checkpoints(self.folder)
        if found:
            self.place = state.load(self.setup, found[-1])
        elif self.ranks.first:
            state.begin(self.setup)
        step, steps, config = self.place.step, self.plan.steps, self.setup.config
        if self.ranks.first:
            self.metrics = open_metrics(self.folder, step, config.wandb, as_dict(config))
        if found and step >= steps:
            say(f"{self.folder} is complete: all {step} steps are done.")
        elif found:
            say(f"Resuming {self.folder} at step {step} of {steps}.")
        validated = (self.place.validation or {}).get("step") == step
        if not found or (self._validates_at(step) and not validated):  # a stop leaves out the validation of its step
            self._validate()
            self._save()
        if self.ranks.first:
            self.ranks.barrier()
        self.ranks.check_step(step, config.run)

    def _train(self, stop: Stop) -> dict[str, Any]:
        if self.place.step == self.plan.steps:
            return self._summary(0, 0.0, None, 0)
        self.runner = make_runner(self.setup)
        began, first = time.perf_counter(), self.place.step
        reader = Reader(self.setup.store, self.setup.layout, self.setup.device)
        tokens = 0
        with progress("Training", self.plan.steps, "steps", first) as advance:
            batches = reader.batches(self._micros())
            for _ in range(first, self.plan.steps):
                self._leave_if_asked(stop)
                tokens += self._one_step(batches, reader)
                self._look(stop)
                self._advise(reader, self.place.step - first, time.perf_counter() - began - self.looked)
                advance(1)
            self._leave_if_asked(stop)  # the last step has no validation then
        self._settle()
        seconds = time.perf_counter() - began
        graphs = self.runner.graph_seconds
        self.runner.close()
        loop = {"seconds": seconds - self.looked, "waited": reader.waited, "graphs": graphs}
        return self._summary(tokens, seconds, loop, self.place.step - first)

    def _advise(self, reader: Reader, done: int, seconds: float) -> None:
        """Say, now and then, when the loop waits for data and the other --io would be faster."""
        if done in ADVICE_AT and self.ranks.first and self.place.step < self.plan.steps:
            start = time.perf_counter()
            micro = self.plan.order.micro(self.plan.steps * self.plan.micros_per_step - 1)
            if (advice := reader.advice(reader.waited / seconds, micro)) is not None:
                say(advice)
            self.looked += time.perf_counter() - start

    def _micros(self) -> Iterator[Micro]:
        """This rank's micro-steps from here to the end."""
        per_step, ranks = self.plan.micros_per_step, self.ranks
        for number in range(self.place.step * per_step + ranks.rank, self.plan.steps * per_step, ranks.world):
            yield self.plan.order.micro(number)

    def _one_step(self, batches: Iterator[tuple[Micro, Batch]], reader: Reader) -> int:
        """All micro-steps of this rank, the reduction and the update; returns this rank's valid tokens."""
        start, waited, tokens = time.perf_counter(), reader.waited, 0
        for _ in range(self.plan.micros_per_step // self.ranks.world):
            micro, batch = next(batches)
            tokens += sum(self.tokens_of[micro.bucket.name][row] for row in micro.rows)
            self.runner.micro(micro, batch, self.place.step)
        self.ranks.all_reduce(self.setup.parts.optimiser.flat.grad, self.runner.sums.vector)
        config = self.setup.config
        lr = learning_rate(self.place.step, self.plan.steps, config.lr, config.warmup)
        outcome = self.runner.update(lr)
        self.place.step += 1
        seconds = time.perf_counter() - start
        times = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "data_wait": (reader.waited - waited) / seconds,
        }
        about = {"step": self.place.step, "lr": lr, "tokens": tokens}
        self.pending.append((Pending(outcome, self.setup.device), about, times))
        while len(self.pending) > METRICS_LAG:
            self._record()
        return tokens

    def _record(self) -> None:
        """Write the oldest step's line; on a GPU its values have been copied out meanwhile."""
        pending, about, times = self.pending.popleft()
        self.place.line = step_line(about, pending.values(), times)
        self._count_skipped(self.place.line)
        if self.metrics is not None:
            self.metrics.write(self.place.line)

    def _count_skipped(self, line: dict[str, Any]) -> None:
        """A batch without a slot that counts is nobody's fault; a gradient that is not finite is told of once."""
        self.place.skipped += line["skipped"]
        if line["skipped"] and line["anchors"] and not self.warned and self.ranks.first:
            self.warned = True
            say(
                f"Warning: the gradient of step {line['step']} is not finite; such updates are skipped and counted. "
                f"Lower --lr, or look for damaged states with `dflash verify {self.setup.config.store}`."
            )

    def _settle(self) -> None:
        """Write the lines of all steps done, before anything that reads them or stands behind them."""
        while self.pending:
            self._record()

    def _look(self, stop: Stop) -> None:
        """Validate and save where it is due. A stop is never delayed by a validation."""
        step = self.place.step
        validating = not stop and self._validates_at(step)
        saving = step == self.plan.steps or step % (self.setup.config.save_every or self.every) == 0
        if not validating and not saving:
            return
        self._settle()  # the device has done these steps, so what follows is no part of their time
        start = time.perf_counter()
        if validating:
            self._validate()
        if saving or (self.place.best or {}).get("step") == step:  # the best is kept, wherever checkpoints are due
            self._save()
        self.looked += time.perf_counter() - start

    def _validates_at(self, step: int) -> bool:
        return step % self.every == 0 or step == self.plan.steps

    def _validate(self) -> None:
        """Held-out acceptance. Only rank 0 does it; the others wait at the next reduction."""
        self._settle()
        if not self.held_out or self.metrics is None:
            return
        setup, place = self.setup, self.place
        with setup.parts.optimiser.averaged():
            tally = validate(setup.store, setup.parts.model, self.held_out, setup.economy.chunk)
        length = tally.acceptance_length()
        place.validation = {"step": place.step, "acceptance_length": length, "per_slot": tally.per_slot()}
        self.metrics.write({"step": place.step, "validation": place.validation})
        if length["pooled"] is None:
            return
        if place.best is None or length["pooled"] >= place.best["acceptance_length"]["pooled"]:
            place.best = {"step": place.step, "acceptance_length": length}
        loss = (place.line or {}).get("loss")
        loss_text = f"loss {loss:.3f}, " if loss is not None else ""
        say(
            f"Step {place.step} of {self.plan.steps}: {loss_text}acceptance length {length['pooled']:.2f} "
            f"on {len(self.held_out)} held-out rows (best {place.best['acceptance_length']['pooled']:.2f} "
            f"at step {place.best['step']})"
        )

    def _save(self) -> None:
        self._settle()
        if self.metrics is not None:
            self.metrics.sync()
            state.save(self.setup, self.place)

    def _leave_if_asked(self, stop: Stop) -> None:
        """Keep what is done, then raise; all together, since torchrun kills the others when one has left."""
        if self._stopped(stop):
            self._save()
            self.ranks.barrier()
            self.runner.close()
            kept = f"step {self.place.step} of {self.plan.steps} is kept in {self.folder}"
            stop.check(f"{kept}; the same command resumes.")

    def _stopped(self, stop: Stop) -> bool:
        """Whether any rank was asked to stop: all leave after the same step."""
        if self.ranks.world == 1:
            return bool(stop)
        asked = self.ranks.total(int(bool(stop))) > 0
        if asked and not stop:
            stop.signum = signal.SIGTERM
        return asked

    def _summary(self, tokens: int, seconds: float, loop: dict[str, Any] | None, steps: int) -> dict[str, Any]:
        """`loop`: seconds of the loop without validations and checkpoints, of these waited for data and in graphs."""
        setup, place, line = self.setup, self.place, self.place.line or {}
        length = (place.validation or {}).get("acceptance_length")
        graphs = loop["graphs"] if loop else None
        return {
            "steps": place.step,
            "skipped": place.skipped,
            "loss": line.get("loss"),
            "acceptance_length": length or {"pooled": None, "macro": None},
            "checkpoint": str(self.folder / "checkpoints" / run_folder.checkpoint_name(place.step)),
            "tokens_per_second": tokens / loop["seconds"] if loop else None,
            "data_wait": loop["waited"] / loop["seconds"] if loop else None,
            "seconds": seconds,
            "loop_seconds": loop["seconds"] if loop else None,
            "graph_share": graphs / loop["seconds"] if loop and graphs is not None else None,
            "steps_per_second": steps / loop["seconds"] if loop else None,
            "best": place.best,
            "ranks": self.ranks.world,  # each as fast as tokens_per_second
            "run": str(self.folder),
            "store": setup.config.store,
            "parameters": setup.parts.optimiser.flat.master.numel(),
            "memory": setup.forecast.to_json(),
            "device": setup.device.type,
        }
