"""The target answers prompts: greedily as `generate` does, resumable, in the prompts' order; and through a server."""

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.data import generate, server
from dflash.data.config import RegenerateConfig
from dflash.data.conversations import read_conversations
from dflash.data.journal import Journal
from dflash.data.regenerate import regenerate
from dflash.data.render import Renderer, render_documents, render_prompt
from dflash.errors import DflashError, Interrupted

TINY = str(Path(__file__).parent / "assets" / "tiny-chat")
PROMPTS = [
    {"prompt": "What is 7 plus 8?", "id": "sum"},
    {"turns": ["Name a colour.", "And another?"], "category": "list"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {"prompt": "Say something about the sea and the mountains, please."},
    {"prompt": "ok", "response": "an old answer", "template_args": {"unused": 1}},
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def config(folder: Path, records: list[Any] = PROMPTS, out: str = "out.jsonl", **settings: Any) -> RegenerateConfig:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    if "server" not in settings:
        settings = {"target": TINY, **settings}
    return RegenerateConfig(
        data=(str(path),), out=str(folder / out), **{"max_new_tokens": 24, "batch_size": 2, **settings}
    )


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY)


def plain_greedy(model: Any, messages: list[dict[str, str]], limit: int) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = render_prompt(messages, tokenizer, {})
    for _ in range(limit):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[len(render_prompt(messages, tokenizer, {})) :], skip_special_tokens=True)


def test_greedy_answers_are_the_targets_own_turn_by_turn(tmp_path: Path, model: Any) -> None:
    settings = config(tmp_path)
    result = regenerate(settings)
    written = lines(settings.out)
    assert len(written) == result["lines"] == result["prompts"] == 5
    assert result["responses"] == 6
    roles = [[message["role"] for message in line["messages"]] for line in written]
    assert roles[1] == ["user", "assistant", "user", "assistant"]
    assert roles[2] == ["system", "user", "assistant"]
    for line in written:
        for number, message in enumerate(line["messages"]):
            if message["role"] == "assistant":
                expected = plain_greedy(model, line["messages"][:number], 24)
                assert message["content"].rstrip("\ufffd") == expected.rstrip("\ufffd")


def test_a_line_records_how_it_was_made_and_what_the_prompt_carried(tmp_path: Path) -> None:
    settings = config(tmp_path, template_args={"style": "x"})
    regenerate(settings)
    written = lines(settings.out)
    assert written[0]["id"] == "sum"
    assert written[1]["category"] == "list"
    assert "response" not in written[4]
    assert written[4]["template_args"] == {"style": "x", "unused": 1}
    sampling = written[1]["sampling"]
    assert (sampling["temperature"], sampling["prompt"], sampling["sample"]) == (0.0, 1, 0)
    assert len(sampling["finish"]) == 2


