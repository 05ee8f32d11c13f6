"""What handoff tests share: the four APIs' bodies and answers, and scripted prefill and decode servers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp

from gateway.tracing.types import Tracing
from scorer.types import Role
from tests.support.proxy_world import Call, Script, Stub, World

LONG = "the quick brown fox jumps over the lazy dog " * 10
"""Some 140 tokens of the fake engines."""
_ASKED = [{"role": "user", "content": LONG}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": LONG, "max_tokens": 6, "temperature": 0},
    "/v1/chat/completions": {"model": "tiny", "messages": _ASKED, "max_tokens": 6, "temperature": 0},
    "/v1/responses": {"model": "tiny", "input": LONG, "max_output_tokens": 6, "temperature": 0},
    "/v1/messages": {"model": "tiny", "messages": _ASKED, "max_tokens": 6, "temperature": 0},
}
ROLES = {"p1": Role.PREFILL, "p2": Role.PREFILL, "p3": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE}
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
N_TOKENS = 64
IDS = list(range(1, N_TOKENS + 1))
_numbers = itertools.count(1)


class Told(NamedTuple):
    """An answer read to its end."""

    path: str
    status: int
    body: str
    headers: Mapping[str, str]

    @property
    def outcome(self) -> dict[str, str]:
        """`x-warmroute-outcome`, taken apart."""
        parts = self.headers.get("x-warmroute-outcome", "").split(";")
        return dict(part.split("=", 1) for part in parts if part)

    @property
    def went(self) -> tuple[str, str]:
        """(choice, reason)"""
        return self.outcome["choice"], self.outcome["reason"]

    @property
    def is_stream(self) -> bool:
        return self.headers["Content-Type"].startswith("text/event-stream")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The data of a stream's events."""
        lines = [line[5:].strip() for line in self.body.splitlines() if line.startswith("data:")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def text(self) -> str:
        """What was generated."""
        assert self.status == 200, self.body
        if self.is_stream:
            assert not [event for event in self.events if event.get("error")], self.body
            return "".join(_piece(event) for event in self.events)
        answer = json.loads(self.body)
        if self.path == "/v1/responses":
            return "".join(part["text"] for item in answer["output"] for part in item["content"])
        if self.path == "/v1/messages":
            return "".join(part["text"] for part in answer["content"])
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def usage(self) -> dict[str, Any]:
        """The last usage told."""
        told = self.events if self.is_stream else [json.loads(self.body)]
        found = [usage for event in told if (usage := event.get("usage") or (event.get("response") or {}).get("usage"))]
        return dict(found[-1])

    @property
    def prompt_and_cached(self) -> tuple[int, int]:
        """The prompt's tokens, and those no engine had to compute, by each API's own fields."""
        usage = self.usage
        if self.path == "/v1/messages":
            cached = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached
        if self.path == "/v1/responses":
            return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def _piece(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    choices = event.get("choices") or [{}]
    return choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""


async def ask(
    http: aiohttp.ClientSession, url: str, path: str = "/v1/completions", body: Any = None, **headers: str
) -> Told:
    """`body` None: the path's own of `BODIES`."""
    data = body if isinstance(body, bytes) else json.dumps(BODIES[path] if body is None else body).encode()
    names = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with http.post(url + path, data=data, headers=names) as response:
        return Told(path, response.status, await response.text(), response.headers)


# ---- scripted servers ------------------------------------------------------------------------------------------------


def offered(n_tokens: int = N_TOKENS, **changes: Any) -> dict[str, Any]:
    """Transfer params as vLLM's NixlConnector gives them for a prompt, each time of another request."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, -(-n_tokens // 16) + 1))],
        "remote_engine_id": "engine-of-p1",
        "remote_request_id": f"cmpl-{next(_numbers)}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": n_tokens,
        "an_unknown_number": 12345678901234567890123,
        **changes,
    }
    return {name: value for name, value in params.items() if value is not ...}


def usage_of(path: str, n_tokens: int, cached: int | None) -> dict[str, Any]:
    details = {} if cached is None else {"cached_tokens": cached}
    if path == "/v1/messages":
        read = {} if cached is None else {"cache_read_input_tokens": cached}
        return {"input_tokens": n_tokens - (cached or 0), "output_tokens": 1, **read}
    if path == "/v1/responses":
        return {"input_tokens": n_tokens, "input_tokens_details": details, "output_tokens": 1}
    return {"prompt_tokens": n_tokens, "completion_tokens": 1, "prompt_tokens_details": details}


def path_of(call: Call) -> str:
    return call.line.split(" ")[1]


def offers(*, usage: dict[str, Any] | None = None, cached: int | None = 7, **changes: Any) -> Script:
    """A prefill server whose answers offer a prompt of N_TOKENS; `changes` of the params, `...` leaves one out."""

    async def script(call: Call) -> None:
        told = usage or usage_of(path_of(call), N_TOKENS, cached)
        params = offered(**changes)
        if "remote_request_id" not in changes:  # Engines put the request's id into their own.
            params["remote_request_id"] += f"-{call.header('X-Request-Id')}"
        await call.ok(json.dumps({"usage": told, "kv_transfer_params": params}).encode())

    return script


def answers(body: bytes | Mapping[str, Any] = b"{}", status: str = "200 OK", *headers: str) -> Script:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def script(call: Call) -> None:
        await call.ok(data, *headers, status=status)

    return script


def streams(*pieces: bytes) -> Script:
    async def script(call: Call) -> None:
        await call.begin_stream()
        for piece in pieces:
            await call.chunk(piece)
        await call.end_stream()

    return script


def resets(when: Callable[[Call], bool] = lambda call: True, otherwise: Script | None = None) -> Script:
    async def script(call: Call) -> None:
        if when(call):
            call.reset()
        elif otherwise is not None:
            await otherwise(call)

    return script


def bodies(stub: Stub) -> list[dict[str, Any]]:
    """What a scripted server was sent, releases aside."""
    got: list[dict[str, Any]] = [json.loads(call.body) for call in stub.calls]
    return [body for body in got if not is_release(body)]


def is_release(body: Mapping[str, Any]) -> bool:
    return bool(body.get("prompt") == [0] and "kv_transfer_params" in body)


def releases(stub: Stub) -> list[dict[str, Any]]:
    return [body for call in stub.calls if is_release(body := json.loads(call.body))]


def refusing_releases(script: Script) -> Script:
    """A decode server as real ones are: a release is refused, anything else runs `script`."""

    async def both(call: Call) -> None:
        if is_release(json.loads(call.body)):
            await call.ok(b'{"error":{}}', status="400 Bad Request")
        else:
            await script(call)

    return both


def world(pd: Any, *, tracing: Tracing | None = None, **stubs: Stub) -> World:
    """A data plane in front of scripted servers: p* prefill, d* decode."""
    return World({name: stub.url for name, stub in stubs.items()}, pd=pd, roles=ROLES, tracing=tracing)


def stages(it: World) -> dict[tuple[str, str], float]:
    """How legs ended."""
    families = [f for f in it.metrics.registry.collect() if f.name == "warmroute_pd_stage_outcomes"]
    samples = [s for f in families for s in f.samples if s.value and s.name.endswith("_total")]
    return {(s.labels["stage"], s.labels["outcome"]): s.value for s in samples}
