"""A drafter on disk: read and written in the public layouts (z-lab's and speculators'), with where it comes from."""

from dflash.checkpoint.body import tensor_shapes
from dflash.checkpoint.files import (
    DTYPES,
    layout_of,
    load_drafter,
    read_config,
    read_copies,
    read_document,
    read_drafter,
    write_drafter,
)
from dflash.checkpoint.origin import Origin
from dflash.checkpoint.pairs import check_origin, check_shape, differences

__all__ = [
    "DTYPES",
    "Origin",
    "check_origin",
    "check_shape",
    "differences",
    "layout_of",
    "load_drafter",
    "read_config",
    "read_copies",
    "read_document",
    "read_drafter",
    "tensor_shapes",
    "write_drafter",
]
