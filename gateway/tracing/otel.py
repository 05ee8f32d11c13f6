"""The only way into the SDK: the provider, its resource and sampler, and the exporter, as OTEL_* variables say."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from prometheus_client import CollectorRegistry

from gateway.config.schema import TracingConfig
from gateway.proxy.access import Record
from gateway.tracing.batches import Batches, Sizes
from gateway.tracing.context import parent_of
from gateway.tracing.request import Spans
from gateway.tracing.types import RequestTrace

_LAST_SPANS_S = 3.0
_NAME = "warmroute"
_UNNAMED = "unknown_service"


def is_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def new_exporter() -> SpanExporter:
    """As OTEL_EXPORTER_OTLP_* say."""
    return OTLPSpanExporter()


class OtelTracing:
    """A `gateway.tracing.types.Tracing`. Create it inside a running event loop."""

    def __init__(
        self, config: TracingConfig, face: str, registry: CollectorRegistry, *, scheme: str | None = None
    ) -> None:
        self._scheme = scheme
        self._batches = Batches(new_exporter(), registry, Sizes.of(os.environ))
        ratio = config.sample_ratio
        self._provider = TracerProvider(
            sampler=None if ratio is None else ParentBasedTraceIdRatio(ratio),
            resource=_resource(face),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._batches)
        self._tracer = self._provider.get_tracer(_NAME, _version())

    @property
    def problem(self) -> str | None:
        return self._batches.problem

    def request(self, record: Record, headers: Mapping[str, str], kind: str | None) -> RequestTrace:
        return Spans(self._tracer, parent_of(headers), record, kind, self._scheme)

    async def close(self) -> None:
        await self._batches.close(_LAST_SPANS_S)


def _resource(face: str) -> Resource:
    """With what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say, which come first."""
    named = Resource.create()
    ours: dict[str, Any] = {"service.version": _version(), "service.instance.id": secrets.token_hex(8)}
    kept = {key: value for key, value in ours.items() if key not in named.attributes}
    if str(named.attributes.get("service.name", _UNNAMED)).startswith(_UNNAMED):
        kept["service.name"] = f"{_NAME}-{face}"
    return named.merge(Resource(kept))


def _version() -> str:
    try:
        return version(_NAME)
    except PackageNotFoundError:  # Run from a source tree that is not installed.
        return ""
