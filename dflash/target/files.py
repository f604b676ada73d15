"""A target's files: find its folder, load its tokenizer, write what stage two needs so that it never opens the target.

STORE/target/  config.json  generation_config.json  tokenizer files  chat_template.jinja
               embed.safetensors  head.safetensors (absent when tied)  norm.safetensors    one tensor each, "weight"
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.errors import DflashError, cause
from dflash.files import fsync_path, replacing, write_atomically
from dflash.target.gguf import gguf_folder
from dflash.target.spec import TargetSpec, read_config_json
from dflash.target.weights import frozen_bytes, frozen_tensors

if TYPE_CHECKING:
    import torch

SMALL_FILES = (
    "tokenizer*.json", "tokenizer*.model*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "*.tiktoken", "spiece.model", "sentencepiece*.model", "tekken.json", "chat_template*", "config.json",
    "generation_config.json",
)  # fmt: skip
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """The target's embedding and head, both [V, H]; the same tensor when tied, and `spec.tied` says so."""

    embed: "torch.Tensor"
    head: "torch.Tensor"
    spec: TargetSpec


def resolve_target(name: str) -> Path:
    """The folder of a target: a path, a GGUF file's unpacked folder, or a model on a hub (cached, else fetched)."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return gguf_folder(path)
    if path.is_file():
        raise DflashError(
            f"--target {name} is a file: give a GGUF file, or the folder in Hugging Face layout (config.json and "
            "safetensors)."
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise DflashError(
            f"--target {name} does not exist: give a folder in Hugging Face layout, or a hub name like org/model."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # whatever the hub client raises: offline, not found, gated
        raise DflashError(
            f"--target {name} is no folder here and cannot be fetched as a hub model ({cause(error)}): give a folder."
        ) from None


def load_tokenizer(folder: Path | str, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer; `chat_template` is the path of a file that replaces its template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise DflashError(
                f"The tokenizer of {folder} is code of its own: pass --trust-remote-code to run it."
            ) from None
        raise DflashError(
            f"{folder} has no tokenizer that transformers can load ({cause(error)}): add its files."
        ) from None
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DflashError(
                f"--chat-template {chat_template} cannot be read ({cause(error)}): give a text file."
            ) from None
    return tokenizer


def stop_token_ids(folder: Path | str) -> tuple[int, ...]:
    """The ids that end an answer: those of generation_config.json, config.json and the tokenizer, each once."""
    folder = Path(folder)
    found = [_json_or_empty(folder / "generation_config.json").get("eos_token_id")]
    config = read_config_json(folder)
    nested = config.get("text_config")
    found.append(config.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None))
    found.append(_tokenizer_eos(folder))
    ids = [i for value in found for i in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def write_target_folder(source: Path | str, out: Path | str, chat_template: str | None = None) -> TargetSpec:
    """Copy what stage two needs of the target into `out`; `chat_template` is the text of the template in use."""
    source, out = Path(source), Path(out)
    spec = TargetSpec.read(source)
    tensors = frozen_tensors(source, spec.tied)
    if tuple(tensors["embed"].shape) != (spec.vocab_size, spec.hidden_size):
        raise DflashError(
            f"{source} has an embedding of {tuple(tensors['embed'].shape)} where config.json tells "
            f"({spec.vocab_size}, {spec.hidden_size}); its files do not belong together, so fetch them again."
        )
    out.mkdir(parents=True, exist_ok=True)
    for path in _small_files(source):
        shutil.copyfile(path, out / path.name)
        fsync_path(out / path.name)
    if chat_template is not None:
        write_atomically(out / "chat_template.jinja", chat_template)
    for name, tensor in tensors.items():
        _save_weight(tensor, out / f"{name}.safetensors")
    return replace(spec, tied="head" not in tensors)


def target_folder_bytes(source: Path | str, spec: TargetSpec) -> int:
    """Bytes on disk that `write_target_folder` will take."""
    source = Path(source)
    small = sum(-(-path.stat().st_size // 4096) * 4096 for path in _small_files(source))
    return small + frozen_bytes(source, spec.tied)


def read_frozen(target_folder: Path | str, dtype: "torch.dtype | str | None" = None, device: str = "cpu") -> Frozen:
    """Embedding and head from STORE/target, or from a whole checkpoint; `dtype` defaults to the checkpoint's."""
    folder = Path(target_folder)
    spec = TargetSpec.read(folder)
    stored = folder / "embed.safetensors"
    tensors = _stored_tensors(folder) if stored.is_file() else frozen_tensors(folder, spec.tied)
    embed = tensors["embed"].to(device=device, dtype=as_dtype(dtype))
    head = tensors["head"].to(device=device, dtype=as_dtype(dtype)) if "head" in tensors else embed
    return Frozen(embed=embed, head=head, spec=replace(spec, tied=head is embed))


def as_dtype(dtype: "torch.dtype | str | None") -> "torch.dtype | None":
    """`bfloat16`, `bf16`, `torch.bfloat16` or a dtype -> the dtype."""
    import torch

    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    known = {
        "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
        "float16": torch.float16, "fp16": torch.float16,
    }  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise DflashError(f"--dtype {dtype} is unknown: choose float32, bfloat16 or float16.")
    return known[name]


def _small_files(source: Path) -> list[Path]:
    """Config, tokenizer and template: all that is copied as it is."""
    return sorted({path for pattern in SMALL_FILES for path in source.glob(pattern) if path.is_file()})


def _stored_tensors(folder: Path) -> dict[str, "torch.Tensor"]:
    from safetensors.torch import load_file

    names = [name for name in ("embed", "head") if (folder / f"{name}.safetensors").is_file()]
    try:
        return {name: load_file(folder / f"{name}.safetensors")["weight"] for name in names}
    except Exception as error:  # safetensors raises its own kinds for damaged files
        raise DflashError(f"{folder} holds a damaged weight file ({cause(error)}): extract into a new store.") from None


def _save_weight(tensor: "torch.Tensor", path: Path) -> None:
    from safetensors.torch import save_file

    with replacing(path) as sibling:
        save_file({"weight": tensor.contiguous()}, sibling)


def _tokenizer_eos(folder: Path) -> int | None:
    """The tokenizer's end token, looked up in its files so that no tokenizer is loaded."""
    token = _json_or_empty(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    content = _json_or_empty(folder / "tokenizer.json")
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
    vocab = content.get("model", {}).get("vocab", {})
    return added.get(text, vocab.get(text) if isinstance(vocab, dict) else None)


def _json_or_empty(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DflashError(f"{path} cannot be read as JSON ({cause(error)}): restore the file.") from None
    return content if isinstance(content, dict) else {}
