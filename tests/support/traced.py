"""Spans that a test looks at: kept in memory, or received by a collector over OTLP."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from gateway.config.schema import TracingConfig
from gateway.tracing import otel
from gateway.tracing.otel import OtelTracing

CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
SAMPLED = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
NOT_SAMPLED = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"


class Seen(NamedTuple):
    """One span as it was exported. Ids are in hexadecimal; `parent` is empty where there is none."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    service: str
    instance: str = ""
    """Of the process that made it; empty where it was not exported."""

    def gave(self, traceparent: str | None) -> bool:
        """Whether this header makes its bearer a child of the span."""
        return traceparent is not None and traceparent.startswith(f"00-{self.trace}-{self.id}-0")


class Traced:
    """Tracing whose spans are kept here."""

    def __init__(self, tracing: OtelTracing, exporter: InMemorySpanExporter, registry: CollectorRegistry) -> None:
        self.tracing = tracing
        self.registry = registry
        self._exporter = exporter

    async def spans(self) -> list[Seen]:
        """All of them, with which tracing ends."""
        await self.tracing.close()
        return [
            Seen(
                name=span.name,
                kind=span.kind.name,
                trace=f"{span.context.trace_id:032x}",
                id=f"{span.context.span_id:016x}",
                parent="" if span.parent is None else f"{span.parent.span_id:016x}",
                began_ns=span.start_time or 0,
                ended_ns=span.end_time or 0,
                failed=not span.status.is_ok and not span.status.is_unset,
                attributes=dict(span.attributes or {}),
                events=[(event.name, dict(event.attributes or {})) for event in span.events],
                service=str(span.resource.attributes["service.name"]),
            )
            for span in self._exporter.get_finished_spans()
            if span.context is not None
        ]


def traced(monkeypatch: pytest.MonkeyPatch, *, ratio: float | None = None, face: str = "gateway") -> Traced:
    """Inside a running event loop."""
    exporter, registry = InMemorySpanExporter(), CollectorRegistry()
    monkeypatch.setattr(otel, "new_exporter", lambda: exporter)
    config = TracingConfig(enabled=True, sample_ratio=ratio)
    return Traced(OtelTracing(config, face, registry, scheme="http"), exporter, registry)


def tree(spans: Iterable[Seen]) -> list[Any]:
    """The root's name and its children's, in the order in which they began; one that failed is marked by a "!"."""
    rows = sorted(spans, key=lambda span: span.began_ns)
    ids = {span.id for span in rows}
    (root,) = (span for span in rows if span.parent not in ids)
    children = [span.name + "!" * span.failed for span in rows if span.parent == root.id]
    assert len(children) == len(rows) - 1, "a span below a child"
    return [root.name + "!" * root.failed, *children]


def named(spans: Iterable[Seen], name: str) -> Seen:
    (found,) = (span for span in spans if span.name == name)
    return found


class Collector:
    """An OTLP/HTTP receiver."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.paths: set[str] = set()
        self.status = 200
        self.port = 0

    async def until(self, enough: Callable[[list[Seen]], object], within_s: float = 60.0) -> list[Seen]:
        async with asyncio.timeout(within_s):
            while not enough(self.spans):  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.01)
        return self.spans

    async def take(self, request: web.Request) -> web.Response:
        self.paths.add(request.path)
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        if self.status != 200:
            return web.Response(status=self.status)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_seen(span, about) for span in scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


@asynccontextmanager
async def collector(port: int = 0) -> AsyncIterator[Collector]:
    it = Collector()
    app = web.Application()
    app.router.add_post("/{path:.*}", it.take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        it.port = runner.addresses[0][1]
        yield it
    finally:
        await runner.cleanup()


_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")


def _seen(span: Any, about: dict[str, Any]) -> Seen:
    return Seen(
        name=span.name,
        kind=_KINDS[span.kind],
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        failed=span.status.code == 2,
        attributes=_values(span.attributes),
        events=[(event.name, _values(event.attributes)) for event in span.events],
        service=about.get("service.name", ""),
        instance=about.get("service.instance.id", ""),
    )


def _values(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
