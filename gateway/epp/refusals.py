"""Errors of ours as the proxy is to answer them, with the word by which llm-d's clients tell them apart."""

from __future__ import annotations

from gateway.epp.control import DROPPED
from gateway.extproc.types import Refusal
from gateway.proxy.errors import ApiError
from gateway.queue import shed

_DROPPED = {
    "no_worker": "rejected-no-endpoints",
    shed.QUEUE_FULL: "rejected-saturated",
    shed.TENANT_FULL: "rejected-saturated",
    shed.LATE: "rejected-saturated",
    shed.SATURATED: "rejected-saturated",
    shed.TIMEOUT: "rejected-ttl-expired",
    shed.DRAINING: "rejected-shutting-down",
}


def refusal(error: ApiError, request_id: str) -> Refusal:
    headers = {name.lower(): value for name, value in error.headers().items()}
    headers["x-request-id"] = request_id
    dropped = _DROPPED.get(error.code or "")
    if dropped is not None:
        headers[DROPPED] = dropped
    return Refusal(status=error.status, body=error.body, headers=headers, details=f"warmroute_{error.code or 'error'}")
