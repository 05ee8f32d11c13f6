"""Trace context and ids as hostile clients send them: read as OpenTelemetry reads them, and never in the way."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.proxy.access import Record
from gateway.tracing.context import parent_of
from gateway.tracing.request import Spans

theirs = TraceContextTextMapPropagator()
hexes = "0123456789abcdef"
good = st.builds(
    "-".join,
    st.tuples(
        st.sampled_from(["00", "01", "fe", "ff"]),
        st.text(hexes, min_size=32, max_size=32) | st.just("0" * 32),
        st.text(hexes, min_size=16, max_size=16) | st.just("0" * 16),
        st.sampled_from(["00", "01", "02", "03", "ff"]),
    ),
)
letters = st.characters(max_codepoint=0x2FF, blacklist_characters="\r\n\0")
wild = st.lists(letters | st.just("\udce9"), max_size=40).map("".join)
parents = good | wild | good.map(lambda text: text + "-x") | good.map(str.upper)
members = st.builds(
    "{}={}".format, st.sampled_from(["a", "b", "a1", "1@x", "t*/-", "A"]) | wild, st.text("ab1 :;", max_size=8) | wild
)
states = st.lists(members, max_size=40).map(",".join) | wild


@given(parents, st.none() | states)
def test_as_opentelemetry_reads_it(parent: str, state: str | None) -> None:
    headers = CIMultiDict({"traceparent": parent})
    if state is not None:
        headers["tracestate"] = state
    logging.disable()
    try:
        expected = get_current_span(theirs.extract(headers)).get_span_context()
    finally:
        logging.disable(logging.NOTSET)
    found = get_current_span(parent_of(headers)).get_span_context()
    assert (found.trace_id, found.span_id, found.trace_flags) == (
        expected.trace_id, expected.span_id, expected.trace_flags,
    )  # fmt: skip
    if found.trace_state:  # What is not read is left out as a whole; what is, is read alike.
        assert found.trace_state.to_header() == expected.trace_state.to_header()


class Encoding(SpanExporter):
    def __init__(self) -> None:
        self.sent = b""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sent += encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


exporter = Encoding()
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracer = provider.get_tracer("t")


@given(parents, states, wild, wild, wild, wild)
def test_whatever_comes_can_be_sent(
    parent: str, state: str, request_id: str, method: str, path: str, model: str
) -> None:
    headers = CIMultiDict({"traceparent": parent, "tracestate": state})
    record = Record(request_id=request_id, method=method, path="/" + path, status=500, model=model, error="x")
    exporter.sent = b""
    spans = Spans(tracer, parent_of(headers), record, "chat", "http")
    spans.stage("decide")
    leg = spans.leg("decode", "w", 0, "http://w:8000", headers)
    leg.answered(500)
    leg.end()
    spans.finish(None, None)
    if int(leg.headers["traceparent"][-2:], 16) & 1:
        sent = ExportTraceServiceRequest.FromString(exporter.sent).resource_spans
        everything = [span for each in sent for scope in each.scope_spans for span in scope.spans]
        said = {pair.key for span in everything for pair in span.attributes}
        assert {"warmroute.request_id", "url.path", "gen_ai.request.model", "http.request.method", "url.full"} <= said
    assert all(" " <= char < "\x7f" for name in ("traceparent", "tracestate") for char in leg.headers.get(name, ""))


@pytest.mark.parametrize("late", ["answered", "failed", "first_token", "end"])
def test_what_is_said_after_the_end_is_ignored(late: str, caplog: pytest.LogCaptureFixture) -> None:
    spans = Spans(tracer, parent_of({}), Record(request_id="r", method="GET", path="/", status=200), None)
    leg = spans.leg("decode", "w", 0, "http://w:8000", CIMultiDict())
    leg.end()
    getattr(leg, late)(*{"answered": (200,), "failed": ("x",)}.get(late, ()))
    spans.finish(None, None)
    spans.finish(None, None)
    assert caplog.records == []
