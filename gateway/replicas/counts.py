"""What sharing costs and what goes wrong with it, for /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.replicas.link import FAILURES

LEFT_OUT = ("arrivals", "sessions", "responses", "journal")
IGNORED = ("malformed", "version", "workers")


class Counts:
    """Series with closed sets of labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.others = Gauge(
            "warmroute_replicas_known", "Other replicas that are heard of, through Redis.", registry=registry
        )
        self.up = Gauge(
            "warmroute_replicas_shared", "Whether load is shared with other replicas now.", registry=registry
        )
        self.missed = Counter(
            "warmroute_replicas_missed", "Gaps in what others tell: some of it was not received.", registry=registry
        )
        self._sent = Counter("warmroute_replicas_sent", "Messages written to Redis.", registry=registry)
        self._sent_bytes = Counter("warmroute_replicas_sent_bytes", "Their size.", registry=registry)
        self._received = Counter("warmroute_replicas_received", "Messages of others read.", registry=registry)
        self._received_bytes = Counter("warmroute_replicas_received_bytes", "Their size.", registry=registry)
        self._left_out = Counter(
            "warmroute_replicas_left_out", "Things others were not told of.", ("what",), registry=registry
        )
        self._ignored = Counter(
            "warmroute_replicas_ignored",
            "What others said and could not be used: malformed, of another version, about workers not known here.",
            ("reason",),
            registry=registry,
        )
        self._failures = Counter(
            "warmroute_replicas_failures", "Failed turns with Redis.", ("kind",), registry=registry
        )
        for what in LEFT_OUT:
            self._left_out.labels(what)
        for reason in IGNORED:
            self._ignored.labels(reason)
        for kind in FAILURES:
            self._failures.labels(kind)

    def sent(self, n_bytes: int) -> None:
        self._sent.inc()
        self._sent_bytes.inc(n_bytes)

    def received(self, n_bytes: int) -> None:
        self._received.inc()
        self._received_bytes.inc(n_bytes)

    def left_out(self, what: str, n: int = 1) -> None:
        if n:
            self._left_out.labels(what).inc(n)

    def ignored(self, reason: str, n: int = 1) -> None:
        if n:
            self._ignored.labels(reason).inc(n)

    def failed(self, kind: str) -> None:
        self._failures.labels(kind).inc()
