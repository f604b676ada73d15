"""summary.md and summary.json of bench/half_hour.py, from the results of the stages that are done."""

import json
import math
import shlex
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _stages import Done, Stages, interval, speed

from dflash.files import write_atomically

TEMPERATURES = ("0", "1")
REFERENCE = 7.6  # steps/s of SpecForge, its target inside: SmolLM2-135M, one H200, 2,048 anchors × 16
COPIED = ("metrics.jsonl", "config.toml", "environment.json")  # of the run


def evaluation(name: str, prompts: Path, temperature: str) -> str:
    """The stage that decodes a set."""
    return f"{name}/{prompts.stem}-T{temperature}"


def write_summary(stages: Stages, name: str, sets: Sequence[Path]) -> None:
    """All that is known so far, for people and for programs."""
    done, out = stages.done, stages.out / name
    for file in (*(out / "run" / each for each in COPIED), out / "report.html"):
        if file.exists():
            shutil.copyfile(file, stages.summary / file.name)
    total = sum(each.seconds for each in done.values())
    wall = time.time() - stages.began
    parts = [
        f"## {name}, {time.strftime('%Y-%m-%d %H:%M')}{machine(out / 'run' / 'environment.json')}",
        acceptance_table(done, name, sets),
        served_line(done, name),
        training_lines(done.get(f"{name}/train"), out / "run" / "metrics.jsonl"),
        stage_table(done.values(), stages.out),
        f"{total:.0f} s in {len(done)} stages; {wall:.0f} s since the first start, pauses between calls included."
        + (f" Not finished: {stages.why}." if stages.why else ""),
    ]
    write_atomically(stages.summary / "summary.md", "\n\n".join(part for part in parts if part) + "\n")
    about = {"recipe": name, "seconds": total, "wall_seconds": wall, "average": averages(done, name, sets)}
    about["stages"] = {key: each.__dict__ for key, each in done.items()}
    write_atomically(stages.summary / "summary.json", json.dumps(about))


def averages(done: dict[str, Done], name: str, sets: Sequence[Path]) -> dict[str, Any]:
    """Mean over the sets of the pooled and the macro figure with its interval, per temperature, once all are there."""
    found: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        keys = [evaluation(name, each, temperature) for each in sets]
        if all(key in done for key in keys):
            results = [done[key].result for key in keys]
            found[temperature] = {kind: mean_of(results, kind) for kind in ("pooled", "macro")}
    return found


def mean_of(results: Sequence[dict[str, Any]], kind: str) -> tuple[float, list[float] | None]:
    """The sets are independent, so the halves of their intervals add up as squares."""
    values = [result["acceptance_length"][kind] for result in results]
    around = [result["acceptance_length_ci"][kind] for result in results]
    mean = sum(values) / len(values)
    if None in around:
        return mean, None
    low, high = (
        math.hypot(*(value - ends[side] for value, ends in zip(values, around, strict=True))) / len(values)
        for side in (0, 1)
    )
    return mean, [mean - low, mean + high]


def acceptance_table(done: dict[str, Done], name: str, sets: Sequence[Path]) -> str:
    """A row a set and one for their average: pooled and macro with 95 % intervals, and the greedy output's verdicts."""
    rows = [
        "| set | answers | greedy, pooled | greedy, macro | identical | ties | wrong | T = 1, pooled | T = 1, macro |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in sets:
        cells: list[Any] = [each.stem]
        for temperature in TEMPERATURES:
            one = done.get(evaluation(name, each, temperature))
            verdicts = ("answers", "identical", "ties", "wrong") if temperature == "0" else ()
            counts = [one.result[key] if one else "–" for key in verdicts]
            lengths = [
                interval(one.result["acceptance_length"][kind], one.result["acceptance_length_ci"][kind])
                if one
                else "–"
                for kind in ("pooled", "macro")
            ]
            cells += [*counts[:1], *lengths, *counts[1:]]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    means = averages(done, name, sets)
    greedy, drawn = (
        [interval(*means[each][kind]) if each in means else "–" for kind in ("pooled", "macro")]
        for each in TEMPERATURES
    )
    rows.append(f"| average | | {greedy[0]} | {greedy[1]} | | | | {drawn[0]} | {drawn[1]} |")
    return "Acceptance length with 95 % intervals, bonus token included:\n\n" + "\n".join(rows)


def served_line(done: dict[str, Done], name: str) -> str:
    """Validation's figure on held-out rows against what the same prompts give when they are served."""
    simulated, served = done.get(f"{name}/simulated"), done.get(f"{name}/served")
    if simulated is None or served is None:
        return ""
    rows = next((each for each in simulated.result["by_category"] if each["category"] == "greedy"), None)
    if rows is None or not rows["pooled"]:
        return ""
    ours, theirs = rows["pooled"], served.result["acceptance_length"]["pooled"]
    around = served.result["acceptance_length_ci"]["pooled"]
    return (
        f"Simulated on the {rows['answers']} held-out rows answered greedily: {interval(ours, rows['pooled_ci'])}; "
        f"served on their prompts: {interval(theirs, around)}; simulated ÷ served {ours / theirs:.3f}."
    )


def training_lines(done: Done | None, metrics: Path) -> str:
    """Where the training's seconds went, and how many steps it makes."""
    if done is None or done.result["steps_per_second"] is None:
        return ""
    result, steps = done.result, [json.loads(line) for line in metrics.read_text().splitlines()]
    anchors = [line["anchors"] for line in steps if "anchors" in line]
    loop, rate, best = result["loop_seconds"], result["steps_per_second"], result["best"]
    chosen = f"; chosen: step {best['step']}, simulated {best['acceptance_length']['pooled']:.2f}" if best else ""
    graphs = f", in graphs {result['graph_share']:.1%}" if result["graph_share"] else ""
    which = "its only process" if done.parts == 1 else f"the last of its {done.parts} processes"
    lines = [
        f"Training: {done.seconds:.0f} s from the process's start to its end, {result['steps']} steps{chosen}. "
        f"Of the {done.last:.0f} s of {which}:",
        "",
        f"- {done.last - result['seconds']:.1f} s start, compilation and capture",
        f"- {loop:.1f} s of steps: {rate:.2f} a second, {sum(anchors) / len(anchors):,.0f} anchors each, "
        f"waiting for data {result['data_wait']:.2%}{graphs}",
        f"- {result['seconds'] - loop:.1f} s validations and checkpoints",
    ]
    if result["device"] == "cuda":
        lines.append(
            f"- {rate / REFERENCE:.2f} times SpecForge's {REFERENCE} steps/s (2,048 anchors × 16, its target inside; "
            "comparable for SmolLM2-135M on an H200 with as many anchors)"
        )
    return "\n".join(lines)


def stage_table(done: Iterable[Done], out: Path) -> str:
    rows = ["| stage | seconds | processes | speed | command |", "| --- | --- | --- | --- | --- |"]
    for each in done:
        command = shlex.join(each.words).replace(str(out), "OUT")
        rows.append(f"| {each.name} | {each.seconds:.1f} | {each.parts} | {speed(each)} | `dflash {command}` |")
    return "\n".join(rows)


def machine(environment: Path) -> str:
    """The run's device and versions, as far as they are written down."""
    if not environment.exists():
        return ""
    found = json.loads(environment.read_text())
    return f", {found['device']}, torch {found['torch']}"
