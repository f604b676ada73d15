"""The few tensors of a checkpoint that stage two needs, found without loading the rest. Safetensors, one file or many.

A tensor is found by the names that families use, else by the name that the model class gives it (built on the meta
device, so that nothing is allocated).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.errors import DflashError

if TYPE_CHECKING:
    import torch

PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.", "text_model.")
EMBED_NAMES = (
    "embed_tokens",
    "model.embed_tokens",
    "transformer.wte",
    "gpt_neox.embed_in",
    "backbone.embeddings",
    "wte",
)
HEAD_NAMES = ("lm_head", "output", "embed_out", "output_layer", "lm_head.linear")
NORM_NAMES = (
    "norm", "model.norm", "transformer.ln_f", "ln_f", "final_layernorm", "model.final_layernorm", "backbone.norm_f",
    "gpt_neox.final_layer_norm", "norm_f", "model.embedding_norm",
)  # fmt: skip
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load, in name order."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DflashError(f"{index} is no index of weights: restore the file.") from None
        files = [folder / name for name in names]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise DflashError(
                f"{folder} lacks {missing[0]} ({len(missing)} of its {len(files)} weight files): fetch them again."
            )
        return files
    hint = "convert its .bin or .pth files to safetensors" if list(folder.glob("*.bin")) else "fetch the weights"
    raise DflashError(f"{folder} has no model.safetensors and no model.safetensors.index.json: {hint}.")


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Tensor name -> {dtype, shape, data_offsets}, and where the data starts in the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(path.stat().st_size, 100 << 20):
            raise DflashError(f"{path} is no safetensors file, or is cut off: fetch it again.")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise DflashError(f"{path} has a damaged safetensors header: fetch it again.") from None
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if path.stat().st_size != end:
        raise DflashError(f"{path} has {path.stat().st_size:,} bytes where its header tells {end:,}: fetch it again.")
    return header, 8 + length


def tensor_index(folder: Path) -> dict[str, tuple[Path, str]]:
    """Tensor name -> (file, safetensors dtype) over the whole checkpoint."""
    return {
        name: (path, entry["dtype"])
        for path in checkpoint_files(folder)
        for name, entry in safetensors_header(path)[0].items()
    }


def find_tensor(index: dict[str, tuple[Path, str]], modules: tuple[str, ...]) -> str | None:
    """The name of the weight of one of these modules, under any usual prefix."""
    candidates = (f"{prefix}{module}.weight" for module in modules for prefix in PREFIXES)
    return next((name for name in candidates if name in index), None)


def read_tensor(folder: Path, index: dict[str, tuple[Path, str]], name: str, what: str) -> "torch.Tensor":
    """Load one tensor; refuse a quantised one, since labels and losses need the weights themselves."""
    from safetensors import safe_open

    path, dtype = index[name]
    if dtype not in FLOATS:
        raise DflashError(
            f"{folder} keeps its {what} ({name}) as {dtype}: dflash needs it unquantised (bf16, fp16 or fp32), "
            "so use the original checkpoint."
        )
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def frozen_tensors(folder: Path, tied: bool) -> dict[str, "torch.Tensor"]:
    """`embed`, `norm`, and `head` unless it is the embedding.

    As transformers ties: a checkpoint that holds both with different values is not tied, whatever its config says;
    one that holds the head alone has its embedding there.
    """
    import torch

    index = tensor_index(folder)
    names = _names(folder, index, tied)
    if names["embed"] is None and tied:
        names["embed"], names["head"] = names["head"], None
    embed_name, norm_name, head_name = names["embed"], names["norm"], names["head"]
    if embed_name is None or norm_name is None or (head_name is None and not tied):
        lacking = "embedding" if embed_name is None else "final norm" if norm_name is None else "output head"
        _refuse_quantised(folder, index, lacking)
        raise DflashError(
            f"{folder} holds no tensor that is its {lacking}, so it is no target: choose another checkpoint."
        )
    tensors = {
        "embed": read_tensor(folder, index, embed_name, "embedding"),
        "norm": read_tensor(folder, index, norm_name, "final norm"),
    }
    if head_name is not None:
        head = read_tensor(folder, index, head_name, "output head")
        if not (tied and torch.equal(head, tensors["embed"])):
            tensors["head"] = head
        if head_name.removesuffix("weight") + "bias" in index:
            raise DflashError(f"{folder} has an output head with a bias ({head_name}): use a target without.")
    return tensors


def frozen_bytes(folder: Path, tied: bool) -> int:
    """Bytes on disk of what `frozen_tensors` will give, from the headers alone."""
    headers = {name: entry for path in checkpoint_files(folder) for name, entry in safetensors_header(path)[0].items()}
    names = _names(folder, tensor_index(folder), tied)
    wanted = {names["embed"] or names["head"], names["norm"], None if tied else names["head"]} - {None}
    sizes = [headers[name]["data_offsets"][1] - headers[name]["data_offsets"][0] for name in wanted if name is not None]
    return sum(-(-(size + 128) // 4096) * 4096 for size in sizes)


def embedding_dtype(folder: Path) -> str | None:
    """The dtype of the embedding as stored, for configs that do not name one."""
    stored = folder / "embed.safetensors"
    if stored.is_file():
        return FLOATS.get(safetensors_header(stored)[0]["weight"]["dtype"])
    try:
        index = tensor_index(folder)
    except DflashError:
        return None
    name = find_tensor(index, EMBED_NAMES)
    return FLOATS.get(index[name][1]) if name else None


def _names(folder: Path, index: dict[str, tuple[Path, str]], tied: bool) -> dict[str, str | None]:
    wanted = {"embed": EMBED_NAMES, "norm": NORM_NAMES, "head": HEAD_NAMES}
    found = {what: find_tensor(index, modules) for what, modules in wanted.items()}
    needed = [what for what in wanted if found[what] is None and not (what == "head" and tied)]
    if needed:
        by_class = _names_of_class(folder)
        for what in needed:
            module = by_class.get(what)
            found[what] = module and find_tensor(index, (module, *_shorter(module)))
    return found


def _names_of_class(folder: Path) -> dict[str, str]:
    """Module names of embedding and head as the model class names them, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    from dflash.target.spec import read_config

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read_config(folder))
    except Exception:  # families without a class here (remote code) keep the usual names only
        return {}
    wanted = {"embed": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    names = {id(module): name for name, module in model.named_modules()}
    return {what: names[id(module)] for what, module in wanted.items() if module is not None and id(module) in names}


def _shorter(module: str) -> tuple[str, ...]:
    """`model.text.embed_tokens` -> `text.embed_tokens`, `embed_tokens`: checkpoints drop prefixes."""
    parts = module.split(".")
    return tuple(".".join(parts[i:]) for i in range(1, len(parts)))


def _refuse_quantised(folder: Path, index: dict[str, tuple[Path, str]], what: str) -> None:
    modules = {"embedding": EMBED_NAMES, "output head": HEAD_NAMES}.get(what, ())
    for module in modules:
        for prefix in PREFIXES:
            for ending in ("qweight", "weight_packed", "weight.absmax", "blocks"):
                if f"{prefix}{module}.{ending}" in index:
                    raise DflashError(
                        f"{folder} keeps its {what} quantised ({prefix}{module}.{ending}): dflash needs it in bf16, "
                        "fp16 or fp32, so use the original checkpoint."
                    )
