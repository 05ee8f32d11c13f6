"""One client for the four generation APIs, on plain sockets: what came, streamed or not, and leaving in the middle."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
APIS = tuple(PATHS)
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda"]
TIMEOUT_S = 120.0


@dataclass
class Answer:
    """Of one request. `error` is what an error body or event said, or ``cut`` for a body that broke off."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""
    text: str = ""
    error: Any = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def outcome(self) -> dict[str, str]:
        """The parts of ``x-warmroute-outcome``."""
        parts = (part.partition("=") for part in self.headers.get("x-warmroute-outcome", "").split(";"))
        return {name: value for name, _, value in parts}

    @property
    def choice(self) -> tuple[str, str]:
        """(local or remote, why)"""
        return self.outcome.get("choice", ""), self.outcome.get("reason", "")


def words(seed: int, n: int) -> str:
    """`n` words, about three tokens each; another seed shares no block with it but by chance."""
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def request_body(api: str, seed: int, /, *, n_words: int = 60, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A greedy request in the API's own words. `more` replaces or adds fields."""
    text = words(seed, n_words)
    common: dict[str, Any] = {"model": "tiny", "temperature": 0}
    if api == "responses":
        return {**common, "input": text, "max_output_tokens": max_tokens, "store": False, **more}
    prompt = {"prompt": text} if api == "completions" else {"messages": [{"role": "user", "content": text}]}
    return {**common, **prompt, "max_tokens": max_tokens, **more}


def ask(
    url: str,
    api: str,
    body: Mapping[str, Any] | bytes,
    *,
    stream: bool = False,
    headers: Sequence[tuple[str, str]] = (),
    path: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """The answer of the server at `url`. A header name may come twice. `path` other than the API's own; a body in
    bytes goes out as it is.
    """
    if stream and not isinstance(body, bytes):
        options = {"stream_options": {"include_usage": True}} if api in ("completions", "chat") else {}
        body = {**body, "stream": True, **options}
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    with contextlib.closing(connection):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.putrequest("POST", path or PATHS[api])
        for name, value in (("content-type", "application/json"), ("content-length", str(len(data))), *headers):
            connection.putheader(name, value)
        connection.endheaders(data)
        response = connection.getresponse()
        answer = Answer(response.status, {name.lower(): value for name, value in response.getheaders()})
        try:
            answer.raw = response.read()
        except (http.client.HTTPException, ConnectionError) as exc:
            answer.raw = exc.partial if isinstance(exc, http.client.IncompleteRead) else b""
            answer.error = "cut"
    if "event-stream" in answer.headers.get("content-type", ""):
        for event in _events(answer.raw):
            _read_event(api, event, answer)
    else:
        _read_whole(api, answer)
    return answer


def leave_after(
    url: str,
    api: str,
    body: Mapping[str, Any],
    patience_s: float,
    *,
    stream: bool = True,
    headers: Sequence[tuple[str, str]] = (),
    enough_bytes: float = math.inf,
) -> int:
    """Send, read for so long or until so much has come, and close the connection. Returns the bytes read."""
    parts = urllib.parse.urlsplit(url)
    data = json.dumps({**body, "stream": stream}).encode()
    head = f"POST {PATHS[api]} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers)
    n_read, deadline = 0, time.monotonic() + patience_s
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        while n_read < enough_bytes and (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            try:
                piece = connection.recv(65_536)
            except TimeoutError:
                break
            if not piece:
                break
            n_read += len(piece)
    return n_read


def _events(raw: bytes) -> Iterator[dict[str, Any]]:
    for line in raw.decode(errors="replace").splitlines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            with contextlib.suppress(ValueError):  # The last one, cut.
                yield json.loads(data)


def _read_event(api: str, event: dict[str, Any], answer: Answer) -> None:
    if event.get("error"):
        answer.error = event["error"]
        return
    if api in ("completions", "chat"):
        for choice in event.get("choices", ()):
            answer.text += (choice["text"] if api == "completions" else choice["delta"].get("content")) or ""
        _read_usage(event.get("usage"), answer)
    elif api == "responses":
        kind = event.get("type")
        if kind == "response.output_text.delta":
            answer.text += event["delta"]
        elif kind == "response.completed":
            _read_usage(event["response"].get("usage"), answer)
    elif event.get("type") == "content_block_delta":
        answer.text += event["delta"].get("text", "")
    elif event.get("type") == "message_delta":
        _read_usage(event.get("usage"), answer)


def _read_whole(api: str, answer: Answer) -> None:
    try:
        body = json.loads(answer.raw)
    except ValueError:
        answer.error = answer.error or answer.raw.decode(errors="replace")
        return
    if answer.status != 200 or body.get("error"):
        answer.error = body.get("error") or body
        return
    if api in ("completions", "chat"):
        answer.text = "".join(_text_of(choice) for choice in body.get("choices", ()))
    elif api == "responses":
        answer.text = "".join(part.get("text", "") for item in body["output"] for part in item.get("content") or ())
    else:
        answer.text = "".join(part.get("text", "") for part in body["content"])
    _read_usage(body.get("usage"), answer)


def _text_of(choice: dict[str, Any]) -> str:
    """Of a completion's or a chat's; either may come from a path that takes both."""
    return choice.get("text") or choice.get("message", {}).get("content") or ""


def _read_usage(usage: dict[str, Any] | None, answer: Answer) -> None:
    if not usage:
        return
    if "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:  # messages count them apart
        answer.cached_tokens = usage.get("cache_read_input_tokens") or 0
        made = usage.get("cache_creation_input_tokens") or 0
        answer.prompt_tokens = usage.get("input_tokens", 0) + answer.cached_tokens + made
        return
    answer.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    answer.cached_tokens = details.get("cached_tokens")
