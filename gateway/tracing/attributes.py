"""What spans say of a request: numbers, names of the fleet, words of ours. Nothing of what it asks, and of its headers
its id alone. Text of a client is cut, and made writable: one that is no UTF-8 the exporter leaves out, and logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.proxy.routes import ROUTES
from gateway.proxy.steps import CLIENT_LEFT

if TYPE_CHECKING:
    from gateway.proxy.access import Record
    from gateway.proxy.flight import Flight
    from gateway.proxy.usage import Usage

Value = str | bool | int | float
Attributes = dict[str, Value]

_LONGEST_TEXT = 256
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE"})
_OTHER = "_OTHER"
_REALTIME = "/v1/realtime"
_STORED = "/v1/responses/"
_OPERATIONS: Mapping[str, str] = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
}
_ENGINE = "vllm"


def route_of(path: str) -> str | None:
    """Of a path, if there are few such: None else."""
    if path in ROUTES or path == _REALTIME:
        return path
    return f"{_STORED}{{response_id}}" if path.startswith(_STORED) else None


def method_of(record: Record) -> str:
    return record.method if record.method in _METHODS else _OTHER


def of_request(record: Record, kind: str | None, scheme: str | None) -> Attributes:
    """What is known when it comes, by which samplers may decide."""
    found: Attributes = {
        "http.request.method": method_of(record),
        "url.path": text(record.path),
        "warmroute.request_id": text(record.request_id),
    }
    _put(found, "http.route", route_of(record.path))
    _put(found, "url.scheme", scheme)
    _put(found, "client.address", record.client)
    if kind is not None and (operation := _OPERATIONS.get(kind)) is not None:
        found["gen_ai.operation.name"] = operation
        found["gen_ai.provider.name"] = _ENGINE
    return found


def of_plan(flight: Flight) -> Attributes:
    plan, facts = flight.plan, flight.facts
    chosen = plan.chosen
    found: Attributes = {
        "warmroute.choice": plan.choice,
        "warmroute.reason": plan.pd_reason.value,
        "warmroute.policy": plan.policy,
        "warmroute.worker": chosen.decode[0],
        "warmroute.rank": chosen.decode[1],
        "warmroute.candidates": plan.n_candidates,
        "warmroute.prompt_tokens": facts.prompt_tokens,
        "warmroute.token_source": facts.token_source.value,
        "warmroute.predicted_cached_tokens": chosen.cached_tokens,
        "warmroute.predicted_ttft_s": chosen.price.ttft_s,
    }
    if chosen.prefill is not None:
        found["warmroute.prefill_worker"] = chosen.prefill[0]
    return found


def of_end(record: Record, flight: Flight | None, usage: Usage | None) -> Attributes:
    """What is known at its end."""
    found: Attributes = {} if flight is None else of_plan(flight)
    if record.status not in (0, CLIENT_LEFT):  # Else nobody was, or is known to have been, answered.
        found["http.response.status_code"] = record.status
    for key, value in (
        ("gen_ai.request.model", record.model),
        ("warmroute.worker", record.worker),
        ("warmroute.rank", record.rank),
        ("warmroute.choice", record.choice),
        ("warmroute.reason", record.pd_reason),
        ("warmroute.prefill_worker", record.prefill),
        ("warmroute.cached_tokens", record.cached_tokens),
        ("warmroute.cut", record.cut),
        ("warmroute.error", record.error),
        ("warmroute.retries", record.retries or None),
        ("warmroute.queued_s", _seconds(record.queued_ms)),
        ("warmroute.overhead_s", _seconds(record.overhead_ms)),
        ("warmroute.ttft_s", _seconds(record.ttft_ms)),
        ("warmroute.prefill_s", _seconds(record.prefill_ms)),
    ):
        _put(found, key, value)
    if flight is not None:
        found["gen_ai.request.stream"] = flight.facts.streaming
        _put(found, "gen_ai.request.max_tokens", flight.facts.max_output_tokens)
    if usage is not None:
        _put(found, "gen_ai.usage.input_tokens", usage.prompt_tokens)
        _put(found, "gen_ai.usage.output_tokens", usage.output_tokens)
        _put(found, "gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
    return found


def of_leg(method: str, path: str, url: str, worker: str, rank: int | None, tries: int) -> Attributes:
    found: Attributes = {
        "http.request.method": method,
        "url.full": url.rstrip("/") + text(path),
        "warmroute.worker": worker,
        **_server(url),
    }
    _put(found, "warmroute.rank", rank)
    if tries:
        found["http.request.resend_count"] = tries
    return found


def text(value: str) -> str:
    value = value[:_LONGEST_TEXT]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


@lru_cache(maxsize=1024)
def _server(url: str) -> Attributes:
    parts = urlsplit(url)
    found: Attributes = {}
    _put(found, "server.address", parts.hostname)
    _put(found, "server.port", parts.port or {"http": 80, "https": 443}.get(parts.scheme))
    return found


def _put(found: Attributes, key: str, value: Value | None) -> None:
    if value is not None:
        found[key] = text(value) if isinstance(value, str) else value


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000
