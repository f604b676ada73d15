"""Screens of the commands that make something: extract, train, export, eval, regenerate."""

from typing import Any

from dflash.present.parts import Result, counts, length, number, per_slot, percent, rate, screen, seconds, size, table

LIMITS = {"gpu": "the target's forward", "disk": "the disk", "data": "preparing the batches"}


def extract(result: Result, config: Any, data: Any) -> str:
    forecast = config.dry_run
    documents, tokens = result.get("documents"), result.get("tokens")
    supervised = result.get("supervised_tokens")
    share = f" ({percent(supervised / tokens)} supervised)" if tokens and supervised is not None else ""
    made = result.get("made") != 0  # nothing was left to do: no speed to speak of
    buckets = [(each["ceiling"], number(each["rows"]), number(each["tokens"])) for each in result.get("buckets", ())]
    return screen(
        _extract_title(result, config),
        [
            ("documents", number(documents)),
            ("tokens", number(tokens) + share if tokens is not None else ""),
            ("rows", number(result.get("rows"))),
            ("dropped", counts(result.get("dropped"))),
            ("on disk", size(result.get("bytes"))),
            ("shards", number(result.get("shards"))),
            ("time", seconds(result) if made else ""),
            ("speed", rate(result.get("tokens_per_second")) if made else ""),
            ("limited by", LIMITS.get(result.get("limited_by", ""), "") if made else ""),
            ("labels = data", percent(result.get("label_agreement"))),
        ],
        [table(("bucket", "rows", "tokens"), buckets)],
        "the same line without --dry-run" if forecast else f"dflash train --store {config.store} --run runs/first",
    )


def _extract_title(result: Result, config: Any) -> str:
    if config.dry_run:
        return "Forecast; nothing was written"
    if result.get("missing"):
        return f"{result['missing']:,} shards of other workers are still missing: {config.store}"
    return f"Store complete: {config.store}"


def train(result: Result, config: Any) -> str:
    loss, wait = result.get("loss"), result.get("data_wait")
    return screen(
        f"Drafter trained: {config.run}",
        [
            ("steps", number(result.get("steps"))),
            ("loss", f"{loss:.4f}" if loss is not None else ""),
            ("acceptance length", length(result.get("acceptance_length"))),
            ("", "simulated on held-out rows" if length(result.get("acceptance_length")) else ""),
            ("best", _best(result)),
            ("checkpoint", result.get("checkpoint")),
            ("time", seconds(result)),
            ("speed", rate(result.get("tokens_per_second"))),
            ("waited for data", percent(wait)),
        ],
        [per_slot(result.get("per_slot"))],
        f"dflash export {config.run} --out drafter",
    )


def _best(result: Result) -> str:
    best = result.get("best")
    return f"{length(best['acceptance_length'])}, at step {best['step']:,}" if best else ""


def export(result: Result, config: Any) -> str:
    out = result.get("out") or getattr(config, "out", None) or "drafter"
    return screen(
        f"Drafter exported: {out}",
        [
            ("layout", ", ".join(filter(None, (result.get("layout"), result.get("dtype"))))),
            ("from", _from_step(result)),
            ("target", result.get("target")),
            ("parameters", number(result.get("parameters"))),
            ("checked", f"reloaded, outputs compared on {on}" if (on := result.get("checked_on")) else ""),
        ],
        next_command=f"dflash eval --drafter {out} --target {result.get('target') or 'MODEL'} --prompts prompts.jsonl",
    )


def _from_step(result: Result) -> str:
    why = f" ({result['why']})" if result.get("why") else ""
    return f"step {result['step']:,}{why}" if result.get("step") is not None else ""


def eval(result: Result, config: Any) -> str:
    speedup = result.get("speedup")
    same = ", ".join(f"{key} {result[key]:,}" for key in ("identical", "ties", "wrong") if result.get(key) is not None)
    lossless = result.get("lossless")
    return screen(
        f"Drafter evaluated: {config.drafter}",
        [
            ("prompts", number(result.get("prompts"))),
            ("acceptance length", length(result.get("acceptance_length"))),
            ("with the drafter", rate(result.get("tokens_per_second"))),
            ("without it", rate(result.get("baseline_tokens_per_second"))),
            ("speed-up", f"{speedup:.2f} times" if speedup is not None else ""),
            ("output", same),
            ("lossless", "" if lossless is None else "yes" if lossless else "NO: see `wrong` above"),
        ],
        [per_slot(result.get("per_slot"))],
        f"serve the target with the drafter in {config.drafter}" if lossless else "",
    )


def regenerate(result: Result, config: Any) -> str:
    kept = result.get("resumed")
    return screen(
        f"Answers written: {config.out}",
        [
            ("prompts", number(result.get("prompts"))),
            ("responses", number(result.get("responses")) + (f" ({kept:,} were there from before)" if kept else "")),
            ("new tokens", number(result.get("new_tokens"))),
            ("dropped", counts(result.get("dropped"))),
            ("time", seconds(result)),
            ("speed", rate(result.get("tokens_per_second"))),
        ],
        next_command=f"dflash extract --target {config.target or 'MODEL'} --data {config.out} --store store",
    )
