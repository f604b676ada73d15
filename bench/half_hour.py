"""A drafter from nothing but prompts, through the product's own commands, and the table that says how good it is.

    python bench/half_hour.py --target HF_FOLDER --prompts train.jsonl --eval a.jsonl b.jsonl --out FOLDER

The target answers the prompts, its states are extracted, a drafter is trained on them, exported, and decoded on every
evaluation set, greedily and at temperature 1. The recipes below are for a 135M target on one H200: `same-prompts` sees
greedy answers to the prompts given and trains for at most 198 s; `best` is what fits into half an hour, with sampled
answers and with user turns that the target makes up. Without a target it tries itself out on tiny-chat.

The same line goes on where it was stopped (--seconds, Ctrl-C), so it may run in pieces. FOLDER/RECIPE/summary is
written after every stage: summary.md for people, summary.json, the run's metrics.jsonl, config.toml and
environment.json, report.html, log.txt. FOLDER may lie in /dev/shm: the states of `best` are some 35 GB.
"""

import argparse
import importlib.util
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from _half_hour_summary import evaluation, write_summary
from _stages import Failed, Stages, Stopped, demo

from dflash.errors import DflashError
from dflash.files import write_atomically

TRAIN = (
    "--lr 1e-3 --clip 0.3 --gamma 4 --token-budget 28672 --batch-tokens 28672 --anchors 2048 --anchor-density 1 "
    "--num-heads 18 --num-kv-heads 6"
)
ANSWER = "--max-new-tokens 192 --batch-size 1024"
#: Flags of every stage. `greedy`: answers to the prompts; `turns`, `turns-greedy`: user turns sampled from the target,
#: and answers to them; `sampled`: answers to both. `served`: held-out prompts of the store, decoded with the drafter,
#: to compare with what is simulated there.
RECIPES = {
    "same-prompts": {
        "greedy": ANSWER,
        "extract": "--buckets 448 --holdout 0.02",
        "train": f"--steps 2300 --eval-every 1150 {TRAIN}",
        "eval": "--max-new-tokens 128",
        "served": "--max-new-tokens 192",
    },
    "best": {
        "greedy": ANSWER,
        "turns": "--samples 16000 --temperature 0.8 --max-new-tokens 96 --batch-size 1024",
        "turns-greedy": ANSWER,
        "sampled": f"--temperature 0.7 --samples 2 {ANSWER}",
        "extract": "--buckets 448 --storage int8 --holdout 0.01",
        "train": f"--steps 9000 --eval-every 2250 {TRAIN}",
        "eval": "--max-new-tokens 128",
        "served": "--max-new-tokens 192",
    },
}
#: Instead of the above with --quick: a minute on one core with a tiny target.
QUICK = {
    "greedy": "--max-new-tokens 96 --batch-size 96 --limit 96",
    "turns": "--samples 32 --temperature 0.8 --max-new-tokens 48 --batch-size 32",
    "turns-greedy": "--max-new-tokens 96 --batch-size 32",
    "sampled": "--temperature 0.7 --samples 2 --max-new-tokens 96 --batch-size 96 --limit 24",
    "extract": "--buckets 448 --num-taps 3 --holdout 0.1",
    "train": "--steps 40 --eval-every 20 --num-layers 2 --block-size 8 --lr 2e-3 --clip 0.3 --gamma 2 "
    "--token-budget 3584 --batch-tokens 3584 --anchors 128 --anchor-density 1",
    "eval": "--max-new-tokens 96 --limit 8",
    "served": "--max-new-tokens 96",
}
Flags = dict[str, list[str]]


# --- the stages, in order


