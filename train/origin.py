"""Where a run's drafter comes from, as its checkpoints and exports say it; and whether another drafter may start it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.checkpoint import Origin, check_origin, differences
from dflash.drafter import DrafterConfig
from dflash.errors import DflashError
from dflash.progress import say
from dflash.store import Store
from dflash.stored import template_args
from dflash.target import TargetSpec
from dflash.train.folder import Checkpoint

#: of a drafter's config: the same weights go on with longer blocks or contexts, or with windows
MAY_DIFFER = ("block_size", "rope_scaling", "max_position_embeddings", "sliding_window", "layer_types")


def origin_of(store: Store) -> Origin:
    """What is told of the target and the data, from the store alone."""
    meta = store.meta
    spec = TargetSpec.read(store.target_folder, name=meta.target["name"])
    return Origin(
        target=meta.target["name"],
        architectures=spec.architectures,
        config=meta.target["config"],
        weights=meta.target["weights"],
        num_target_layers=spec.num_layers,
        tokenizer=meta.tokenizer,
        template=meta.template,
        template_args=template_args(store),
        embed_factor=spec.embed_factor,
        softcap=spec.softcap,
        logit_scale=spec.logit_scale / spec.logit_divisor,
    )


def origin_in(checkpoint: Checkpoint, store: Store | None) -> Origin:
    """The origin that a checkpoint carries, with its own step; an older one has less to tell."""
    found: dict[str, Any] | None = checkpoint.state.get("origin")
    if found is not None:
        return Origin(**(found | {"architectures": tuple(found["architectures"]), "step": checkpoint.step}))
    if store is not None:
        return replace(origin_of(store), step=checkpoint.step)
    target, layers = checkpoint.state["target"], checkpoint.state["drafter"]["num_target_layers"]
    return Origin(target=target["name"], weights=target["weights"], num_target_layers=layers, step=checkpoint.step)


def check_start(ours: DrafterConfig, theirs: DrafterConfig, origin: Origin | None, folder: Path, store: Store) -> None:
    """Refuse a drafter of another shape or tokenizer as --init-from; another target or template is only told of.

    Every difference of the two configs is printed. What leaves the weights their shape and meaning may differ.
    """
    different: dict[str, tuple[Any, Any]] = {}
    for name in ours.__dataclass_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other and not (name == "num_target_layers" and other == 0):
            say(f"--init-from: {name} is {other} there and {mine} here.")
            if name not in MAY_DIFFER:
                different[name] = (other, mine)
    if different:
        there = " and ".join(f"{name} {other}" for name, (other, _) in different.items())
        here = " and ".join(str(mine) for _, mine in different.values())
        raise DflashError(
            f"--init-from {folder}{f', a drafter of {origin.target},' if origin else ''} has {there}, but this run of "
            f"{store.meta.target['name']} has {here}; make them equal to start from it."
        )
    if origin is None:
        return
    meta, drafter = store.meta, f"--init-from {folder}"
    target = f"{meta.target['name']} in store {store.root}"
    check_origin(
        differences(origin, drafter, target, tokenizer=meta.tokenizer),
        "its token ids mean something else, so start from another",
    )
    for sentence in differences(
        origin, drafter, target, weights=meta.target["weights"], template=meta.template,
        template_args=template_args(store),
    ):  # fmt: skip
        say(f"Warning: {sentence}.")
