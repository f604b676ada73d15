"""What matters for the acceptance length: lines that each differ from one base in one thing, two seeds, equal steps.

    python bench/ablation.py --target HF_FOLDER --prompts train.jsonl --eval a.jsonl b.jsonl --out FOLDER [--seconds N]

Every line is trained on answers of the target to the prompts, exported, and decoded on all evaluation prompts beside
the base of the same seed, greedily and at temperature 1, so that differences are paired. LINES come first, with every
seed, then MORE. The table (FOLDER/ablation/summary/summary.md) is written after every stage; after --seconds what is
left is marked `not run`, and the same line goes on. Several lines may run at once (--jobs): a training of 500 steps is
half start and compilation, which share a cache. Without a target: three lines on tiny-chat.

A line's store: `mixed` holds greedy answers and one sampled at 0.7 to each prompt, with the target's 16 likeliest
tokens beside its choice; `greedy`, `drawn` (at temperature 1: what the target itself would seldom choose, as answers of
others are) and `int8` are made for the line that needs them.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _stages import Done, Failed, Stages, Stopped, demo, interval

from dflash.files import write_atomically

#: Line: (what differs, the store, flags of `dflash train` behind the base's)
Line = tuple[str, str, str]
LINES: dict[str, Line] = {
    "base": ("–", "mixed", ""),
    "tokens": ("labels: the data's tokens, not the target's choice", "mixed", "--loss ce-tokens"),
    "any": ("slots behind a disagreement are scored", "mixed", "--label-prefix any"),
    "dpace": ("D-PACE weights, not a decay", "mixed", "--weights dpace"),
    "kl": ("KL on the top 16, not cross-entropy on the choice", "mixed", "--loss kl"),
    "density": ("anchors: a sixth of the supervised tokens", "mixed", "--anchor-density 0.16667"),
    "greedy": ("greedy answers alone", "greedy", ""),
    "drawn": ("answers drawn at temperature 1", "drawn", ""),
    "int8": ("int8 store", "int8", ""),
    "ema": ("average of the weights, 0.99", "mixed", "--ema 0.99"),
    "lr-half": ("half the learning rate", "mixed", "--lr 5e-4"),
    "lr-twice": ("twice the learning rate", "mixed", "--lr 2e-3"),
    "muon": ("Muon, not AdamW", "mixed", "--optimizer muon"),
    "layers-3": ("3 layers", "mixed", "--num-layers 3"),
    "layers-8": ("8 layers", "mixed", "--num-layers 8"),
    "block-8": ("block of 8, not 16", "mixed", "--block-size 8"),
}
#: Where the base leaves the product's defaults.
MORE: dict[str, Line] = {
    "clip-1": ("clip at 1", "mixed", "--clip 1"),
    "gamma-7": ("gamma 7", "mixed", "--gamma 7"),
    "heads-9": ("the target's 9 and 3 heads, not 18 and 6", "mixed", "--num-heads 9 --num-kv-heads 3"),
    "fp8": ("products in e4m3", "mixed", "--precision fp8"),
}
FLAGS = {
    "answers": "--max-new-tokens 192 --batch-size 1024",
    "extract": "--buckets 448",
    "train": "--num-layers 5 --block-size 16 --lr 1e-3 --clip 0.3 --gamma 4 --token-budget 28672 --batch-tokens 28672 "
    "--anchors 2048 --anchor-density 1 --num-heads 18 --num-kv-heads 6 --keep 1",
    "eval": "--max-new-tokens 128",
}
QUICK = {
    "answers": "--max-new-tokens 64 --batch-size 96 --limit 48",
    "extract": "--buckets 448 --num-taps 3",
    "train": "--num-layers 1 --block-size 16 --lr 1e-3 --clip 0.3 --gamma 4 --token-budget 1344 --batch-tokens 1344 "
    "--anchors 32 --anchor-density 1 --num-heads 8 --num-kv-heads 4 --keep 1",
    "eval": "--max-new-tokens 64 --limit 8",
}
#: Files of answers of each store, and flags of `dflash regenerate` for each file.
STORES = {
    "mixed": (("greedy", "sampled"), "--labels topk:16"),
    "greedy": (("greedy",), "--labels topk:16"),
    "drawn": (("drawn",), "--labels topk:16"),
    "int8": (("greedy", "sampled"), "--labels topk:16 --storage int8"),
}
ANSWERS = {"greedy": "", "sampled": "--temperature 0.7", "drawn": "--temperature 1"}
TEMPERATURES = ("0", "1")


@dataclass(frozen=True)
class Bench:
    """What is run: the lines, each with these seeds and as many steps, on which prompts."""

    stages: Stages
    lines: dict[str, Line]
    seeds: tuple[int, ...]
    steps: int
    jobs: int
    flags: dict[str, list[str]]
    target: Path
    prompts: Path
    sets: tuple[Path, ...]

    def folder(self, name: str, seed: int) -> Path:
        return self.stages.out / "ablation" / f"{name}-{seed}"

    def store(self, name: str) -> Path:
        return self.stages.out / "ablation" / f"store-{name}"

    def stage(self, name: str, seed: int, what: str) -> str:
        return f"ablation/{name}-{seed}/{what}"


# --- the stages, in order


def make(bench: Bench, failures: dict[str, str]) -> None:
    """Answers, stores, the bases, all other lines; what of the lines fails is noted and does not stop the others."""
    stores = list(dict.fromkeys(store for _, store, _ in bench.lines.values()))
    answers = list(dict.fromkeys(each for store in stores for each in STORES[store][0]))

    def line(name: str, seed: int) -> None:
        try:
            make_line(bench, name, seed)
        except Failed as failed:
            failures[f"{name}-{seed}"] = str(failed)
            print(failed, file=sys.stderr, flush=True)

    at_once(bench.jobs, make_answers, [(bench, each) for each in answers])
    at_once(bench.jobs, make_store, [(bench, each) for each in stores])
    at_once(bench.jobs, make_line, [(bench, "base", seed) for seed in bench.seeds])
    for part in (LINES, MORE):
        names = [name for name in bench.lines if name in part and name != "base"]
        at_once(bench.jobs, line, [(name, seed) for seed in bench.seeds for name in names])


def at_once(jobs: int, work: Callable[..., None], over: Iterable[tuple[Any, ...]]) -> None:
    """In order, `jobs` at a time; what the first one raised is raised when all have ended."""
    if jobs == 1:
        for each in over:
            work(*each)
        return
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work, *each) for each in over]
    for future in futures:
        future.result()


def make_answers(bench: Bench, name: str) -> None:
    out, asked = bench.stages.out / f"{name}.jsonl", ("--target", bench.target, "--data", bench.prompts)
    bench.stages.run(name, "regenerate", *asked, "--out", out, *bench.flags["answers"], *shlex.split(ANSWERS[name]))


def make_store(bench: Bench, name: str) -> None:
    answers, more = STORES[name]
    words: list[str | Path] = ["--target", bench.target, "--data", *(bench.stages.out / f"{a}.jsonl" for a in answers)]
    words += ["--store", bench.store(name), *bench.flags["extract"], *shlex.split(more)]
    bench.stages.run(f"ablation/{name}", "extract", *words)


def make_line(bench: Bench, name: str, seed: int) -> None:
    """Train, export, decode. The run's checkpoints go once they are exported: all of them would be 30 GB."""
    folder, (_, store, more), steps = bench.folder(name, seed), bench.lines[name], str(bench.steps)
    run, drafter = folder / "run", folder / "drafter"
    words: list[str | Path] = ["--store", bench.store(store), "--run", run, *bench.flags["train"], "--steps", steps]
    words += ["--eval-every", steps, "--seed", str(seed), *shlex.split(more)]
    bench.stages.run(bench.stage(name, seed, "train"), "train", *words)
    bench.stages.run(bench.stage(name, seed, "export"), "export", run, "--out", drafter)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    words = ["--drafter", drafter, "--target", bench.target, "--prompts", *bench.sets, *bench.flags["eval"]]
    words += [] if name == "base" else ["--compare", bench.folder("base", seed) / "drafter"]
    for temperature in TEMPERATURES:
        bench.stages.run(bench.stage(name, seed, f"T{temperature}"), "eval", *words, "--temperature", temperature)


