"""Tracing as it is configured, if it is."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.config.schema import TracingConfig
from gateway.errors import UserError
from gateway.tracing.types import Tracing


def start(config: TracingConfig, face: str, registry: CollectorRegistry, *, scheme: str | None) -> Tracing | None:
    """`face`: its name; `scheme`: what clients speak to it, None where a proxy is between. None: it is off. Raises
    UserError.
    """
    if not config.enabled:
        return None
    try:
        from gateway.tracing.otel import OtelTracing, is_disabled
    except ImportError as exc:
        missing = "" if exc.name is None else f" ({exc.name} is missing)"
        raise UserError(f"tracing.enabled needs the extra otel: pip install 'warmroute[otel]'{missing}") from exc
    return None if is_disabled() else OtelTracing(config, face, registry, scheme=scheme)
