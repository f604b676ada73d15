"""calib.safetensors of an int8 store: the channel RMS float32 [K*H] that the states were divided by.

A value is int8 * scale[token, tap] * channel_rms[channel]. Made once, before the first shard; every shard's manifest
carries the file's sha256. How the states are quantised is the extraction's business.
"""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dflash.errors import DflashError, cause
from dflash.files import write_atomically
from dflash.store.paths import CALIB, read_inside

TENSOR = "channel_rms"


def write_calib(root: Path, channel_rms: np.ndarray) -> None:
    assert channel_rms.ndim == 1, "[K*H]"
    assert channel_rms.dtype == np.float32
    write_atomically(root / CALIB, save({TENSOR: channel_rms}))


def read_calib(root: Path, width: int) -> np.ndarray:
    """The channel RMS, checked: `width` values, all finite and above zero."""
    try:
        tensors = load(read_inside(root, (CALIB,), limit=1 << 28))
    except FileNotFoundError:
        raise DflashError(
            f"{CALIB} of the int8 store {root} is missing, without which no state can be read; restore it from a copy."
        ) from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise DflashError(
            f"{CALIB} of store {root} is damaged ({cause(error)}); restore it from a copy of the store."
        ) from None
    values = tensors.get(TENSOR)
    if values is None or values.shape != (width,) or values.dtype != np.float32:
        raise DflashError(
            f"{CALIB} of store {root} has no float32 tensor {TENSOR!r} of {width} values; "
            "restore it from a copy of the store, or extract into a new one."
        )
    if not (np.isfinite(values) & (values > 0)).all():
        raise DflashError(
            f"{CALIB} of store {root} has a channel RMS that is not a positive number; "
            "restore it from a copy of the store, or extract into a new one."
        )
    return values
