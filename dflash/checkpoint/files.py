"""Reading and writing a drafter's folder: config.json and model.safetensors, in one of the layouts."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.checkpoint import speculators, zlab
from dflash.checkpoint.body import check_shapes, check_tensors, tensor_shapes
from dflash.checkpoint.origin import Origin
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import DflashError
from dflash.files import replacing, write_atomically

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_drafter(
    folder: Path,
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    dtype: str,
    token_ids: dict[str, Any] | None = None,
    origin: Origin | None = None,
    copies: dict[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors (cast to `dtype`) into an existing folder; the config comes last.

    With `copies` of the target's embedding and head (`speculators.copies`) the layout is speculators', else z-lab's.
    """
    weights = folder / "model.safetensors"
    check_tensors(tensors, tensor_shapes(config), weights)
    layout = zlab if copies is None else speculators
    if copies is not None:
        check_tensors(copies, speculators.copied_shapes(config), weights)
    document = layout.config_to_json(config, dtype, token_ids, origin)
    # clone: tied copies share memory, which the file format does not allow
    everything = tensors | {name: tensor.clone() for name, tensor in (copies or {}).items()}
    with replacing(weights) as sibling:
        cast = {name: tensor.detach().to("cpu", DTYPES[dtype]).contiguous() for name, tensor in everything.items()}
        save_file(cast, sibling, metadata={"format": "pt"})
    write_atomically(folder / "config.json", json.dumps(document, indent=2) + "\n")


def read_document(folder: Path) -> dict[str, Any]:
    """config.json of a drafter's folder as it lies there."""
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DflashError(f"{path} does not exist; give a folder that `dflash export` wrote.") from None
    except ValueError as error:
        raise DflashError(f"{path} is not valid JSON ({error}); export the drafter again.") from None
    if not isinstance(document, dict):
        raise DflashError(f"{path} is not a JSON object; export the drafter again.")
    return document


def layout_of(document: dict[str, Any]) -> str:
    return "speculators" if "speculators_model_type" in document else "z-lab"


def read_config(folder: Path) -> tuple[DrafterConfig, Origin | None]:
    """What a drafter is and where it comes from, without its weights."""
    document, path = read_document(folder), folder / "config.json"
    layout = speculators if layout_of(document) == "speculators" else zlab
    return layout.config_from_json(document, path), Origin.from_json(document, path)


def read_drafter(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a drafter; names and shapes must be exactly those of its layout. Copies of the target's are left alone."""
    config, _ = read_config(folder)
    if (folder / "mask_embedding.pt").exists():
        raise DflashError(
            f"{folder}/mask_embedding.pt replaces the mask token's embedding, which this version does not run; give a "
            "drafter without it."
        )
    expected = tensor_shapes(config)
    return config, _read_tensors(folder, expected, layout_of(read_document(folder)), config)


def read_copies(folder: Path) -> dict[str, Tensor]:
    """Embedding and head of a folder in the speculators layout."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in (speculators.EMBEDDING, speculators.HEAD)}


def _read_tensors(
    folder: Path, expected: dict[str, tuple[int, ...]], layout: str, config: DrafterConfig
) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            # some writers put "model." before every name, and servers take both
            names = {name.removeprefix("model."): name for name in file.keys()}  # noqa: SIM118  (no mapping)
            found = {name: tuple(file.get_slice(full).get_shape()) for name, full in names.items()}
            copied = speculators.copied_shapes(config) if layout == "speculators" else {}
            check_shapes(found, expected | copied, path)
            return {name: file.get_tensor(names[name]) for name in expected}
    except (OSError, SafetensorError) as error:
        raise DflashError(f"{path} cannot be read ({error}); export the drafter again.") from None


def load_drafter(folder: Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> Drafter:
    """A drafter ready to run, in evaluation mode."""
    config, tensors = read_drafter(folder)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    return drafter.requires_grad_(False).eval()
