"""A span for each request and for each of its stages, and W3C trace context to the engines (docs/observability.md).

Nothing here imports OpenTelemetry but what `start` loads, and only with `tracing.enabled`.
"""
