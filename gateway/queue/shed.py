"""A request refused by the queue: 429 (503 while going down), when to come back, and why."""

from __future__ import annotations

from multidict import CIMultiDict

from gateway.proxy.errors import UNAVAILABLE, ApiError

HEADER = "x-warmroute-shed"
"""In answers, the reason. In requests, `late` asks not to be served later than the objective."""
_RATE_LIMIT = "rate_limit_error"
_LONGEST_RETRY_S = 60.0
QUEUE_FULL = "queue_full"
TENANT_FULL = "tenant_queue_full"
TIMEOUT = "queue_timeout"
LATE = "predicted_late"
SATURATED = "saturated"
DRAINING = "draining"
EVICTED = "evicted"
REASONS = (QUEUE_FULL, TENANT_FULL, TIMEOUT, LATE, SATURATED, DRAINING, EVICTED)
_TEXTS = {
    QUEUE_FULL: "Too many requests wait for this model.",
    TENANT_FULL: "Too many of your requests wait for this model.",
    TIMEOUT: "No worker had room for this request in time.",
    LATE: "The first token is predicted to come later than the objective.",
    SATURATED: "No worker has room now, and requests of this objective do not wait.",
    DRAINING: "The gateway is going down; the request was not begun.",
    # As llm-d's picker says it.
    EVICTED: "request evicted by flow control: one of higher priority needs its place",
}


class Shed(ApiError):
    """`reason` is one of REASONS."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        going_down = reason == DRAINING
        super().__init__(
            503 if going_down else 429,
            _TEXTS[reason],
            type_=UNAVAILABLE if going_down else _RATE_LIMIT,
            code=reason,
            retry_after_s=min(_LONGEST_RETRY_S, retry_after_s),
        )
        self.reason = reason

    def headers(self) -> CIMultiDict[str]:
        headers = super().headers()
        headers[HEADER] = self.reason
        return headers
