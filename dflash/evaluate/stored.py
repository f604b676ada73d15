"""`dflash eval --store`: the acceptance that a server would show, from held-out rows and without a target.

It is the served figure where the stored answers are the target's own greedy ones; `label_agreement` says how far they
are, and below INDICATIVE the figure is only indicative.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.checkpoint import check_shape, differences, load_drafter, read_config
from dflash.drafter import Drafter, RopeTable
from dflash.errors import DflashError
from dflash.evaluate.config import EvalConfig
from dflash.evaluate.figures import Answer, figures, paired_difference
from dflash.evaluate.pair import report_differences
from dflash.loss import Head
from dflash.progress import progress
from dflash.simulate import held_out_rows, simulate
from dflash.store import Store
from dflash.stored import tap_rms, template_args
from dflash.target import TargetSpec, as_dtype, read_frozen
from dflash.threads import set_threads

INDICATIVE = 0.98


@dataclass(frozen=True)
class Parts:
    """A drafter with what of the target it needs (`dflash.simulate.Drafting`)."""

    drafter: Drafter
    rope: RopeTable
    embed_VH: torch.Tensor
    embed_factor: float
    head: Head
    tap_rms: torch.Tensor | None


def evaluate_store(config: EvalConfig) -> dict[str, Any]:
    """Simulate one drafter, or two, on the held-out rows of a store."""
    assert config.store is not None, "this is what --store asks for"
    began = time.perf_counter()
    store = Store.open(config.store)
    rows = held_out_rows(store)[: config.limit]
    if not rows:
        raise DflashError(
            f"Store {config.store} has no held-out rows; extract with --holdout, or give --target and --prompts."
        )
    folders = [Path(each) for each in (config.drafter, config.compare) if each is not None]
    for each in folders:
        check_drafter(each, store, config)
    set_threads()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for each in folders:
        parts = load_parts(each, store, config, device)
        with progress("Simulating", len(rows), "rows") as advance:
            walks = simulate(store, parts, rows, advance)
        slots = parts.drafter.config.block_size - 1
        answers = [answer for row, turns in zip(rows, walks, strict=True) for answer in answers_of(store, row, turns)]
        found.append((answers, figures(answers, slots, config.seed) | {"block_size": slots + 1}))
    agreement = label_agreement(store, rows)
    result = {
        **found[0][1],
        "simulated": True,
        "store": config.store,
        "rows": len(rows),
        "answers": len(found[0][0]),
        "label_agreement": agreement,
        "indicative": agreement is None or agreement < INDICATIVE,
        "dtype": str(parts.embed_VH.dtype).removeprefix("torch."),
        "device": device,
        "seconds": time.perf_counter() - began,
    }
    if config.compare is not None:
        difference = paired_difference(found[0][0], found[1][0], config.seed)
        result["compare"] = {"drafter": config.compare, **found[1][1], "difference": difference}
    return result


def check_drafter(folder: Path, store: Store, config: EvalConfig) -> None:
    """Refuse a drafter that reads other states than the store's."""
    shape, origin = read_config(folder)
    meta = store.meta
    spec = TargetSpec.read(store.target_folder, name=meta.target["name"])
    check_shape(shape, origin, spec, str(folder))
    if shape.taps != meta.taps:
        raise DflashError(
            f"Drafter {folder} taps layers {list(shape.taps)}, but store {config.store} holds layers "
            f"{list(meta.taps)}; use a store of its own taps."
        )
    if origin is not None:
        found = differences(
            origin, str(folder), f"{spec.name} in store {config.store}", weights=meta.target["weights"],
            tokenizer=meta.tokenizer, template=meta.template, template_args=template_args(store),
        )  # fmt: skip
        report_differences(list(found), config.allow_mismatch)


def load_parts(folder: Path, store: Store, config: EvalConfig, device: str) -> Parts:
    """In the target's dtype, as a server runs it."""
    dtype = as_dtype(config.dtype or store.meta.target.get("dtype")) or torch.float32
    drafter = load_drafter(folder, dtype, device)
    frozen = read_frozen(store.target_folder, dtype=dtype, device=device)
    spec = replace(frozen.spec, name=store.meta.target["name"])
    positions = max(bucket.ceiling for bucket in store.buckets) + drafter.config.block_size
    return Parts(
        drafter=drafter,
        rope=RopeTable(drafter.config, positions, dtype, device),
        embed_VH=frozen.embed,
        embed_factor=spec.embed_factor,
        head=Head(frozen.head, spec.logit_scale / spec.logit_divisor, spec.softcap),
        tap_rms=tap_rms(store, device),
    )


def answers_of(store: Store, row: tuple[str, int], turns: Any) -> list[Answer]:
    """A row's turns as answers; a conversation that was fanned out is one unit of the bootstrap."""
    rows = store.plan.rows[row[0]]
    unit, file = int(rows.conversation[row[1]]), int(rows.file[row[1]])
    category = Path(store.plan.files[file]).stem
    return [Answer(unit, category, turn.start, turn.lengths, turn.drafted, turn.accepted) for turn in turns]


def label_agreement(store: Store, rows: list[tuple[str, int]]) -> float | None:
    """Share of supervised tokens that the target itself would have chosen; None without its labels."""
    if "labels" not in store.array_names():
        return None
    same = total = 0
    for bucket, row in rows:
        ceiling = store.bucket(bucket).ceiling
        arrays = {
            name: np.empty(ceiling, store.array_shape_dtype(name, ceiling)[1])
            for name in ("input_ids", "labels", "loss_mask")
        }
        n = store.read_into(bucket, row, arrays)
        scored = (arrays["loss_mask"][:n] > 0) & (arrays["labels"][:n] >= 0)
        same += int((arrays["labels"][:n] == arrays["input_ids"][:n])[scored].sum())
        total += int(scored.sum())
    return same / total if total else None
