"""A real Envoy, as the benchmark starts it."""

from bench.epp.envoy import (
    CONFIGS,
    Change,
    Envoy,
    cluster,
    connection_manager,
    envoy_binary,
    ext_proc,
    fit,
    http_filters,
    shipped,
)

__all__ = [
    "CONFIGS",
    "Change",
    "Envoy",
    "cluster",
    "connection_manager",
    "envoy_binary",
    "ext_proc",
    "fit",
    "http_filters",
    "shipped",
]
