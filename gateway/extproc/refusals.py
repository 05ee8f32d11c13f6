"""Errors as a proxy is to answer them: in OpenAI's shape, and with llm-d's header for why a request was dropped."""

from __future__ import annotations

from gateway.extproc.types import Refusal
from gateway.extproc.wire import DROPPED
from gateway.proxy.errors import INTERNAL, UNAVAILABLE, ApiError, body_too_large

NO_ENDPOINTS = "rejected-no-endpoints"
SATURATED = "rejected-saturated"
EXPIRED = "rejected-ttl-expired"
SHUTTING_DOWN = "rejected-shutting-down"
EVICTED = "evicted-priority"


def refusal(error: ApiError, dropped: str | None = None) -> Refusal:
    """`dropped`: the reason as llm-d names it. The error's code is also the word for the proxy's log."""
    headers = dict(error.headers())
    if dropped is not None:
        headers[DROPPED] = dropped
    return Refusal(status=error.status, body=error.body, headers=headers, details=f"epp_{error.code or error.type_}")


def none_allowed() -> Refusal:
    error = ApiError(503, "The proxy allows no endpoint for this request.", type_=UNAVAILABLE, code="no_endpoints")
    return refusal(error, NO_ENDPOINTS)


def endless() -> Refusal:
    text = (
        "The proxy buffers requests (request_body_mode), and this one has no end: let WebSockets pass with NONE or "
        "FULL_DUPLEX_STREAMED."
    )
    return refusal(ApiError(501, text, type_=UNAVAILABLE, code="request_buffered"))


def undecided(deadline_s: float) -> Refusal:
    text = f"No endpoint was chosen within {deadline_s:g} s; retry later."
    return refusal(ApiError(503, text, type_=UNAVAILABLE, code="decision_timeout", retry_after_s=1), EXPIRED)


def too_large(limit_bytes: int) -> Refusal:
    return refusal(body_too_large(limit_bytes))


def internal() -> Refusal:
    return refusal(
        ApiError(500, "The endpoint picker failed; its log says why.", type_=INTERNAL, code="internal_error")
    )
