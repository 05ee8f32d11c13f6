"""`/metrics`: vLLM's names and labels, read from the engines at scrape time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bench.engine.config import FakeVllmConfig
from bench.engine.driver import Driver
from bench.engine.histogram import Histogram, Latencies, Transfers
from bench.engine.nixl import NixlSide
from bench.engine.request import EngineStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES: Final[tuple[tuple[str, str, Callable[[EngineStats], float]], ...]] = (
    ("num_requests_running", "Number of requests in model execution batches.", lambda it: it.running),
    ("num_requests_waiting", "Number of requests waiting to be processed.", lambda it: it.waiting),
    ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda it: it.kv_usage),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[EngineStats], int]], ...]] = (
    ("prefix_cache_queries", "Prefix cache queries, in tokens.", lambda it: it.prefix_queries),
    ("prefix_cache_hits", "Prefix cache hits, in tokens.", lambda it: it.prefix_hits),
    ("external_prefix_cache_queries", "External prefix cache queries, in tokens.", lambda it: it.external_queries),
    ("external_prefix_cache_hits", "External prefix cache hits, in tokens.", lambda it: it.external_hits),
    ("num_preemptions", "Cumulative number of preemption from the engine.", lambda it: it.preemptions),
    ("prompt_tokens", "Number of prefill tokens processed.", lambda it: it.prompt_tokens),
    ("prompt_tokens_cached", "Cached prompt tokens.", lambda it: it.cached_prompt_tokens + it.pulled_tokens),
    ("generation_tokens", "Number of generation tokens processed.", lambda it: it.generated_tokens),
)
_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[Latencies], Histogram]], ...]] = (
    ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", lambda it: it.ttft),
    ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", lambda it: it.inter_token),
    ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", lambda it: it.e2e),
    ("request_queue_time_seconds", "Histogram of time spent in WAITING phase.", lambda it: it.queue),
    ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase.", lambda it: it.prefill),
    ("request_decode_time_seconds", "Histogram of time spent in DECODE phase.", lambda it: it.decode),
)


_NIXL_COUNTERS: Final = (
    ("nixl_num_failed_transfers", "Number of failed NIXL KV transfers.", "failed"),
    ("nixl_num_failed_notifications", "Number of failed NIXL KV notifications.", "failed_notifications"),
    ("nixl_num_kv_expired_reqs", "Number of requests whose KV expired before it was read.", "expired"),
    ("nixl_num_notifications_after_expiry", "Notifications that came after the KV had expired.", "late"),
)


_NIXL_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[Transfers], Histogram]], ...]] = (
    ("nixl_xfer_time_seconds", "Histogram of transfer duration for NIXL KV Cache transfers.", lambda it: it.xfer_time),
    ("nixl_post_time_seconds", "Histogram of transfer post time for NIXL KV transfers.", lambda it: it.post_time),
    ("nixl_bytes_transferred", "Histogram of bytes transferred per NIXL KV Cache transfers.", lambda it: it.bytes),
    ("nixl_num_descriptors", "Histogram of number of descriptors per NIXL transfer.", lambda it: it.descriptors),
)


class _VllmCollector(Collector):
    def __init__(
        self,
        config: FakeVllmConfig,
        drivers: Sequence[Driver],
        sides: Sequence[NixlSide],
        started: float,
        sleep_level: int | None,
    ) -> None:
        self._config = config
        self._drivers = drivers
        self._sides = sides
        self._started = started
        self._sleep_level = sleep_level

    def collect(self) -> Iterator[Metric]:
        start = GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds."
        )
        start.add_metric([], self._started)
        yield start
        stats = [driver.engine.stats() for driver in self._drivers]
        if not self._sides:  # only a connector is asked for what is missing
            stats = [replace(it, external_queries=0) for it in stats]
        for name, text, value in _GAUGES:
            yield self._gauge(name, text, [[([], value(it))] for it in stats], [])
        reasons = [
            [(["capacity"], float(it.waiting - it.waiting_remote)), (["deferred"], float(it.waiting_remote))]
            for it in stats
        ]
        yield self._gauge("num_requests_waiting_by_reason", "Waiting requests by reason.", reasons, ["reason"])
        states = {"awake": None, "weights_offloaded": 1, "discard_all": 2}
        awake = [[([name], float(self._sleep_level == level)) for name, level in states.items()] for _ in stats]
        yield self._gauge("engine_sleep_state", "Engine sleep state.", awake, ["sleep_state"])
        for name, text, count in _COUNTERS:
            yield self._counter(name, text, [[([], count(it))] for it in stats], [])
        sources = [
            [
                (["local_compute"], it.prompt_tokens - it.cached_prompt_tokens - it.pulled_tokens),
                (["local_cache_hit"], it.cached_prompt_tokens),
                (["external_kv_transfer"], it.pulled_tokens),
            ]
            for it in stats
        ]
        yield self._counter("prompt_tokens_by_source", "Number of prompt tokens by source.", sources, ["source"])
        unused = [([name], 0) for name in ("host", "disk", "external_unspecified")]
        tiers = [[(["device"], it.prefix_hits), (["p2p"], it.external_hits), *unused] for it in stats]
        yield self._counter("prompt_tokens_cached_by_source", "Prefix-cache hit tokens by tier.", tiers, ["source"])
        ends = [[([reason], count) for reason, count in driver.finished.items()] for driver in self._drivers]
        yield self._counter("request_success", "Count of successfully processed requests.", ends, ["finished_reason"])
        if self._sides:
            yield from self._nixl(stats)
        for name, text, pick in _HISTOGRAMS:
            yield self._histogram(name, text, [pick(driver.latencies) for driver in self._drivers])
        yield self._cache_config()

    def _nixl(self, stats: Sequence[EngineStats]) -> Iterator[Metric]:
        for name, text, attribute in _NIXL_COUNTERS:
            yield self._counter(name, text, [[([], getattr(side, attribute))] for side in self._sides], [])
        for name, text, pick in _NIXL_HISTOGRAMS:
            yield self._histogram(name, text, [pick(side.transfers) for side in self._sides])
        if self._config.kv_role != "kv_producer":
            stages = [
                [(["waiting_to_start"], 0.0), (["in_progress"], it.waiting_remote), (["completed_waiting"], 0.0)]
                for it in stats
            ]
            text = "Number of waiting requests by async KV load stage."
            yield self._gauge("num_requests_kv_fetch_by_stage", text, stages, ["stage"])

    def _histogram(self, name: str, text: str, ranks: Iterable[Histogram]) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=["engine", "model_name"])
        for rank, histogram in enumerate(ranks):
            family.add_metric([str(rank), self._config.model], histogram.buckets(), histogram.total)
        return family

    def _gauge(self, name: str, text: str, rows: Iterable[list[tuple[list[str], float]]], labels: list[str]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["engine", "model_name", *labels])
        for rank, values in enumerate(rows):
            for extra, value in values:
                family.add_metric([str(rank), self._config.model, *extra], value)
        return family

    def _counter(self, name: str, text: str, rows: Iterable[list[tuple[list[str], int]]], labels: list[str]) -> Metric:
        family = CounterMetricFamily(
            f"vllm:{name}", text, labels=["engine", "model_name", *labels], created=self._started
        )
        for rank, values in enumerate(rows):
            for extra, value in values:
                family.add_metric([str(rank), self._config.model, *extra], value, created=self._started)
        return family

    def _cache_config(self) -> Metric:
        engine = self._config.engine
        tokens = engine.num_gpu_blocks * engine.block_size
        info = {
            "block_size": engine.block_size,
            "cache_dtype": "auto",
            "effective_attention_block_size": engine.block_size,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "gpu_memory_utilization": 0.92,
            "hash_block_size": None,
            "kv_cache_max_concurrency": tokens / engine.max_model_len,
            "kv_cache_size_tokens": tokens,
            "num_cpu_blocks": None,
            "num_gpu_blocks": engine.num_gpu_blocks,
            "num_gpu_blocks_override": None,
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": None,
            "user_specified_block_size": True,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=["engine", *info]
        )
        for rank in range(len(self._drivers)):
            family.add_metric([str(rank), *map(str, info.values())], 1)
        return family


def exposition(
    config: FakeVllmConfig,
    drivers: Sequence[Driver],
    sides: Sequence[NixlSide],
    started: float,
    sleep_level: int | None,
) -> bytes:
    """The text of `/metrics`. `started` is the (pretended) process start in epoch seconds."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_VllmCollector(config, drivers, sides, started, sleep_level))
    return generate_latest(registry)