def test_the_supervised_text_of_an_answer_is_what_was_generated(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    settings = config(tmp_path, max_new_tokens=40)
    regenerate(settings)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    renderer = Renderer(tokenizer=tokenizer, stop_ids=frozenset([tokenizer.eos_token_id]))
    endings = set()
    for line, conversation in zip(lines(settings.out), read_conversations([settings.out]), strict=True):
        ((tokens, mask),) = render_documents(conversation, renderer)
        ended = line["sampling"]["finish"][-1] == "stop"
        endings.add(ended)
        text = tokenizer.decode(tokens[mask == 1].tolist())
        assert text.endswith(line["messages"][-1]["content"] + ("<|im_end|>" if ended else ""))
    assert endings == {True, False}


def test_a_limit_that_cuts_an_answer_is_recorded(tmp_path: Path) -> None:
    settings = config(tmp_path, PROMPTS[:1], max_new_tokens=2)
    assert regenerate(settings)["new_tokens"] == 2
    assert lines(settings.out)[0]["sampling"]["finish"] == ["length"]


def test_token_ids_are_answered_with_token_ids(tmp_path: Path, model: Any) -> None:
    from transformers import AutoTokenizer

    prompt = [{"role": "user", "content": "What is 7 plus 8?"}]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = render_prompt(prompt, tokenizer, {})
    settings = config(tmp_path, [{"input_ids": ids, "id": 4}])
    regenerate(settings)
    (line,) = lines(settings.out)
    assert line["input_ids"][: len(ids)] == ids
    assert line["loss_mask"] == [0] * len(ids) + [1] * (len(line["input_ids"]) - len(ids))
    assert tokenizer.decode(line["input_ids"][len(ids) :], skip_special_tokens=True) == plain_greedy(model, prompt, 24)
    assert line["id"] == 4


def interrupted_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Send SIGTERM to ourselves while batch number `batches` is answered."""
    answer = generate.Generator.answer
    count = 0

    def counted(self: Any, prompts: Any, seed: int) -> Any:
        nonlocal count
        count += 1
        if count == batches:
            signal.raise_signal(signal.SIGTERM)
        return answer(self, prompts, seed)

    monkeypatch.setattr(generate.Generator, "answer", counted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stopped_run_goes_on_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    samples = 2 if temperature else 1
    whole = config(tmp_path, out="whole.jsonl", temperature=temperature, samples=samples)
    regenerate(whole)
    settings = config(tmp_path, temperature=temperature, samples=samples)
    with monkeypatch.context() as patch:
        interrupted_after(patch, 2)
        with pytest.raises(Interrupted, match="run the same command again to go on") as stopped:
            regenerate(settings)
    assert stopped.value.exit_code == 143
    part = Path(settings.out + ".part")
    kept = len(lines(part))
    assert 0 < kept < 5 * samples
    assert not Path(settings.out).exists()
    part.write_bytes(part.read_bytes() + b'{"messages": [{"role": "us')  # a kill in the middle of a line
    assert regenerate(settings)["resumed"] == kept
    assert Path(settings.out).read_bytes() == Path(whole.out).read_bytes()
    assert not part.exists()


def test_a_complete_file_is_left_alone_without_loading_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path)
    regenerate(settings)
    before = Path(settings.out).stat()
    monkeypatch.setattr(generate, "Generator", None)
    result = regenerate(settings)
    assert (result["resumed"], result["new_tokens"], result["lines"]) == (5, 0, 5)
    after = Path(settings.out).stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_more_of_the_prompts_can_be_answered_later(tmp_path: Path) -> None:
    regenerate(config(tmp_path, limit=2))
    settings = config(tmp_path)
    assert regenerate(settings)["resumed"] == 2
    assert [line["sampling"]["prompt"] for line in lines(settings.out)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "change", [{"max_new_tokens": 9}, {"temperature": 0.5}, {"records": PROMPTS[1:]}, {"template_args": {"a": 1}}]
)
def test_answers_made_otherwise_are_not_mixed(tmp_path: Path, change: dict[str, Any]) -> None:
    settings = config(tmp_path)
    regenerate(settings)
    with pytest.raises(DflashError, match="with other settings; give another --out or remove it"):
        regenerate(config(tmp_path, **change))


def test_a_foreign_file_is_never_overwritten(tmp_path: Path) -> None:
    settings = config(tmp_path)
    Path(settings.out).write_text('{"precious": 1}\n')
    with pytest.raises(DflashError, match="line 1 was not written by dflash regenerate"):
        regenerate(settings)
    assert Path(settings.out).read_text() == '{"precious": 1}\n'


def test_samples_differ_and_are_in_order(tmp_path: Path) -> None:
    settings = config(tmp_path, PROMPTS[:1], temperature=3.0, samples=4)
    regenerate(settings)
    written = lines(settings.out)
    assert [line["sampling"]["sample"] for line in written] == [0, 1, 2, 3]
    assert len({line["messages"][-1]["content"] for line in written}) > 1


def test_a_prompt_without_room_for_an_answer_is_counted(tmp_path: Path) -> None:
    settings = config(tmp_path, [*PROMPTS[:1], {"prompt": "x" * 2040}])
    result = regenerate(settings)
    assert result["dropped"] == {"no_room_for_answer": 1}
    assert result["lines"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--target, to answer in this process, or --server"),
        ({"target": "t", "server": "http://x", "model": "m"}, "--target, to answer in this process, or --server"),
        ({"server": "http://x"}, "--server needs --model"),
        ({"server": "x:80", "model": "m"}, "must start with http://"),
        ({"target": "t", "samples": 2}, "--samples above 1 needs --temperature"),
        ({"target": "t", "max_new_tokens": 0}, "--max-new-tokens must be at least 1"),
        ({"target": "t", "temperature": -1.0}, "--temperature"),
        ({"target": "t", "temperature": float("nan")}, "--temperature"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DflashError, match=message):
        RegenerateConfig(data=("d",), out="o", **settings)


HANGS_UP = 0  # instead of a status: the connection is lost
BABBLES = 1  # a page that is no completion


class FakeServer(ThreadingHTTPServer):
    """Answers with the number of messages and the last text; `failures` holds statuses to send first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.failures: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.gathers: threading.Barrier | None = None  # answers wait until so many have been asked for
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append({**body, "path": self.path})
            status = self.server.failures.pop(0) if self.server.failures else 200
        if self.server.gathers is not None:
            self.server.gathers.wait(timeout=20)
        if status == HANGS_UP:
            self.connection.close()
            return
        text = f"{len(body['messages'])}:{body['messages'][-1]['content'][:6]}"
        message = {"role": "assistant", "content": text, "reasoning_content": "because"}
        reply: dict[str, Any] = {
            "choices": [{"message": message, "finish_reason": "length" if text.startswith("3") else "stop"}],
            "usage": {"completion_tokens": 7},
        }
        if status != 200:
            reply = {"error": {"message": "the prompt is too long"}}
        content = json.dumps(reply).encode() if status != BABBLES else b"<html>Welcome!</html>"
        self.send_response(status if status != BABBLES else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(server, "FIRST_WAIT", 0.01)
    running = FakeServer()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_a_server_answers_turn_by_turn_in_the_prompts_order(tmp_path: Path, fake: FakeServer) -> None:
    settings = config(tmp_path, server=fake.url + "/v1/", model="m", template_args={"enable_thinking": False})
    result = regenerate(settings)
    written = lines(settings.out)
    assert [line["messages"][-1]["content"] for line in written] == ["1:What i", "3:And an", "2:Hi", "1:Say so", "1:ok"]
    assert written[1]["messages"][1] == {"role": "assistant", "content": "1:Name a", "reasoning_content": "because"}
    assert written[1]["sampling"]["finish"] == ["stop", "length"]
    assert (result["responses"], result["new_tokens"]) == (6, 42)
    assert {body["path"] for body in fake.bodies} == {"/v1/chat/completions"}
    assert all(body["chat_template_kwargs"]["enable_thinking"] is False for body in fake.bodies)
    assert all((body["model"], body["max_tokens"], body["temperature"]) == ("m", 24, 0.0) for body in fake.bodies)


def test_an_overloaded_server_is_asked_again(tmp_path: Path, fake: FakeServer) -> None:
    fake.failures = [503, 429, 500]
    assert regenerate(config(tmp_path, server=fake.url, model="m"))["lines"] == 5
    assert len(fake.bodies) == 9


def test_a_lost_connection_is_asked_again(tmp_path: Path, fake: FakeServer) -> None:
    fake.failures = [HANGS_UP, HANGS_UP]
    assert regenerate(config(tmp_path, server=fake.url, model="m"))["lines"] == 5
    assert len(fake.bodies) == 8


def test_a_server_is_asked_by_several_at_once(tmp_path: Path, fake: FakeServer) -> None:
    """Nobody is answered before four ask: with fewer at once this would never end."""
    fake.gathers = threading.Barrier(4)
    records = [{"prompt": f"prompt {n}", "id": n} for n in range(12)]
    settings = config(tmp_path, records, server=fake.url, model="m", batch_size=4)
    regenerate(settings)
    assert [line["id"] for line in lines(settings.out)] == list(range(12))


def test_samples_from_a_server_have_seeds_of_their_own_and_say_how_they_were_made(
    tmp_path: Path, fake: FakeServer
) -> None:
    settings = config(
        tmp_path, PROMPTS[:3], server=fake.url, model="m", temperature=0.7, samples=3, seed=5,
        template_args={"enable_thinking": True},
    )  # fmt: skip
    result = regenerate(settings)
    written = lines(settings.out)
    assert (result["lines"], result["prompts"], result["responses"]) == (9, 3, 12)
    places = [(line["sampling"]["prompt"], line["sampling"]["sample"]) for line in written]
    assert places == [(p, s) for p in range(3) for s in range(3)]
    assert len({body["seed"] for body in fake.bodies}) == len(fake.bodies) == 12
    assert {(body["temperature"], body["top_p"]) for body in fake.bodies} == {(0.7, 1.0)}
    for line in written:
        assert line["template_args"] == {"enable_thinking": True}
        made = {key: line["sampling"][key] for key in ("model", "temperature", "top_p", "max_new_tokens", "seed")}
        assert made == {"model": "m", "temperature": 0.7, "top_p": 1.0, "max_new_tokens": 24, "seed": 5}


def test_a_stopped_server_run_goes_on_and_asks_only_what_is_left(
    tmp_path: Path, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"prompt": f"prompt {n}", "id": n} for n in range(10)]
    settings = config(tmp_path, records, server=fake.url, model="m", batch_size=1)
    append, count = Journal.append, 0

    def stopping(self: Journal, *args: Any) -> None:
        nonlocal count
        count += 1
        append(self, *args)
        if count == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stopping)
        with pytest.raises(Interrupted) as stopped:
            regenerate(settings)
    assert stopped.value.exit_code == 130
    kept = {line["id"] for line in lines(settings.out + ".part")}
    assert len(kept) == 4
    fake.bodies.clear()
    assert regenerate(settings)["resumed"] == 4
    assert {body["messages"][0]["content"] for body in fake.bodies} == {
        f"prompt {n}" for n in range(10) if n not in kept
    }
    assert [line["id"] for line in lines(settings.out)] == list(range(10))