# --- the table


def write_summary(bench: Bench, failures: dict[str, str]) -> None:
    stages = bench.stages
    about = (
        f"{bench.steps} steps, seeds {', '.join(map(str, bench.seeds))}; acceptance length over all answers to "
        f"{', '.join(each.stem for each in bench.sets)}, mean of the seeds, with the mean of their 95 % intervals; "
        "differences are paired by prompt with the base of the same seed. `better`, `worse`: so with every seed, and "
        "none of their intervals at temperature 0 holds 0."
    )
    table = table_of(bench, failures)
    total = sum(each.seconds for each in stages.done.values())
    wall = time.time() - stages.began
    end = f"{total:.0f} s of commands, {bench.jobs} at once; {wall:.0f} s since the first start."
    if stages.why:
        end += f" Stopped: {stages.why}; the same line goes on."
    heading = f"## What matters, {time.strftime('%Y-%m-%d %H:%M')}"
    write_atomically(stages.summary / "summary.md", "\n\n".join([heading, about, table, end]) + "\n")
    results = {key: each.__dict__ for key, each in stages.done.items()}
    write_atomically(stages.summary / "summary.json", json.dumps({"stages": results, "failures": failures}))


def table_of(bench: Bench, failures: dict[str, str]) -> str:
    rows = [
        "| line | what differs | T = 0 | less the base | T = 1 | less the base | seeds apart | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (what, _, _) in bench.lines.items():
        found = {t: evaluations(bench, name, t) for t in TEMPERATURES}
        cells = [cell for t in TEMPERATURES for cell in figures(found[t])]
        seeds = [result["acceptance_length"]["pooled"] for result in found["0"]]
        apart = f"{max(seeds) - min(seeds):.2f}" if len(seeds) > 1 else "–"
        failed = any(f"{name}-{seed}" in failures for seed in bench.seeds)
        rows.append(f"| {name} | {what} | {' | '.join(cells)} | {apart} | {verdict(bench, name, found, failed)} |")
    return "\n".join(rows)


def evaluations(bench: Bench, name: str, temperature: str) -> list[dict[str, Any]]:
    """The results of the seeds that are done."""
    stages = [bench.stages.done.get(bench.stage(name, seed, f"T{temperature}")) for seed in bench.seeds]
    return [each.result for each in stages if isinstance(each, Done)]


def figures(results: Sequence[dict[str, Any]]) -> list[str]:
    """The length, and the difference to the base."""
    own = [(result["acceptance_length"]["pooled"], result["acceptance_length_ci"]["pooled"]) for result in results]
    less = [differences(result) for result in results if "compare" in result]
    return [mean_of(own), mean_of(less)]


def differences(result: dict[str, Any]) -> tuple[float, list[float] | None]:
    found = result["compare"]["difference"]
    return found["pooled"], found["pooled_ci"]


def mean_of(found: Sequence[tuple[float, list[float] | None]]) -> str:
    if not found:
        return "–"
    around = [ends for _, ends in found if ends is not None]
    mean = sum(value for value, _ in found) / len(found)
    whole = [sum(side) / len(side) for side in zip(*around, strict=True)] if len(around) == len(found) else None
    return interval(mean, whole)


def verdict(bench: Bench, name: str, found: dict[str, list[dict[str, Any]]], failed: bool) -> str:
    if failed:
        return "failed"
    if not found["0"]:
        return "not run"
    missing = [str(seed) for seed in bench.seeds if bench.stage(name, seed, "T1") not in bench.stages.done]
    part = f" (seed {', '.join(missing)} not run)" if missing else ""
    if name == "base":
        return part.strip()
    ends = [differences(result)[1] or [0.0, 0.0] for result in found["0"]]
    if all(low > 0 for low, _ in ends):
        return "better" + part
    return ("worse" if all(high < 0 for _, high in ends) else "no difference") + part


# --- the command line


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--target", type=Path, help="the target's folder")
    found.add_argument("--prompts", type=Path, help="JSONL of prompts to train on")
    found.add_argument("--eval", type=Path, nargs="+", default=[], help="JSONL files of prompts")
    found.add_argument("--out", type=Path, help="where everything goes: some 45 GB")
    found.add_argument(
        "--lines",
        nargs="+",
        choices=[*LINES, *MORE],
        metavar="LINE",
        help=f"only these, and the base: {', '.join([*LINES, *MORE])}",
    )
    found.add_argument("--seeds", type=int, help="how many: 2")
    found.add_argument("--steps", type=int, help="of every training: 500")
    found.add_argument("--jobs", type=int, default=1, help="commands at once: 1")
    found.add_argument(
        "--seconds", type=float, help="stop after so many; what is left is marked, the same line goes on"
    )
    found.add_argument("--summary", type=Path, help="OUT/ablation/summary unless given")
    found.add_argument("--quick", action="store_true", help="few prompts, small drafters: does it run at all?")
    return found


def main(words: Sequence[str] | None = None) -> int:
    given = parser().parse_args(words)
    alone = given.target is None
    wanted, seeds, steps = (["any", "layers-3"], 1, 20) if alone else ([*LINES, *MORE], 2, 500)
    wanted, seeds, steps = given.lines or wanted, given.seeds or seeds, given.steps or steps
    lines = {name: about for name, about in (LINES | MORE).items() if name == "base" or name in wanted}
    with tempfile.TemporaryDirectory(prefix=".ablation-") as scratch:
        out = (given.out or Path(scratch)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        target, prompts, sets = demo(out) if alone else (given.target, given.prompts, given.eval)
        if not (prompts and sets) or not (alone or given.out):
            raise SystemExit("With --target give --prompts, --eval and --out as well.")
        target, prompts, *sets = (path.resolve() for path in (target, prompts, *sets))
        flags = {key: shlex.split(text) for key, text in (QUICK if alone or given.quick else FLAGS).items()}
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(out / "compiled"),
            "TRITON_CACHE_DIR": str(out / "compiled" / "triton"),
            "LOCAL_WORLD_SIZE": str(given.jobs),  # commands at once share the CPU's cores, as torchrun's do
        }
        summary, failures = given.summary or out / "ablation" / "summary", dict[str, str]()
        print(f"What the stage in hand says is in {out}/STAGE.log, the table in {summary}/summary.md", flush=True)
        stages = Stages(out, summary, given.seconds, environment, after=lambda stages: write_summary(bench, failures))
        bench = Bench(stages, lines, tuple(range(seeds)), steps, given.jobs, flags, target, prompts, tuple(sets))
        try:
            with stages:
                make(bench, failures)
        except Stopped:
            pass  # the table says so
        except Failed as failed:
            print(failed, file=sys.stderr)
            return 1
        print("\n" + (summary / "summary.md").read_text())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
