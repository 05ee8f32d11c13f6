"""W3C trace context out of headers. The SDK's own reader logs what clients sent where it is malformed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import MultiMapping
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from gateway.tracing.types import TRACEPARENT, TRACESTATE

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?").fullmatch
_MEMBER = re.compile(
    r"((?:[a-z][a-z0-9_\-*/]{0,255})|(?:[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}))"
    r"=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
).fullmatch
_LONGEST_PARENT = 512
_LONGEST_STATE = 8192
_MOST_MEMBERS = 32
_NOBODY = Context()


def parent_of(headers: Mapping[str, str]) -> Context:
    """The context that they name; an empty one where they name none, or none that can be read."""
    if TRACEPARENT not in headers:
        return _NOBODY
    rows = _rows(headers, TRACEPARENT)
    found = _TRACEPARENT(rows[0].strip(" \t")) if len(rows) == 1 and len(rows[0]) <= _LONGEST_PARENT else None
    if found is None:
        return _NOBODY
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or (version == "00" and more) or not trace_id or not span_id:
        return _NOBODY
    context = SpanContext(trace_id, span_id, True, TraceFlags(int(flags, 16)), _state(_rows(headers, TRACESTATE)))
    return set_span_in_context(NonRecordingSpan(context), _NOBODY)


def _state(rows: list[str]) -> TraceState | None:
    """Nothing of it where not all can be read, as the standard has it."""
    text = ",".join(rows)
    if not text or len(text) > _LONGEST_STATE:
        return None
    members = [_MEMBER(member) for part in text.split(",") if (member := part.strip(" \t"))]
    pairs = [(member[1], member[2]) for member in members if member is not None]
    if len(pairs) < len(members) or len(pairs) > _MOST_MEMBERS or len(dict(pairs)) < len(pairs):
        return None
    return TraceState(pairs)


def _rows(headers: Mapping[str, str], name: str) -> list[str]:
    if isinstance(headers, MultiMapping):
        return list(headers.getall(name, ()))
    value = headers.get(name)
    return [] if value is None else [value]
