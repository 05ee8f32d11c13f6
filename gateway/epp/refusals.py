"""Errors of ours as the proxy is to answer them, with the word by which llm-d's clients tell them apart."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.extproc import refusals
from gateway.extproc.refusals import EVICTED, EXPIRED, NO_ENDPOINTS, SATURATED, SHUTTING_DOWN
from gateway.extproc.types import Refusal
from gateway.proxy.access import Record
from gateway.proxy.errors import ApiError
from gateway.queue import shed
from gateway.tracing.types import TRACE_ID_HEADER

_DROPPED: Final = {
    "no_worker": NO_ENDPOINTS,
    shed.QUEUE_FULL: SATURATED,
    shed.TENANT_FULL: SATURATED,
    shed.LATE: SATURATED,
    shed.SATURATED: SATURATED,
    shed.TIMEOUT: EXPIRED,
    shed.DRAINING: SHUTTING_DOWN,
    shed.EVICTED: EVICTED,
    "decision_timeout": EXPIRED,
}
"""By the error's code."""


def refusal(error: ApiError, record: Record) -> Refusal:
    made = refusals.refusal(error, _DROPPED.get(error.code or ""))
    headers = {**made.headers, "x-request-id": record.request_id}
    if record.trace_id is not None:
        headers[TRACE_ID_HEADER] = record.trace_id
    return msgspec.structs.replace(made, headers=headers)
