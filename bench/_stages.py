"""Stages of a long bench: each a command of the product, done once, cut and resumed like the command itself.

A stage is `python -m dflash WORDS --json` in a process of its own. Its result lies in OUT/NAME.json with its words and
the seconds it took; where that file lies, the stage is not run again. A stop (Ctrl-C, SIGTERM, the time limit) is
passed on once to the commands in hand, which keep what they have, and the same line goes on there. What a command says
goes to OUT/NAME.log and, when it ends, to SUMMARY/log.txt.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
TOLD = 12  # lines of a failed command's log that are shown
TINY_CHAT = ROOT / "tests" / "assets" / "tiny-chat"


class Stopped(Exception):
    """A stop was asked for; the same line goes on."""


class Failed(Exception):
    """A command failed; the message is what it said."""


@dataclass(frozen=True)
class Done:
    """A finished stage. `seconds` of all its processes, `last` of the one that finished it, `parts`: how many."""

    name: str
    words: list[str]
    seconds: float
    last: float
    parts: int
    result: dict[str, Any]


@dataclass
class Stages:
    """The stages of one bench; `after` is called behind each, to write down what is known so far."""

    out: Path
    summary: Path
    limit: float | None = None  # seconds from now, after which what runs is stopped
    environment: dict[str, str] = field(default_factory=dict)
    after: Callable[["Stages"], None] = lambda stages: None

    def __post_init__(self) -> None:
        self.done: dict[str, Done] = {}
        self.why = ""  # it was stopped
        self.running: set[subprocess.Popen[str]] = set()
        self.lock = threading.RLock()
        self.summary.mkdir(parents=True, exist_ok=True)
        began = self.out / "began"
        if not began.exists():
            write_atomically(began, repr(time.time()))
        self.began = float(began.read_text())

    def __enter__(self) -> "Stages":
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self.before:
            signal.signal(number, lambda signum, frame: self.stop(f"stopped by {signal.Signals(signum).name}"))
        if self.limit is not None:
            self.timer = threading.Timer(self.limit, self.stop, [f"{self.limit:g} s are over"])
            self.timer.daemon = True
            self.timer.start()
        return self

    def __exit__(self, *about: object) -> None:
        if self.limit is not None:
            self.timer.cancel()
        for number, handler in self.before.items():
            signal.signal(number, handler)
        with self.lock:
            self.after(self)

    def stop(self, why: str) -> None:
        """Pass the first stop on; more of them (`timeout` sends two) would make a command drop what it has."""
        if not self.why:
            self.why = why
            for process in list(self.running):
                process.terminate()

    def run(self, name: str, *words: str | Path) -> Done:
        """The stage `name`, made now or before."""
        file = self.out / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        wanted, before = [str(word) for word in words], file.exists()
        done = Done(**json.loads(file.read_text())) if before else self._make(name, wanted, file)
        if done.words != wanted:
            was, now = next((a, b) for a, b in zip_longest(done.words, wanted) if a != b)
            raise Failed(
                f"{file} was made with {was!r} where this line has {now!r}: delete it and what followed from it, or "
                "give another --out."
            )
        with self.lock:
            self.done[name] = done
            remark = "  (done before)" if before else f"  (in {done.parts} parts)" if done.parts > 1 else ""
            print(f"{name:<32} {done.seconds:7.1f} s  {speed(done)}{remark}", flush=True)
            self.after(self)
        return done

    def _make(self, name: str, words: list[str], file: Path) -> Done:
        if self.why:
            raise Stopped(self.why)
        cut = file.with_suffix(".cut")
        spent: dict[str, Any] = json.loads(cut.read_text()) if cut.exists() else {"seconds": 0.0, "parts": 0}
        start = time.monotonic()
        code, output = self.call(name, words)
        last = time.monotonic() - start
        spent = {"seconds": spent["seconds"] + last, "parts": spent["parts"] + 1}
        log = file.with_suffix(".log").read_text()
        with self.lock, (self.summary / "log.txt").open("a") as whole:
            whole.write(f"== {name}: dflash {' '.join(words)}\n{log}== exit {code} after {last:.1f} s\n")
        if code:
            write_atomically(cut, json.dumps(spent))
            if self.why:
                raise Stopped(self.why)
            raise Failed("\n".join([f"{name} failed (exit {code}):", *log.splitlines()[-TOLD:]]))
        done = Done(name=name, words=words, last=last, result=json.loads(output), **spent)
        write_atomically(file, json.dumps(asdict(done)))
        cut.unlink(missing_ok=True)
        return done

    def call(self, name: str, words: Sequence[str]) -> tuple[int, str]:
        """Run a command; its exit code and what it printed. In a process group of its own, so that Ctrl-C in a
        terminal reaches it through us alone."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self.out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dflash", *words, "--json"], stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, **self.environment, "PYTHONPATH": path}, process_group=0,
            )  # fmt: skip
            self.running.add(process)
            if self.why:  # between the look at it and the start
                process.terminate()
            output, _ = process.communicate()
            self.running.discard(process)
        return process.returncode, output


def speed(done: Done) -> str:
    """What a command did, in a few words."""
    result = done.result
    match done.words[0]:
        case "regenerate":
            return f"{result['tokens_per_second']:,.0f} tokens/s, {result['responses']:,} answers"
        case "extract":
            return (
                f"{result['tokens_per_second']:,.0f} tokens/s, limited by {result['limited_by']}, "
                f"{result['documents']:,} documents, {result['bytes'] / 1e9:.2f} GB"
            )
        case "train":
            length, rate = result["acceptance_length"]["pooled"], result["steps_per_second"]
            speed = f"{rate:.2f} steps/s, data wait {result['data_wait']:.1%}, " if rate else ""
            return speed + (f"simulated acceptance {length:.2f} at the end" if length else "nothing held out")
        case "eval":
            rate = result.get("tokens_per_second")
            speed = f"{rate:,.0f} tokens/s, " if rate else f"{result['rows']} rows, "
            return speed + f"acceptance {result['acceptance_length']['pooled']:.2f} pooled"
        case "export":
            return f"step {result['step']}"
        case "report":
            return f"{len(result['charts'])} charts"
    return ""


def interval(value: float | None, around: Sequence[float] | None) -> str:
    """2.05 [1.98, 2.13]."""
    if value is None:
        return "–"
    return f"{value:.2f} [{around[0]:.2f}, {around[1]:.2f}]" if around else f"{value:.2f}"


def demo(folder: Path) -> tuple[Path, Path, list[Path]]:
    """A target, prompts and two evaluation sets that are at hand everywhere: tiny-chat and what it can answer."""
    from tiny_tasks import prompts

    asked = prompts(112, seed=0)
    files = {"train": asked[:96], "eval_one": asked[96:104], "eval_two": asked[104:]}
    for name, part in files.items():
        text = "".join(json.dumps({"prompt": each}) + "\n" for each in part)
        write_atomically(folder / f"{name}.jsonl", text)
    return TINY_CHAT, folder / "train.jsonl", [folder / "eval_one.jsonl", folder / "eval_two.jsonl"]
