"""Errors of ours as the proxy is to answer them, with the word by which llm-d's clients tell them apart."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.extproc import refusals
from gateway.extproc.refusals import EXPIRED, NO_ENDPOINTS, SATURATED, SHUTTING_DOWN
from gateway.extproc.types import Refusal
from gateway.proxy.errors import ApiError
from gateway.queue import shed

_DROPPED: Final = {
    "no_worker": NO_ENDPOINTS,
    shed.QUEUE_FULL: SATURATED,
    shed.TENANT_FULL: SATURATED,
    shed.LATE: SATURATED,
    shed.SATURATED: SATURATED,
    shed.TIMEOUT: EXPIRED,
    shed.DRAINING: SHUTTING_DOWN,
    "decision_timeout": EXPIRED,
}
"""By the error's code."""


def refusal(error: ApiError, request_id: str) -> Refusal:
    made = refusals.refusal(error, _DROPPED.get(error.code or ""))
    return msgspec.structs.replace(made, headers={**made.headers, "x-request-id": request_id})