def test_a_refusal_is_not_tried_again_and_what_was_answered_is_kept(tmp_path: Path, fake: FakeServer) -> None:
    settings = config(tmp_path, server=fake.url, model="m", batch_size=1)
    fake.failures = [200, 200, 200, 400]
    with pytest.raises(DflashError, match=r"refuses a request \(400 the prompt is too long\); check"):
        regenerate(settings)
    kept = len(lines(settings.out + ".part"))
    assert kept == 2
    fake.failures = []
    assert regenerate(settings)["resumed"] == kept
    assert len(lines(settings.out)) == 5


def test_a_server_of_another_kind_is_named(tmp_path: Path, fake: FakeServer) -> None:
    fake.failures = [BABBLES]
    with pytest.raises(DflashError, match=r"something else than a chat completion \('<html>.*; give a --server"):
        regenerate(config(tmp_path, PROMPTS[:1], server=fake.url, model="m"))
    assert len(fake.bodies) == 1


def test_a_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_WAIT", 0.001)
    settings = config(tmp_path, PROMPTS[:1], server="http://127.0.0.1:9", model="m")
    with pytest.raises(DflashError, match=r"127\.0\.0\.1:9/v1/chat/comp.* not answer after 6 attempts \(.*refused\)"):
        regenerate(settings)


def test_ids_that_the_target_does_not_have_are_refused_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"prompts\.jsonl, line 2: the token id 99999 is none of target"):
        regenerate(config(tmp_path, [{"input_ids": [5]}, {"input_ids": [5, 99_999]}]))
