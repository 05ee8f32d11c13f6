"""Counters and histograms of the data plane. Labels take values from closed sets and from the fleet, never from
clients.
"""

from __future__ import annotations

from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from scorer.types import CHOICES, TokenSource

# From an idle small model's first token to a queue nobody should wait in.
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)
_DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_WAIT_BUCKETS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
_INPUT_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
_OUTPUT_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_STATUSES = {int(status): str(int(status)) for status in HTTPStatus}

disable_created_metrics()  # type: ignore[no-untyped-call]  # A second series for each, which nobody asks for.

REJECTED = (
    "bad_request",
    "body_timeout",
    "body_too_large",
    "model_not_found",
    "no_worker",
    "over_concurrency",
    "queue_full",
    "tenant_queue_full",
    "queue_timeout",
    "predicted_late",
    "saturated",
    "draining",
    "evicted",
    "no_identity",
    "bad_key",
    "key_limit",
    "key_forbids",
    "unknown_path",
    "decision_timeout",
)
"""Reasons for which a request never reached a worker, or (`evicted`) was taken back from one."""
RETRIED = ("connect", "disconnected", "timeout", "status_502", "status_503")
CUT = ("client_left", "client_stalled", "upstream_broke", "timeout", "drained", "too_large", "aborted")
"""Why an answer was not relayed to its end."""
RELOADED = ("taken", "rejected")
NO_WORKER = "none"


class Metrics:
    """One registry. `add_worker` makes a worker's series appear, `remove_worker` makes them go."""

    def __init__(self, policy: str) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            "warmroute_requests", "Requests answered, by worker and status.", ("worker", "status"), registry=registry
        )
        self._rejected = Counter(
            "warmroute_requests_rejected",
            "Requests that never reached a worker, or (evicted) were taken back from one.",
            ("reason",),
            registry=registry,
        )
        self._retries = Counter(
            "warmroute_retries", "Second attempts on another worker or connection.", ("reason",), registry=registry
        )
        self._cut = Counter(
            "warmroute_answers_cut", "Answers not relayed to their end, by cause.", ("reason",), registry=registry
        )
        self._decisions = Counter(
            "warmroute_decisions",
            "Placements, by policy, by where the prefill runs and by where the token ids came from.",
            ("policy", "prefill", "tokens"),
            registry=registry,
        )
        self._ejections = Counter(
            "warmroute_ejections",
            "Times a worker was taken out for failing or stalling.",
            ("worker",),
            registry=registry,
        )
        self._reloads = Counter(
            "warmroute_config_reloads",
            "Times the configuration was read again, by whether it could be used.",
            ("outcome",),
            registry=registry,
        )
        self.realtime = Gauge(
            "warmroute_realtime_sessions", "WebSockets of /v1/realtime that are open.", registry=registry
        )
        self.overhead = Histogram(
            "warmroute_overhead_seconds",
            "From the request body's last byte to the decision, tokenising included.",
            buckets=_OVERHEAD_BUCKETS_S,
            registry=registry,
        )
        self.ttft = Histogram(
            "warmroute_time_to_first_token_seconds",
            "From the request body's last byte to the first byte of a streamed answer.",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.queue_wait = Histogram(
            "warmroute_queue_wait_seconds",
            "How long requests waited that had to, those included that gave up or were refused.",
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "warmroute_request_duration_seconds",
            "From the request's headers to the answer's last byte.",
            buckets=_DURATION_BUCKETS_S,
            registry=registry,
        )
        self._input_tokens, self._cached_tokens, self._output_tokens = (
            Histogram(f"warmroute_request_{what}_tokens", text, buckets=buckets, registry=registry)
            for what, text, buckets in (
                ("input", "Prompt tokens of requests, as their answers tell them.", _INPUT_TOKENS),
                ("cached", "Of these, found in the engine's cache; where answers tell it.", (0, *_INPUT_TOKENS)),
                ("output", "Tokens of answers, as they tell them themselves.", _OUTPUT_TOKENS),
            )
        )
        self._request_series: dict[tuple[str, int], Counter] = {}
        self._workers: dict[str, Counter] = {}
        self._decided: dict[tuple[str, TokenSource], Counter] = {
            (choice, source): self._decisions.labels(policy, choice, source.value)
            for choice in CHOICES
            for source in TokenSource
        }
        for outcome in RELOADED:
            self._reloads.labels(outcome)
        for family, reasons in ((self._rejected, REJECTED), (self._retries, RETRIED), (self._cut, CUT)):
            for reason in reasons:
                family.labels(reason)

    def add_worker(self, worker: str) -> None:
        if worker not in self._workers:
            self._workers[worker] = self._ejections.labels(worker)
            self._request_child(worker, 200)

    def remove_worker(self, worker: str) -> None:
        if self._workers.pop(worker, None) is None:
            return
        self._ejections.remove(worker)
        for key in [key for key in self._request_series if key[0] == worker]:
            del self._request_series[key]
            _remove(self._requests, worker, _status(key[1]))

    def request(self, worker: str | None, status: int, duration_s: float | None) -> None:
        """One request was answered; `worker` None: not by a worker; `duration_s` None: how long is nobody's matter."""
        if worker is None or worker not in self._workers:
            worker = NO_WORKER
        self._request_child(worker, status).inc()
        if duration_s is not None:
            self.duration.observe(duration_s)

    def tokens(self, input_tokens: int | None, cached_tokens: int | None, output_tokens: int | None) -> None:
        """What a whole good answer says; None: it does not."""
        for family, value in (
            (self._input_tokens, input_tokens),
            (self._cached_tokens, cached_tokens),
            (self._output_tokens, output_tokens),
        ):
            if value is not None:
                family.observe(value)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def cut(self, reason: str) -> None:
        self._cut.labels(reason).inc()

    def decided(self, choice: str, source: TokenSource) -> None:
        """`choice` as in `Plan.choice`."""
        self._decided[choice, source].inc()

    def reloaded(self, outcome: str) -> None:
        self._reloads.labels(outcome).inc()

    def ejected(self, worker: str) -> None:
        series = self._workers.get(worker)
        if series is not None:
            series.inc()

    def _request_child(self, worker: str, status: int) -> Counter:
        child = self._request_series.get((worker, status))
        if child is None:
            child = self._request_series[worker, status] = self._requests.labels(worker, _status(status))
        return child


def _status(status: int) -> str:
    return _STATUSES.get(status) or ("499" if status == 499 else f"{status // 100}xx")


def _remove(family: MetricWrapperBase, *labels: str) -> None:
    try:
        family.remove(*labels)
    except KeyError:
        return  # Two unknown statuses share one series.
