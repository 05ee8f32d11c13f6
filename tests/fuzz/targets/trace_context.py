"""W3C's `traceparent` and `tracestate`, as clients and proxies send them: a parent, or none."""

from __future__ import annotations

from multidict import CIMultiDict
from opentelemetry import trace

from gateway.tracing.context import parent_of

SEEDS = [
    b"\x00" + b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    b"\x00" + b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n\x01congo=t61rcWkgMzE,rojo=00f067aa0ba902b7",
    b"\x00" + b"cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-comes-later\n\x01a=b\n\x01c@d=e",
    b"\x00" + b"00-00000000000000000000000000000000-0000000000000000-00",
]
WORDS = [b"-", b"\n\x00", b"\n\x01", b"00", b"ff", b"=", b",", b" ", b"\t", b"a=b,", b"\xc3\xa9", b"\xff", b"x" * 300]


def fuzz_one(data: bytes) -> None:
    headers: CIMultiDict[str] = CIMultiDict()
    for row in data.split(b"\n")[:16]:
        name = "traceparent" if row[:1] < b"\x01" else "tracestate"
        headers.add(name, row[1:].decode("utf-8", "surrogateescape"))
    span = trace.get_current_span(parent_of(headers)).get_span_context()
    if span.is_valid:
        assert 0 < span.trace_id < 1 << 128
        assert 0 < span.span_id < 1 << 64
        assert f"{span.trace_id:032x}" in headers["traceparent"].lower()
    assert len(span.trace_state) <= 32
    for key, value in span.trace_state.items():
        f"{key}={value}".encode("ascii")
