"""Gauges read off the parts when `/metrics` is asked for. A value nobody knows is NaN, never 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core import Core
from gateway.debug.health import DEGRADATIONS, degradations, is_ready
from gateway.debug.learned import factors_in_force
from gateway.debug.queue import queue_gauges
from gateway.engine.feed import FeedStatus
from gateway.proxy.access import AccessLog
from scorer.fleet import Worker
from scorer.types import Role


class FleetGauges(Collector):
    """`refresh` on the event loop, then `collect` anywhere."""

    def __init__(self, core: Core, access: AccessLog, in_flight: Callable[[], int]) -> None:
        self._core = core
        self._in_flight = in_flight
        self._access = access
        self._families: list[Metric] = []

    def refresh(self) -> None:
        self._families = list(self._read())

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._families

    def _read(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("warmroute_build_info", "The version that runs.", labels=["version"])
        build.add_metric([version("warmroute")], 1)
        yield build
        yield _gauge("requests_in_flight", "Requests being served.", self._in_flight())
        found = {degradation.what for degradation in degradations(self._core)}
        degraded = GaugeMetricFamily("warmroute_degraded", "What is not as it should be, by kind.", labels=["what"])
        for what in DEGRADATIONS:
            degraded.add_metric([what], float(what in found))
        yield degraded
        yield from self._fleet()
        yield from queue_gauges(self._core.queue, self._core.fleet)
        yield from self._hits()
        yield from self._handoffs()
        yield from self._events()
        yield from self._index()
        yield from self._tokens()
        yield from self._sessions()
        yield from self._stored()
        dropped = CounterMetricFamily("warmroute_access_log_lines_dropped", "Access log lines there was no room for.")
        dropped.add_metric([], self._access.dropped)
        yield dropped

    def _fleet(self) -> Iterator[Metric]:
        workers = list(self._core.fleet.workers.values())
        roles = GaugeMetricFamily("warmroute_workers", "Workers known, by role.", labels=["role"])
        for role in Role:
            roles.add_metric([role.value], sum(worker.role is role for worker in workers))
        yield roles
        for name, (text, read) in _BY_WORKER.items():
            family = GaugeMetricFamily(f"warmroute_{name}", text, labels=["worker"])
            for worker in workers:
                family.add_metric([worker.name], read(worker))
            yield family
        factors = GaugeMetricFamily(
            "warmroute_learned_factor",
            "What its prefills (floor, work) and decode steps take, relative to the constants.",
            labels=["part", "worker"],
        )
        for worker in workers:
            for part, factor in factors_in_force(worker).items():
                factors.add_metric([part, worker.name], factor)
        yield factors
        available = GaugeMetricFamily(
            "warmroute_worker_available", "Whether requests may go there now.", labels=["worker"]
        )
        age = GaugeMetricFamily(
            "warmroute_engine_stats_age_seconds", "Since the engine's metrics were last read.", labels=["worker"]
        )
        now_s = time.monotonic()
        for worker in workers:
            available.add_metric([worker.name], float(is_ready(self._core, worker)))
            stats = worker.stats
            age.add_metric([worker.name], math.nan if stats is None else max(0.0, now_s - stats.scraped_at_s))
        yield available
        yield age

    def _sessions(self) -> Iterator[Metric]:
        sessions = self._core.planner.sessions
        yield _gauge("sessions", "Sessions whose worker is remembered (scorer.session_affinity).", len(sessions))
        decided = CounterMetricFamily(
            "warmroute_session_decisions",
            "Placements of requests of a session, by what became of it.",
            labels=["outcome"],
        )
        for outcome, n in sessions.counts.items():
            decided.add_metric([outcome.value], n)
        yield decided

    def _stored(self) -> Iterator[Metric]:
        yield _gauge("stored_responses", "Ids of /v1/responses remembered.", len(self._core.stored))
        lookups = CounterMetricFamily(
            "warmroute_stored_response_lookups", "Ids of stored responses looked up, by outcome.", labels=["outcome"]
        )
        for outcome, count in self._core.holders.lookups.items():
            lookups.add_metric([outcome], count)
        yield lookups
        references = len(self._core.planner.holdings.media)
        yield _gauge("media_references", "Pairs of prompt and worker known by images, audio or video.", references)

    def _hits(self) -> Iterator[Metric]:
        for name, (text, field) in _HITS.items():
            family = CounterMetricFamily(f"warmroute_{name}", text, labels=["worker"])
            for worker, stats in self._core.hits.workers.items():
                family.add_metric([worker], getattr(stats, field))
            yield family

    def _handoffs(self) -> Iterator[Metric]:
        now_s = time.monotonic()
        stranded = GaugeMetricFamily(
            "warmroute_pd_stranded_tokens",
            "Prompt tokens whose KV is held for a decode worker that will not come.",
            labels=["prefill"],
        )
        held = self._core.handoffs.releases.stranded.tokens(now_s)
        for worker in self._core.fleet.workers.values():
            if worker.role is Role.PREFILL or worker.name in held:
                stranded.add_metric([worker.name], held.get(worker.name, 0))
        yield stranded
        broken = GaugeMetricFamily(
            "warmroute_pd_pair_broken", "Whether the two hand nothing over now.", labels=["prefill", "decode"]
        )
        for names, pair in self._core.planner.pairs.pairs.items():
            broken.add_metric(list(names), float(pair.state(now_s) != "closed"))
        yield broken
        for name, (text, role, field) in BY_NIXL.items():
            family = CounterMetricFamily(f"warmroute_{name}", text, labels=[role.value])
            for worker in self._core.fleet.workers.values():
                value = None if worker.stats is None else getattr(worker.stats, field)
                if value is not None and (worker.role.decodes or worker.role is role):
                    family.add_metric([worker.name], value)
            yield family

    def _events(self) -> Iterator[Metric]:
        feeds: dict[str, list[FeedStatus]] = {name: [] for name in self._core.fleet.workers}
        for (name, _), feed in self._core.ingest.status().items():
            if name in feeds:
                feeds[name].append(feed)
        counters = {
            "event_batches": ("Batches of KV events applied.", "batches"),
            "events": ("KV events applied.", "events"),
            "event_gaps": ("Gaps seen in the sequence of batches.", "gaps"),
            "event_missing_batches": ("Batches never received.", "missing_batches"),
        }
        for name, (text, field) in counters.items():
            counter = CounterMetricFamily(f"warmroute_{name}", text, labels=["worker"])
            for worker, ranks in feeds.items():
                counter.add_metric([worker], sum(getattr(feed, field) for feed in ranks))
            yield counter
        known = GaugeMetricFamily(
            "warmroute_events_arriving", "Whether the worker's own events say what it holds.", labels=["worker"]
        )
        partial = GaugeMetricFamily(
            "warmroute_events_partial", "Whether batches are missing from what is known of it.", labels=["worker"]
        )
        for worker, ranks in feeds.items():
            known.add_metric([worker], float(self._core.fleet.workers[worker].publishes_events))
            partial.add_metric([worker], float(any(feed.partial for feed in ranks)))
        yield known
        yield partial
        yield from self._ranks(feeds)
        failures = CounterMetricFamily("warmroute_event_ingest", "Counts of the event intake.", labels=["what"])
        for what, n in sorted(self._core.ingest.counters().items()):
            failures.add_metric([what], n)
        yield failures
        replays = GaugeMetricFamily("warmroute_event_replays", "Replays of missed events.", labels=["state"])
        for state, n in self._core.ingest.replay_levels().items():
            replays.add_metric([state], n)
        yield replays

    def _ranks(self, feeds: dict[str, list[FeedStatus]]) -> Iterator[Metric]:
        """One rank that says nothing hides behind a worker whose others do."""
        labels = ["worker", "rank"]
        arriving = GaugeMetricFamily(
            "warmroute_events_rank_arriving", "Whether the rank's own events say what it holds.", labels=labels
        )
        age = GaugeMetricFamily(
            "warmroute_events_rank_age_seconds", "Since its last batch; NaN if there was none.", labels=labels
        )
        for worker, ranks in feeds.items():
            for feed in ranks:
                names = [worker, str(feed.rank)]
                arriving.add_metric(names, float(self._core.publishing.speaks(feed)))
                age.add_metric(names, math.nan if feed.last_batch_age_s is None else feed.last_batch_age_s)
        yield arriving
        yield age
        refused = CounterMetricFamily(
            "warmroute_events_refused", "Events whose blocks are finer than the GPU's.", labels=labels
        )
        for (worker, rank), n in self._core.index.refused_events().items():
            if worker in feeds:
                refused.add_metric([worker, str(rank)], n)
        yield refused

    def _index(self) -> Iterator[Metric]:
        stats = self._core.index.stats()
        yield _gauge("index_bytes", "Accounted memory of the prefix index.", stats["bytes"])
        yield _gauge("index_budget_bytes", "Its bound.", stats["budget_bytes"])
        yield _gauge("index_entries", "Blocks held by all workers together.", stats["entries"])
        yield _gauge("index_orphan_blocks", "Blocks that wait for their parent.", stats["orphan_blocks"])
        keys = GaugeMetricFamily("warmroute_index_blocks", "Different blocks known, by tier.", labels=["tier"])
        for tier, n in stats["keys"].items():
            keys.add_metric([tier], n)
        yield keys
        evicted = CounterMetricFamily("warmroute_index_evicted_blocks", "Blocks forgotten to stay within the budget.")
        evicted.add_metric([], stats["evicted_by_budget_blocks"])
        yield evicted
        lookups = CounterMetricFamily("warmroute_index_lookups", "Prompts looked up.")
        lookups.add_metric([], stats["lookups"])
        yield lookups

    def _tokens(self) -> Iterator[Metric]:
        usage = self._core.tokens.usage()
        yield _gauge("tokenizer_jobs", "Prompts being tokenised here.", usage["jobs"])
        yield _gauge("tokenizer_cache_bytes", "Memory of the token cache.", usage["cache_bytes"])
        jobs = CounterMetricFamily(
            "warmroute_tokenizer_cache", "Look-ups in the token cache, a chat's pieces one by one.", labels=["result"]
        )
        jobs.add_metric(["hit"], usage["cache_hits"])
        jobs.add_metric(["miss"], usage["cache_misses"])
        yield jobs
        text = CounterMetricFamily(
            "warmroute_tokenizer_text_bytes",
            "Text looked up in the token cache; misses are tokenised.",
            labels=["result"],
        )
        text.add_metric(["hit"], usage["cache_hit_bytes"])
        text.add_metric(["miss"], usage["cache_miss_bytes"])
        yield text
        shed = CounterMetricFamily("warmroute_tokenizer_jobs_shed", "Prompts not tokenised because too many waited.")
        shed.add_metric([], usage["jobs_shed"])
        yield shed
        sources = GaugeMetricFamily(
            "warmroute_token_source", "Whether prompts are tokenised so now.", labels=["model", "source"]
        )
        encoders = GaugeMetricFamily(
            "warmroute_tokenizer_encoder", "Whether it makes the ids of a local tokenizer.", labels=["model", "encoder"]
        )
        pieces = GaugeMetricFamily(
            "warmroute_tokenizer_pieces", "Whether of a chat only what is new is tokenised.", labels=["model"]
        )
        for model, status in self._core.tokens.status().items():
            for source in ("local", "engine", "estimate"):
                sources.add_metric([model, source], float(status["source"] == source))
            local = status["local"]
            for encoder in ("fastokens", "tokenizers"):
                encoders.add_metric([model, encoder], float(local.get("encoder") == encoder))
            pieces.add_metric([model], float(local.get("pieces", False)))
        yield from (sources, encoders, pieces)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"warmroute_{name}", text, value=value)


def _stat(worker: Worker, field: str) -> float:
    value = None if worker.stats is None else getattr(worker.stats, field)
    return math.nan if value is None else float(value)


def _predicted_wait_s(worker: Worker) -> float:
    """At the rank where it is shortest."""
    now_s = time.monotonic()
    return worker.wait_factor * min((load.prefill_backlog_s(now_s) for load in worker.loads.values()), default=0.0)


_BY_WORKER: dict[str, tuple[str, Callable[[Worker], float]]] = {
    "worker_draining": ("Whether it is on its way out.", lambda w: float(w.draining)),
    "worker_booked_prefills": (
        "Requests sent there whose first token is not here yet.",
        lambda w: float(sum(len(load.prefills) for load in w.loads.values())),
    ),
    "worker_booked_streams": (
        "Answers that are being received.",
        lambda w: float(sum(len(load.streaming) for load in w.loads.values())),
    ),
    "worker_booked_kv_tokens": (
        "KV tokens of everything in flight there.",
        lambda w: float(sum(load.own_kv_tokens for load in w.loads.values())),
    ),
    "worker_predicted_wait_seconds": (
        "How long a prompt sent there now is predicted to wait for those sent before it, as far as is known here.",
        _predicted_wait_s,
    ),
    "engine_running": ("Requests the engine says it runs.", lambda w: _stat(w, "running")),
    "engine_waiting": ("Requests the engine says wait.", lambda w: _stat(w, "waiting")),
    "learned_pull_scale": (
        "What priors of pulls to it are multiplied by, because its engine's count of transfers spoke against them.",
        lambda w: w.pulls.scale,
    ),
    "engine_kv_usage_ratio": ("Share of KV blocks in use.", lambda w: _stat(w, "kv_usage")),
}

BY_NIXL = {
    "pd_transfer_bytes": ("KV bytes fetched, by the decode engine's account.", Role.DECODE, "nixl_bytes"),
    "pd_transfer_seconds": ("Seconds it was fetching.", Role.DECODE, "nixl_transfer_s"),
    "pd_transfers_failed": ("Fetches that failed, by the same account.", Role.DECODE, "nixl_failed"),
    "pd_leases_expired": ("Prompts nobody fetched in time, by the prefill engine's.", Role.PREFILL, "nixl_expired"),
}
"""Counter -> (help, role of the workers that tell it, field of EngineStats)."""

_HITS = {
    "worker_chosen": ("Placements by worker.", "requests"),
    "prompt_tokens": ("Prompt tokens sent to each worker.", "prompt_tokens"),
    "predicted_cached_tokens": ("Prompt tokens predicted to be in the worker's KV cache.", "predicted_tokens"),
    "reported_prompt_tokens": ("Prompt tokens of the answers that told what was cached.", "compared_prompt_tokens"),
    "reported_predicted_cached_tokens": ("What was predicted for those answers.", "compared_predicted_tokens"),
    "actual_cached_tokens": ("What those answers told.", "actual_tokens"),
}
"""Counter -> (help, field of HitStats)."""
