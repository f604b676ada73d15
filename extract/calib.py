"""The channel RMS of int8 stores: float32 [K·H] over the first 10,240 valid tokens of the plan.

Plan order is extraction order: largest ceiling first. Taken once, by worker 0 before the first shard, with the same
forwards as the shards themselves; kept as calib.safetensors.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dflash.errors import DflashError
from dflash.extract.batches import batches_of
from dflash.extract.states import Layout, Stage, fill_inputs
from dflash.files import replacing
from dflash.store import Store
from dflash.store import calib as store_calib
from dflash.target import decoder_layers, text_model

CALIB_TOKENS = 10_240
NAME = "channel_rms"


def calib_path(store: Store) -> Path:
    return store.root / "calib.safetensors"


def is_missing(store: Store) -> bool:
    return store.meta.storage == "int8" and not calib_path(store).exists()


def read_calib(store: Store, device: torch.device) -> torch.Tensor:
    """The channel RMS, which must be the one that the shards there were made with."""
    found = store_calib.read_calib(store.root, len(store.meta.taps) * store.meta.hidden_size)
    store.check_calib()
    return torch.tensor(found, device=device)


def write_calib(store: Store, rms: torch.Tensor) -> None:
    with replacing(calib_path(store)) as sibling:
        save_file({NAME: rms.cpu().contiguous()}, sibling)


@torch.inference_mode()
def measure_rms(model: nn.Module, store: Store, layout: Layout, max_rows: int, max_tokens: int) -> torch.Tensor:
    """RMS of every channel of every tap; a document whose states are not finite does not count."""
    device = next(model.parameters()).device
    h = layout.hidden_size
    squares = torch.zeros(len(layout.taps), h, dtype=torch.float64, device=device)
    caught: dict[int, torch.Tensor] = {}

    def catcher(number: int) -> Any:
        def catch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            caught[number] = output[0] if isinstance(output, tuple | list) else output

        return catch

    layers = decoder_layers(model)
    handles = [layers[tap].register_forward_hook(catcher(i)) for i, tap in enumerate(layout.taps)]
    stage = Stage(layout, max_rows, max_tokens, "cpu")
    counted = 0
    try:
        for shard in store.shards():
            for batch in batches_of(store, shard):
                documents = [store.documents[d][0] for d in batch.documents]
                fill_inputs(stage, documents, batch.ceiling)
                text_model(model)(input_ids=stage.input_ids.to(device), use_cache=False)
                for row, tokens in enumerate(documents):
                    n = min(len(tokens), CALIB_TOKENS - counted)
                    added = torch.stack([caught[i][row, :n].double().square().sum(0) for i in range(len(layout.taps))])
                    if torch.isfinite(added).all():
                        squares += added
                        counted += n
                    if counted == CALIB_TOKENS:
                        return _rms(squares, counted, store.root)
    finally:
        for handle in handles:
            handle.remove()
    return _rms(squares, counted, store.root)


def _rms(squares: torch.Tensor, counted: int, root: Path) -> torch.Tensor:
    if not counted:
        raise DflashError(f"No document of store {root} gives finite states: try --dtype float32 or bfloat16.")
    # A channel that is always zero keeps its zeros with any divisor.
    rms = (squares / counted).sqrt().float().flatten()
    return torch.where(rms > 0, rms, torch.ones_like(rms))
