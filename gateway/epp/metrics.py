"""What a picker counts beside what every face does."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

OUTCOMES = ("as_planned", "otherwise", "of_another", "malformed")
"""What sidecars say of the plans they were sent."""
LOCAL_REPLIES = ("connect", "disconnected", "timeout", "overflow")
"""What the proxy says of endpoints it could not reach, and (`overflow`) of its own limits."""
OBJECTIVES = ("known", "unknown")


class EppMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
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
        for family, values in (
            (self._outcomes, OUTCOMES),
            (self._local_replies, LOCAL_REPLIES),
            (self._objectives, OBJECTIVES),
        ):
            for value in values:
                family.labels(value)

    def outcome(self, outcome: str) -> None:
        self._outcomes.labels(outcome).inc()

    def local_reply(self, what: str) -> None:
        self._local_replies.labels(what).inc()

    def objective(self, *, known: bool) -> None:
        self._objectives.labels("known" if known else "unknown").inc()