def make(stages: Stages, name: str, flags: Flags, target: Path, prompts: Path, sets: Sequence[Path]) -> None:
    """Everything, each stage where it is not done yet."""
    out = stages.out / name
    store, run, drafter = out / "store", out / "run", out / "drafter"
    answers = answer(stages, name, flags, target, prompts, sets)
    stages.run(
        f"{name}/extract", "extract", "--target", target, "--data", *answers, "--store", store, *flags["extract"]
    )
    stages.run(f"{name}/train", "train", "--store", store, "--run", run, *flags["train"])
    stages.run(f"{name}/export", "export", run, "--out", drafter)
    ours: tuple[str | Path, ...] = ("eval", "--drafter", drafter)
    for each in sets:
        stages.run(evaluation(name, each, "0"), *ours, "--target", target, "--prompts", each, *flags["eval"])
    stages.run(f"{name}/simulated", *ours, "--store", store)
    held_out = write_held_out(store, answers[0], out / "held_out.jsonl")
    stages.run(f"{name}/served", *ours, "--target", target, "--prompts", held_out, *flags["served"])
    for each in sets:
        words = (*ours, "--target", target, "--prompts", each, "--temperature", "1", *flags["eval"])
        stages.run(evaluation(name, each, "1"), *words)
    if importlib.util.find_spec("matplotlib"):
        (run / "eval").mkdir(exist_ok=True)
        for each in sets:
            result = stages.done[evaluation(name, each, "0")].result
            write_atomically(run / "eval" / f"{each.stem}.json", json.dumps(result))
        stages.run(f"{name}/report", "report", run, "--out", out / "report.html")


def answer(stages: Stages, name: str, flags: Flags, target: Path, prompts: Path, sets: Sequence[Path]) -> list[Path]:
    """The files of answers to train on; the first holds the greedy answers to the prompts, which recipes share."""

    def regenerate(stage: str, out: Path, asked: Iterable[Path], *more: str) -> Path:
        stages.run(stage, "regenerate", "--target", target, "--data", *asked, "--out", out, *more)
        return out

    out, asked = stages.out / name, [prompts]
    found = [regenerate("greedy", stages.out / "greedy.jsonl", asked, *flags["greedy"])]
    if "turns" in flags:
        start = write_turn_start(target, out / "turn_start.jsonl")
        raw = regenerate(f"{name}/turns", out / "turns.jsonl", [start], *flags["turns"])
        turns = out / "user_turns.jsonl"
        if keep_user_turns(raw, target, turns, (prompts, *sets)):
            asked.append(turns)
            answers = out / "turns_greedy.jsonl"
            found.append(regenerate(f"{name}/turns-greedy", answers, [turns], *flags["turns-greedy"]))
    if "sampled" in flags:
        found.append(regenerate(f"{name}/sampled", out / "sampled.jsonl", asked, *flags["sampled"]))
    return found


# --- files between the stages


def write_turn_start(target: Path, out: Path) -> Path:
    """A prompt of token ids that ends where a user would begin to speak: what follows is a user turn (Magpie)."""
    from dflash.target import load_tokenizer

    tokenizer = load_tokenizer(target)
    before = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False).split("\0")[0]
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    write_atomically(out, json.dumps({"input_ids": ids}) + "\n")
    return out


def keep_user_turns(raw: Path, target: Path, out: Path, others: Sequence[Path]) -> int:
    """Write the finished, distinct, plain user turns, none of which is a prompt of `others`; returns how many."""
    from dflash.data.prompts import read_prompts
    from dflash.target import load_tokenizer

    tokenizer = load_tokenizer(target)
    asked = [
        message["content"] for each in others for one in read_prompts(str(each)) for t in one.turns for message in t
    ]
    seen, kept, count = {plain(text) for text in asked if isinstance(text, str)}, [], 0
    for line in raw.read_text().splitlines():
        record, count = json.loads(line), count + 1
        ids = [token for token, own in zip(record["input_ids"], record["loss_mask"], strict=True) if own]
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        usable = 12 <= len(text) <= 600 and text.isascii() and "[" not in text  # [placeholders] of form letters
        if record["sampling"]["finish"] == ["stop"] and usable and plain(text) not in seen:
            seen.add(plain(text))
            kept.append(json.dumps({"prompt": text, "source": "user turn sampled from the target"}) + "\n")
    write_atomically(out, "".join(kept))
    print(f"{len(kept):,} of {count:,} sampled user turns are kept", flush=True)
    return len(kept)


