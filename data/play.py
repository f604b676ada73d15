"""Play prompts turn by turn to their end: in batches with the target in this process, or at once with a server."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dflash.data.config import RegenerateConfig
from dflash.data.conversations import BadLineError, Message
from dflash.data.prompts import Prompt
from dflash.data.render import render_prompt
from dflash.data.server import assistant_message, chat_url, complete
from dflash.errors import DflashError
from dflash.signals import Stop


@dataclass
class Item:
    """A prompt and the number of the sample, and how far its play has come."""

    prompt: Prompt
    sample: int
    args: dict[str, Any]
    messages: list[Message] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)  # where the prompt is token ids: prompt and answer
    finish: list[str] = field(default_factory=list)  # for each answer: stop or length
    new_tokens: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt.id, self.sample

    @property
    def turns(self) -> int:
        """How many answers are wanted; token ids want one."""
        return max(len(self.prompt.turns), 1)


Unit = list[Item]


@dataclass(frozen=True, kw_only=True)
class Local:
    """What is known of a target before it is loaded."""

    folder: Path
    tokenizer: Any
    stop_ids: tuple[int, ...]
    context: int  # the longest prompt and answer together


def local_units(items: list[Item], local: Local, config: RegenerateConfig) -> list[Unit]:
    """Fixed batches of similar length, longest first: what does not fit shows at once. Left out: no room to answer."""
    fitting = []
    for item in items:
        length = len(_prompt_ids(item, 0, local))
        if length + config.max_new_tokens <= local.context:
            fitting.append((-length, item.key, item))
    ordered = [item for _, _, item in sorted(fitting, key=lambda entry: entry[:2])]
    size = rows_at_once(config) * (4 if _cuda() else 1)  # a GPU's rows go on with the next prompt of their unit
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def rows_at_once(config: RegenerateConfig) -> int:
    """Prompts that are decoded together, memory permitting."""
    return config.batch_size or (512 if _cuda() else 16)


def _cuda() -> bool:
    import torch  # not needed where a server answers

    return torch.cuda.is_available()


def play_local(units: list[Unit], local: Local, config: RegenerateConfig) -> Iterator[Unit]:
    """Load the target and play the batches in order."""
    import torch

    from dflash.data.generate import Generator

    generator = Generator(config, local.folder, local.stop_ids, rows_at_once(config))
    for unit in units:
        try:
            _play_batch(generator, unit, local, config)
        except torch.OutOfMemoryError as error:
            longest = max(len(_prompt_ids(item, 0, local)) for item in unit)
            raise DflashError(
                f"Out of memory with {rows_at_once(config)} prompts of up to {longest:,} tokens at once; give a "
                "smaller --batch-size."
            ) from error
        yield unit


def _play_batch(generator: Any, batch: Unit, local: Local, config: RegenerateConfig) -> None:
    """The answers of one turn are part of the next turn's prompt; who has no room for it leaves."""
    active = batch
    for turn in range(max(item.turns for item in batch)):
        prompts = [(item, _prompt_ids(item, turn, local)) for item in active if turn < item.turns]
        prompts = [(item, ids) for item, ids in prompts if len(ids) + config.max_new_tokens <= local.context]
        if not prompts:
            return
        answers = generator.answer([ids for _, ids in prompts], derived_seed(config.seed, batch[0].key, turn))
        for (item, ids), answer in zip(prompts, answers, strict=True):
            item.finish.append("length" if answer.stop_id is None else "stop")
            ending = [] if answer.stop_id is None else [answer.stop_id]
            item.new_tokens += len(answer.ids + ending)
            if item.prompt.input_ids is not None:
                item.input_ids = ids + answer.ids + ending
            else:
                item.messages.extend(item.prompt.turns[turn])
                item.messages.append({"role": "assistant", "content": _answer_text(local.tokenizer, answer)})
        active = [item for item, _ in prompts]


def _prompt_ids(item: Item, turn: int, local: Local) -> list[int]:
    if item.prompt.input_ids is not None:
        return list(item.prompt.input_ids)
    try:
        messages = [*item.messages, *item.prompt.turns[turn]]
        return render_prompt(messages, local.tokenizer, item.args, item.prompt.tools)
    except BadLineError as error:
        raise DflashError(f"{item.prompt.file}, line {item.prompt.line}: {error}; correct the line.") from error


def _answer_text(tokenizer: Any, answer: Any) -> str:
    text = tokenizer.decode(answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    # The limit may cut a character in two; half of one is no text.
    return text.rstrip("\ufffd") if answer.stop_id is None else text


def derived_seed(*parts: Any) -> int:
    """A seed of its own for every batch and turn, so that a resumed run samples as an unbroken one."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def server_units(items: list[Item]) -> list[Unit]:
    """A conversation each."""
    for item in items:
        if item.prompt.input_ids is not None:
            place = f"{item.prompt.file}, line {item.prompt.line}"
            raise DflashError(f"{place}: a server's chat takes no token ids; answer them with --target.")
    return [[item] for item in items]


def play_server(units: list[Unit], config: RegenerateConfig, stop: Stop) -> Iterator[Unit]:
    """Several conversations at a time, yielded as they finish; a few more are queued: the server should not wait."""
    ask: Callable[[Item], None] = partial(_ask_server, config=config, stop=stop)
    waiting = iter(units)
    running: dict[Future[None], Unit] = {}
    at_once = config.batch_size or 16
    with ThreadPoolExecutor(at_once) as pool:
        try:
            while True:
                while len(running) < 2 * at_once and (unit := next(waiting, None)) is not None:
                    running[pool.submit(ask, unit[0])] = unit
                if not running:
                    return
                done = wait(running, return_when=FIRST_COMPLETED).done
                for future in sorted(done, key=lambda each: each.exception() is not None):  # keep what was answered
                    unit = running.pop(future)
                    future.result()
                    yield unit
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ask_server(item: Item, config: RegenerateConfig, stop: Stop) -> None:
    assert config.server is not None
    for turn, messages in enumerate(item.prompt.turns):
        stop.check(f"the answers that were finished are in {config.out}.part; run the same command again to go on.")
        asked: Sequence[Message] = [*item.messages, *messages]
        body: dict[str, Any] = {
            "model": config.model,
            "messages": asked,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": 1.0,  # servers take other defaults from the model's folder
            "seed": derived_seed(config.seed, item.key, turn) % 2**31,
        }
        if item.prompt.tools:
            body["tools"] = item.prompt.tools
        if item.args:
            body["chat_template_kwargs"] = item.args
        reply = complete(chat_url(config.server), body, stop)
        item.messages = [*asked, assistant_message(reply.choice)]
        item.finish.append("length" if reply.choice.get("finish_reason") == "length" else "stop")
        item.new_tokens += reply.tokens
