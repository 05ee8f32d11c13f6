"""Counters of prefill/decode handoffs. Labels come from closed sets and from the fleet."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.metrics import MetricWrapperBase

from scorer.types import LOCAL, PEER, REMOTE, PdReason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)


class HandoffMetrics:
    """`forget` a worker and its series go."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "warmroute_pd_decisions",
            "Where prompts were planned to be computed, and why.",
            ("choice", "reason"),
            registry=registry,
        )
        self._stages = Counter(
            "warmroute_pd_stage_outcomes",
            "How prefill and decode legs ended, by what had been planned.",
            ("choice", "stage", "outcome"),
            registry=registry,
        )
        self._wait = Histogram(
            "warmroute_pd_prefill_wait_seconds",
            "Prefill legs: behind other prompts that were sent there from here.",
            ("prefill",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._compute = Histogram(
            "warmroute_pd_prefill_compute_seconds",
            "Prefill legs: from the first place in that line to the answer.",
            ("prefill",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._handoffs = Counter(
            "warmroute_pd_handoffs", "Handoffs by pair and end.", ("prefill", "decode", "outcome"), registry=registry
        )
        self._tokens = Counter(
            "warmroute_pd_transfer_tokens",
            "Prompt tokens whose KV the decode worker was to fetch.",
            ("prefill", "decode"),
            registry=registry,
        )
        self._first_byte = Summary(
            "warmroute_pd_decode_first_byte_seconds",
            "Decode legs after a prefill: from sending to the first byte, the transfer included.",
            ("prefill", "decode"),
            registry=registry,
        )
        self._retries = Counter(
            "warmroute_pd_retries",
            "Legs tried again, elsewhere or another way.",
            ("stage", "reason"),
            registry=registry,
        )
        self._releases = Counter(
            "warmroute_pd_releases", "Attempts to give back KV nobody will fetch.", ("outcome",), registry=registry
        )
        self._decided: dict[tuple[str, PdReason], Counter] = {}
        self._ended: dict[tuple[str, str, str], Counter] = {}
        self._pairs: dict[tuple[str, str], set[str]] = {}
        self._prefills: set[str] = set()
        for outcome in ("ok", "failed", "dropped"):
            self._releases.labels(outcome)
        for reason in PdReason:
            self._decisions.labels(LOCAL, reason.value)
        for reason in (PdReason.POLICY, PdReason.THRESHOLD, PdReason.HINT):
            self._decisions.labels(REMOTE, reason.value)
        for reason in (PdReason.COST, PdReason.HINT):
            self._decisions.labels(PEER, reason.value)

    def decided(self, choice: str, reason: PdReason) -> None:
        """`choice` as in `Plan.choice`."""
        child = self._decided.get((choice, reason))
        if child is None:
            child = self._decided[choice, reason] = self._decisions.labels(choice, reason.value)
        child.inc()

    def stage(self, choice: str, *, stage: str, outcome: str) -> None:
        child = self._ended.get((choice, stage, outcome))
        if child is None:
            child = self._ended[choice, stage, outcome] = self._stages.labels(choice, stage, outcome)
        child.inc()

    def prefilled(self, prefill: str, wait_s: float, compute_s: float) -> None:
        self._prefills.add(prefill)
        self._wait.labels(prefill).observe(wait_s)
        self._compute.labels(prefill).observe(compute_s)

    def handoff(self, prefill: str, decode: str, outcome: str) -> None:
        self._pairs.setdefault((prefill, decode), set()).add(outcome)
        self._handoffs.labels(prefill, decode, outcome).inc()

    def fetched(self, prefill: str, decode: str, n_tokens: int, first_byte_s: float) -> None:
        """The decode worker's first byte is here."""
        self.handoff(prefill, decode, "ok")
        self._tokens.labels(prefill, decode).inc(n_tokens)
        self._first_byte.labels(prefill, decode).observe(first_byte_s)

    def retried(self, stage: str, reason: str) -> None:
        self._retries.labels(stage, reason).inc()

    def released(self, outcome: str) -> None:
        self._releases.labels(outcome).inc()

    def forget(self, worker: str) -> None:
        for pair in [pair for pair in self._pairs if worker in pair]:
            for outcome in self._pairs.pop(pair):
                _remove(self._handoffs, *pair, outcome)
            _remove(self._tokens, *pair)
            _remove(self._first_byte, *pair)
        if worker in self._prefills:
            self._prefills.discard(worker)
            _remove(self._wait, worker)
            _remove(self._compute, worker)


def _remove(family: MetricWrapperBase, *labels: str) -> None:
    try:
        family.remove(*labels)
    except KeyError:
        return  # It never had a value.
