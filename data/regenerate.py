"""Have the target answer prompts, in this process or through a server, so that the drafter trains on its own words.

Work is cut into units that do not depend on what is done already (`play`). A finished unit is appended to OUT.part;
after a stop the same command goes on, and OUT appears whole, in the order of the prompts.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.data.config import RegenerateConfig
from dflash.data.journal import Journal
from dflash.data.play import Item, Local, local_units, play_local, play_server, server_units
from dflash.data.prompts import Prompt, read_prompts
from dflash.data.sources import data_fingerprint
from dflash.files import sha256_json
from dflash.progress import progress
from dflash.signals import catch_stop


def regenerate(config: RegenerateConfig) -> dict[str, Any]:
    """Answer the prompts of `config.data` and write `config.out`."""
    started = time.monotonic()
    prompts = read_prompts(config.data, config.limit)
    local = _open_target(config, prompts)
    run = _run_fingerprint(config, local)
    items = [
        Item(prompt, sample, {**config.template_args, **prompt.template_args})
        for prompt in prompts
        for sample in range(config.samples)
    ]
    units = local_units(items, local, config) if local else server_units(items)
    wanted = {item.key for unit in units for item in unit}
    new = {"new_tokens": 0, "responses": 0, "turns_without_room": 0}
    with catch_stop() as stop, Journal(Path(config.out), run) as journal:
        resumed = sum(key in journal for key in wanted)
        # A batch is played whole even where some of its lines exist: its composition decides near ties.
        left = [unit for unit in units if any(item.key not in journal for item in unit)]
        with progress("answering", sum(map(len, left)), "prompts") as advance:
            for unit in play_local(left, local, config) if local and left else play_server(left, config, stop):
                for item in unit:
                    if item.key not in journal:
                        journal.append(item.key, _record(item, config, run))
                    new["new_tokens"] += item.new_tokens
                    new["responses"] += len(item.finish)
                    new["turns_without_room"] += item.turns - len(item.finish)
                journal.flush()
                advance(len(unit))
                stop.check(f"the answers so far are in {journal.part}; run the same command again to go on.")
        lines = journal.finish()
    seconds = time.monotonic() - started
    return {
        "prompts": len(prompts),
        "lines": lines,
        "resumed": resumed,
        **new,
        "dropped": {"no_room_for_answer": len(items) - len(wanted)} if len(items) > len(wanted) else {},
        "seconds": seconds,
        "tokens_per_second": new["new_tokens"] / max(seconds, 1e-9),
        "out": config.out,
    }


def _open_target(config: RegenerateConfig, prompts: Sequence[Prompt]) -> Local | None:
    """What rendering needs; the model itself is loaded when something is left to answer."""
    if config.target is None:
        return None
    from dflash.decode import check_ids
    from dflash.target import TargetSpec, load_tokenizer, resolve_target, stop_token_ids

    folder = resolve_target(config.target)
    tokenizer = None
    if any(prompt.input_ids is None for prompt in prompts):
        tokenizer = load_tokenizer(folder, config.chat_template, config.trust_remote_code)
    spec = TargetSpec.read(folder, trust_remote_code=config.trust_remote_code)
    for prompt in prompts:
        if prompt.input_ids is not None:
            check_ids(prompt.input_ids, spec, f"{prompt.file}, line {prompt.line}")
    return Local(
        folder=folder, tokenizer=tokenizer, stop_ids=stop_token_ids(folder), context=spec.max_position_embeddings
    )


def _run_fingerprint(config: RegenerateConfig, local: Local | None) -> str:
    """What makes two runs' answers exchangeable. How many are wanted, and at what speed, does not count."""
    settings: dict[str, Any] = {
        "data": data_fingerprint(config.data),
        "template_args": config.template_args,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "model": config.model,
    }
    if local is not None:
        from dflash.target import template_fingerprint, weights_fingerprint

        settings |= {"weights": weights_fingerprint(local.folder), "dtype": config.dtype}
        settings["template"] = template_fingerprint(local.tokenizer) if local.tokenizer else None
    return sha256_json(settings)[:16]


def _record(item: Item, config: RegenerateConfig, run: str) -> dict[str, Any]:
    """The line of an answer: the conversation, how it was made, and what else the prompt's line carried."""
    record: dict[str, Any]
    if item.prompt.input_ids is not None:
        prompt = len(item.prompt.input_ids)
        record = {"input_ids": item.input_ids, "loss_mask": [0] * prompt + [1] * (len(item.input_ids) - prompt)}
    else:
        record = {"messages": item.messages}
        if item.prompt.tools:
            record["tools"] = item.prompt.tools
    record["template_args"] = item.args
    record["sampling"] = {
        "model": config.model or config.target,
        "temperature": config.temperature,
        "top_p": 1.0,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "prompt": item.prompt.id,
        "sample": item.sample,
        "finish": item.finish,
        "run": run,
    }
    return record | {key: value for key, value in item.prompt.extra.items() if key not in record}
