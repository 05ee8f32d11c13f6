"""What a picker counts beside what every face does."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.extproc.stream import Counts

OUTCOMES = ("as_planned", "otherwise", "of_another", "malformed", "missing")
"""What sidecars say of the plans they were sent; `missing`: nothing, of one that was to compute a prompt elsewhere."""
LOCAL_REPLIES = ("connect", "disconnected", "timeout", "overflow")
"""What the proxy says of endpoints it could not reach, and (`overflow`) of its own limits."""
OBJECTIVES = ("known", "unknown")


class EppMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.missing = 0
        self.elsewhere = Counter(
            "warmroute_epp_served_elsewhere", "Requests served by another endpoint than was picked.", registry=registry
        )
        self._outcomes = Counter(
            "warmroute_epp_sidecar_outcomes", "What sidecars say of plans.", ("outcome",), registry=registry
        )
        self._local_replies = Counter(
            "warmroute_epp_local_replies",
            "Answers the proxy made up for an endpoint.",
            ("what",),
            registry=registry,
        )
        self._objectives = Counter(
            "warmroute_epp_objectives", "Requests that name an objective.", ("objective",), registry=registry
        )
        self.unseen = Counter(
            "warmroute_epp_responses_unseen", "Picks whose response the proxy does not show.", registry=registry
        )
        self.unseen_booked = Gauge(
            "warmroute_epp_unseen_bookings", "Of those, the bookings not yet given back.", registry=registry
        )
        self.leads = Gauge(
            "warmroute_epp_leads",
            "Whether this replica is to be asked: it leads, or there is no leader election.",
            registry=registry,
        )
        for family, values in (
            (self._outcomes, OUTCOMES),
            (self._local_replies, LOCAL_REPLIES),
            (self._objectives, OBJECTIVES),
        ):
            for value in values:
                family.labels(value)

    def outcome(self, outcome: str) -> None:
        self._outcomes.labels(outcome).inc()
        self.missing += outcome == "missing"

    def local_reply(self, what: str) -> None:
        self._local_replies.labels(what).inc()

    def objective(self, *, known: bool) -> None:
        self._objectives.labels("known" if known else "unknown").inc()


class StreamCounts(Collector):
    """The protocol's own counts."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        counts = self._counts
        open_ = GaugeMetricFamily("warmroute_epp_streams_open", "Requests and responses the proxy shows now.")
        open_.add_metric([], counts.open)
        yield open_
        yield CounterMetricFamily("warmroute_epp_streams", "Streams the proxy began.", value=counts.begun)
        failed = CounterMetricFamily(
            "warmroute_epp_streams_failed",
            "Streams with a request decided without its body (blind), not decided in time (late), broken off because "
            "a message did not fit (broken), or for an error of ours (failed).",
            labels=["how"],
        )
        for how in ("blind", "late", "broken", "failed"):
            failed.add_metric([how], getattr(counts, how))
        yield failed
