"""Answers from an OpenAI-compatible server: POST /v1/chat/completions with retries, by the standard library."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from dflash.errors import DflashError
from dflash.signals import Stop

ATTEMPTS = 6
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
TIMEOUT_SECONDS = 900.0
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)


def chat_url(server: str) -> str:
    """The endpoint, whether the URL was given with or without /v1."""
    base = server.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    return (base if base.endswith("/v1") else base + "/v1") + "/chat/completions"


@dataclass(frozen=True)
class Reply:
    """The server's first choice, and how many tokens it says that it generated."""

    choice: dict[str, Any]
    tokens: int


def complete(url: str, body: dict[str, Any], stop: Stop) -> Reply:
    """The server's reply. Overload and lost connections are tried again, refusals are not."""
    wait = FIRST_WAIT
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _parse(url, _post(url, body))
        except urllib.error.HTTPError as error:
            reason, asked = f"{error.code} {_detail(error)}", error.headers.get("Retry-After", "")
            wait = max(wait, min(float(asked), LONGEST_WAIT)) if asked.isdigit() else wait
            if error.code not in RETRIED:
                raise DflashError(
                    f"The server {url} refuses a request ({reason}); check --model and the server's limits."
                ) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        if attempt == ATTEMPTS or stop:
            break
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT)
    raise DflashError(
        f"The server {url} does not answer after {attempt} attempts ({reason}); start it or give another --server."
    )


def _post(url: str, body: dict[str, Any]) -> bytes:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("DFLASH_SERVER_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        return response.read()


def _parse(url: str, reply: bytes) -> Reply:
    try:
        record = json.loads(reply)
        choice, usage = record["choices"][0], record.get("usage") or {}
        content = choice["message"].get("content")
        assert content is None or isinstance(content, str)
        return Reply(choice, int(usage.get("completion_tokens") or 0))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError):
        start = reply[:80].decode(errors="replace")
        raise DflashError(
            f"The server {url} answers with something else than a chat completion ({start!r}); give a "
            "--server that speaks OpenAI's protocol."
        ) from None


def _detail(error: urllib.error.HTTPError) -> str:
    """What the server says of its refusal, in one line."""
    with error:
        text = error.read(2000).decode(errors="replace")
    try:
        found = json.loads(text)
        inner = found.get("error", found)
        text = inner.get("message", text) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:300] or error.reason


def assistant_message(choice: dict[str, Any]) -> dict[str, Any]:
    """The reply as a message of our data: servers name reasoning in two ways."""
    reply = choice["message"]
    message: dict[str, Any] = {"role": "assistant", "content": reply.get("content") or ""}
    reasoning = reply.get("reasoning_content") or reply.get("reasoning")
    if reasoning:
        message["reasoning_content"] = reasoning
    if reply.get("tool_calls"):
        message["tool_calls"] = reply["tool_calls"]
    return message