def plain(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


def write_held_out(store: Path, answers: Path, out: Path) -> Path:
    """The prompts of the held-out rows that come from the file `answers`, for `dflash eval`. Several turns are played
    again, as they were; of one turn `eval` leaves the answer out itself."""
    from dflash.store import Store

    plan = Store.open(store).plan
    number, held = plan.files.index(str(answers)), [rows for name, rows in plan.rows.items() if name.startswith("v")]
    lines = sorted({int(line) for rows in held for line in rows.line[rows.file == number]})
    text = answers.read_text().splitlines()
    records = [json.loads(text[line - 1]) for line in lines]
    for record in records:
        asked = [message["content"] for message in record.get("messages", ()) if message["role"] == "user"]
        if len(asked) > 1:
            record["turns"] = asked
            del record["messages"]
    write_atomically(out, "".join(json.dumps(record) + "\n" for record in records))
    return out


# --- the command line


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--target", type=Path, help="the target's folder")
    found.add_argument("--prompts", type=Path, help="JSONL of prompts to train on")
    found.add_argument("--eval", type=Path, nargs="+", default=[], help="JSONL files of prompts, one a set")
    found.add_argument("--out", type=Path, help="where everything goes; both recipes may share it")
    found.add_argument("--recipe", choices=RECIPES, default="best")
    found.add_argument("--quick", action="store_true", help="few prompts and steps: does it run at all?")
    found.add_argument("--seconds", type=float, help="stop after so many; the same line goes on")
    found.add_argument("--summary", type=Path, help="OUT/RECIPE/summary unless given")
    found.add_argument("--set", action="append", default=[], metavar="STAGE=FLAGS", help='as "train=--steps 9000"')
    return found


def flags_of(recipe: str, quick: bool, changes: Sequence[str]) -> Flags:
    """Every stage's flags; those of a change take the place of the recipe's."""
    flags = {stage: by_flag(QUICK[stage] if quick else given) for stage, given in RECIPES[recipe].items()}
    for change in changes:
        stage, equals, more = change.partition("=")
        if stage not in flags or not equals:
            raise SystemExit(f"--set {change}: name one of {', '.join(flags)}, then = and its flags.")
        flags[stage] |= by_flag(more)
    return {
        stage: [word for flag, values in given.items() for word in (flag, *values)] for stage, given in flags.items()
    }


def by_flag(line: str) -> Flags:
    """{"--steps": ["40"], …}."""
    found: Flags = {}
    for word in shlex.split(line):
        if word.startswith("--"):
            found[word] = values = []
        elif not found:
            raise SystemExit(f"{line}: begin with a flag.")
        else:
            values.append(word)
    return found


def main(words: Sequence[str] | None = None) -> int:
    given = parser().parse_args(words)
    flags = flags_of(given.recipe, given.quick or given.target is None, given.set)
    with tempfile.TemporaryDirectory(prefix=".half-hour-") as scratch:
        out = (given.out or Path(scratch)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        target, prompts, sets = given.target, given.prompts, given.eval
        if target is None:
            target, prompts, sets = demo(out)
        elif not (prompts and sets and given.out):
            raise SystemExit("With --target give --prompts, --eval and --out as well.")
        target, prompts, *sets = (path.resolve() for path in (target, prompts, *sets))
        summary = given.summary or out / given.recipe / "summary"

        def write(stages: Stages) -> None:
            write_summary(stages, given.recipe, sets)

        print(f"{given.recipe}: what the stage in hand says is in {out}/STAGE.log, results in {summary}", flush=True)
        try:
            with Stages(out, summary, given.seconds, after=write) as stages:
                make(stages, given.recipe, flags, target, prompts, sets)
        except Stopped as stopped:
            print(f"Not finished: {stopped}; the same line goes on.", file=sys.stderr)
            return 75
        except (Failed, DflashError) as failed:
            print(failed, file=sys.stderr)
            return 1
        print("\n" + (summary / "summary.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
