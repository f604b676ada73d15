"""Everything a run is made of before its first step, checked in this order: store, batches, memory, drafter."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.checkpoint import read_config, read_drafter
from dflash.config import parse_size
from dflash.drafter import Drafter, DrafterConfig, RopeTable, initialise
from dflash.errors import DflashError
from dflash.loss import Head, decay_weights, default_gamma
from dflash.progress import say
from dflash.store import Store
from dflash.stored import tap_rms
from dflash.target import TargetSpec, read_frozen
from dflash.train.config import TrainConfig
from dflash.train.folder import checkpoints
from dflash.train.memory import CONTEXT, Economy, Forecast, Need, choose, forecast, gigabytes, sentence
from dflash.train.narrow import check_fp8, to_fp8
from dflash.train.optimiser import Optimiser, flatten
from dflash.train.origin import check_start
from dflash.train.plan import Plan, batch_plan, open_store, rows_to_train_on
from dflash.train.ranks import Ranks
from dflash.train.reader import Layout
from dflash.train.shape import drafter_config
from dflash.train.static import Parts
from dflash.train.step import Model, Objective

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run before its first step."""

    config: TrainConfig
    store: Store
    ranks: Ranks
    device: torch.device
    rows: dict[str, np.ndarray] | None  # of a partial run: those it keeps to
    plan: Plan
    shape: DrafterConfig
    layout: Layout
    need: Need
    economy: Economy
    forecast: Forecast
    parts: Parts


def set_up(config: TrainConfig, ranks: Ranks, device: torch.device) -> Setup:
    store = open_store(config)
    rows = rows_to_train_on(config, store)
    plan = batch_plan(config, store, device, ranks.world, rows)
    spec = TargetSpec.read(store.target_folder, name=store.meta.target["name"])
    shape = drafter_config(config, store, spec)
    dtype = DTYPES[config.precision or ("bf16" if device.type == "cuda" else "fp32")]
    if config.precision == "fp8":
        check_fp8(device, shape)
    layout = Layout.of(store, plan.largest)
    need = need_of(config, store, plan, shape, layout, dtype, device)
    economy = choose(need, memory_limit(config, device))
    found = forecast(need, economy)
    say(sentence(found, economy))
    check_free(found, device)
    parts = build(config, store, spec, shape, dtype, device, economy)
    return Setup(
        config=config, store=store, ranks=ranks, device=device, rows=rows, plan=plan, shape=shape, layout=layout,
        need=need, economy=economy, forecast=found, parts=parts,
    )  # fmt: skip


def need_of(
    config: TrainConfig,
    store: Store,
    plan: Plan,
    shape: DrafterConfig,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
) -> Need:
    widths = [math.prod(tail) * layout.dtypes[name].itemsize for name, tail in layout.tails.items()]
    most = (plan.largest, max(anchors for _, anchors in plan.sizes))
    return Need(
        shape=shape,
        sizes=(most,) if config.graph == "budget" else plan.sizes,
        token_bytes=sum(widths),
        compute_bytes=dtype.itemsize,
        tied=not (store.target_folder / "head.safetensors").exists(),
        muon=config.optimizer == "muon",
        ema=config.ema is not None,
        fp8=config.precision == "fp8",
        cuda=device.type == "cuda",
    )


def memory_limit(config: TrainConfig, device: torch.device) -> int | None:
    """Bytes that may be used: --memory, else the whole card's. With --memory the allocator is held to it."""
    asked = None if config.memory is None else parse_size(config.memory)
    if device.type != "cuda":
        return asked
    total = torch.cuda.mem_get_info(device)[1]
    if asked is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, asked - CONTEXT) / total), device)
    return min(asked or total, total)


def check_free(found: Forecast, device: torch.device) -> None:
    """Refuse a card that something else fills."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if found.device + found.validation > free:
        raise DflashError(
            f"This run needs {gigabytes(found.device + found.validation)} of {torch.cuda.get_device_name(device)}, of "
            f"whose {gigabytes(total)} only {gigabytes(free)} are free; stop what else runs there, or give --memory."
        )


def build(
    config: TrainConfig,
    store: Store,
    spec: TargetSpec,
    shape: DrafterConfig,
    dtype: torch.dtype,
    device: torch.device,
    economy: Economy,
) -> Parts:
    """The drafter (initialised from the seed or --init-from) in flat memory, with its frozen parts and optimiser."""
    frozen = read_frozen(store.target_folder, dtype=dtype, device="cpu" if economy.host_embedding else str(device))
    embed_VH = from_host(frozen.embed, device) if economy.host_embedding else frozen.embed
    drafter = Drafter(shape)
    initialise(drafter, config.seed)
    if config.init_from is not None and not checkpoints(Path(config.run)):  # a resumed run does not need it any more
        warm_start(drafter, Path(config.init_from), store)
    flat = flatten(drafter, dtype, device)
    ceiling = max(bucket.ceiling for bucket in store.buckets)
    model = Model(
        drafter=drafter,
        rope=RopeTable(shape, ceiling + shape.block_size, dtype, device),
        embed_VH=embed_VH,
        embed_factor=spec.embed_factor,
        head=Head(frozen.head.to(device), spec.logit_scale / spec.logit_divisor, spec.softcap),
        tap_rms=tap_rms(store, device),
    )
    if config.precision == "fp8":
        model = to_fp8(model)
    gamma = config.gamma or default_gamma(shape.block_size)
    decay = decay_weights(shape.block_size, gamma, device) if config.weights == "decay" else None
    objective = Objective(loss=config.loss, decay_J=decay, prefix=config.label_prefix)
    optimiser = Optimiser(
        flat, weight_decay=config.weight_decay, clip=config.clip, kind=config.optimizer, ema=config.ema
    )
    return Parts(model, objective, optimiser, config.seed, device)


class _Pinned:
    """Pinned host memory under the address that a device reads it by: the CUDA array interface takes any such."""

    def __init__(self, table: Tensor) -> None:
        self.table = table.pin_memory()  # kept alive by the tensor that is made of this object
        self.__cuda_array_interface__ = {
            "shape": tuple(table.shape), "typestr": f"<i{table.dtype.itemsize}", "strides": None,
            "data": (self.table.data_ptr(), True), "version": 3,
        }  # fmt: skip


def from_host(table: Tensor, device: torch.device) -> Tensor:
    """A device's view of a table in pinned host memory: a gather fetches the rows it takes over PCIe, also captured."""
    return torch.as_tensor(_Pinned(table), device=device).view(table.dtype)


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
