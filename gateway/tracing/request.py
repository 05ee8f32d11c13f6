"""The spans of one request: itself (SERVER), its stages, and a leg (CLIENT) for each worker that is asked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multidict import CIMultiDict
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context

from gateway.tracing import attributes
from gateway.tracing.types import TRACEPARENT, TRACESTATE, LegKind, Stage

if TYPE_CHECKING:
    from gateway.proxy.access import Record
    from gateway.proxy.flight import Flight
    from gateway.proxy.usage import Usage

_QUEUE = "queue"
_ERROR_TYPE = "error.type"
_FIRST_TOKEN = "first_token"  # noqa: S105
_NO_ERROR = frozenset({"client_left", "client_stalled", "aborted"})
"""Reasons for cutting an answer that are nothing wrong here: who waited for it has gone."""


class Spans:
    """A `gateway.tracing.types.RequestTrace`."""

    __slots__ = ("_context", "_legs", "_over", "_recording", "_root", "_stage", "_tracer", "record")

    def __init__(
        self, tracer: Tracer, parent: Context, record: Record, kind: str | None, scheme: str | None = None
    ) -> None:
        """`parent` holds the client's context, if there is one; else a trace begins."""
        self._tracer = tracer
        self.record = record
        method = attributes.method_of(record)
        route = attributes.route_of(record.path)
        name = method if method != "_OTHER" else "HTTP"
        self._root = tracer.start_span(
            name if route is None else f"{name} {route}",
            parent,
            SpanKind.SERVER,
            attributes.of_request(record, kind, scheme),
        )
        self._context = set_span_in_context(self._root, Context())
        self._recording = self._root.is_recording()
        self._stage: tuple[Stage, int] | None = None
        self._legs = 0
        self._over = False
        record.trace_id = format_trace_id(self._root.get_span_context().trace_id)

    def stage(self, name: Stage) -> None:
        if self._recording:
            now_ns = time.time_ns()
            self._end_stage(now_ns)
            self._stage = name, now_ns

    def decided(self, flight: Flight | None) -> None:
        if self._recording:
            self._end_stage(time.time_ns(), known=None if flight is None else attributes.of_plan(flight))

    def leg(self, kind: LegKind, worker: str, rank: int | None, url: str, headers: CIMultiDict[str]) -> Leg:
        if not self._recording:
            return Leg(self._root, headers)
        self._end_stage(time.time_ns())
        tries = 0
        if kind != "prefill":
            tries, self._legs = self._legs, self._legs + 1
        record = self.record
        method, path = attributes.method_of(record), record.path
        span = self._tracer.start_span(
            kind,
            self._context,
            SpanKind.CLIENT,
            attributes.of_leg(method, path, url, worker, rank, tries),
        )
        return Leg(span, headers)

    def event(self, name: str, reason: str) -> None:
        self._root.add_event(name, {"warmroute.reason": reason})

    def first_token(self) -> None:
        self._root.add_event(_FIRST_TOKEN)

    def context(self) -> dict[str, str]:
        return _headers(self._root.get_span_context())

    def finish(self, flight: Flight | None, usage: Usage | None) -> None:
        if self._over:
            return
        self._over = True
        if self._recording:
            record, root = self.record, self._root
            self._end_stage(time.time_ns(), record.cut or record.error)
            root.set_attributes(attributes.of_end(record, flight, usage))
            if record.cut is not None:
                root.add_event("cut", {"warmroute.reason": record.cut})
            failed = record.cut if record.cut not in _NO_ERROR else None
            if failed is None and record.status >= 500:
                failed = record.error or str(record.status)
            if failed is not None:
                root.set_attribute(_ERROR_TYPE, failed)
                root.set_status(StatusCode.ERROR)
        self._root.end()

    def _end_stage(self, now_ns: int, failed: str | None = None, *, known: attributes.Attributes | None = None) -> None:
        """Its span is made when it is over; one of the queue only where there was a wait."""
        stage, self._stage = self._stage, None
        if stage is None or (stage[0] == _QUEUE and self.record.queued_ms is None and failed is None):
            return
        span = self._tracer.start_span(stage[0], self._context, attributes=known, start_time=stage[1])
        if failed is not None:
            span.set_attribute(_ERROR_TYPE, failed)
            span.set_status(StatusCode.ERROR)
        span.end(now_ns)


class Leg:
    """A `gateway.tracing.types.Leg`."""

    __slots__ = ("_over", "_span", "headers")

    def __init__(self, span: Span, headers: CIMultiDict[str]) -> None:
        self._span = span
        self._over = False
        self.headers = headers.copy()
        self.headers.popall(TRACESTATE, None)
        self.headers.update(_headers(span.get_span_context()))

    def answered(self, status: int) -> None:
        if self._over:
            return
        self._span.set_attribute("http.response.status_code", status)
        if status >= 400:
            self._span.set_attribute(_ERROR_TYPE, str(status))
            self._span.set_status(StatusCode.ERROR)

    def first_token(self) -> None:
        if not self._over:
            self._span.add_event(_FIRST_TOKEN)

    def failed(self, reason: str) -> None:
        if not self._over:
            self._span.set_attribute(_ERROR_TYPE, reason)
            self._span.set_status(StatusCode.ERROR)
            self.end()

    def end(self) -> None:
        if not self._over:
            self._over = True
            self._span.end()


def _headers(context: SpanContext) -> dict[str, str]:
    found = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        found[TRACESTATE] = context.trace_state.to_header()
    return found
