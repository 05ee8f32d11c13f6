"""Answers that the proxy makes up about an endpoint it could not reach; they come by as if they were the endpoint's."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.engine.health import End

_STATUSES = frozenset({502, 503, 504})
_FROM_UPSTREAM = "x-envoy-upstream-service-time"
"""Envoy adds it to answers that an endpoint gave."""
_NO_CONNECTION = (
    b"connection failure",
    b"connection timeout",
    b"connection refused",
    b"no healthy upstream",
    b"connect error:",
)
LONGEST_TEXT_BYTES = 1024


def is_local_reply(status: int, headers: Mapping[str, str]) -> bool:
    """Engines and sidecars answer errors in JSON."""
    if status not in _STATUSES or _FROM_UPSTREAM in headers:
        return False
    return not headers.get("content-type", "").startswith("application/json")


def what_failed(status: int, text: bytes) -> tuple[End | None, str]:
    """How, and the word for it in metrics. None: the proxy's own limits, for which no endpoint is to blame."""
    text = text.lower()
    if b"overflow" in text:
        return None, "overflow"
    if status == 504:
        return End.TIMEOUT, "timeout"
    if any(sign in text for sign in _NO_CONNECTION):
        return End.CONNECT, "connect"
    return End.RESET, "disconnected"
