"""vLLM's `/metrics` -> EngineStats.

Only the dozen series that are used are picked out of the text, by one regular expression: 0.3 ms for vLLM 0.32's 71 kB
where a full Prometheus parser takes 14 ms, which at one scrape per worker and second is a core for 70 workers.

Names changed over time; the newest one present counts. What an engine does not say is None, never 0. A worker with
several engines (data-parallel ranks) has one sample of each per engine: counts are added up, shares averaged.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from scorer.types import EngineStats

# Series without their prefix, newest name first.
_RUNNING = ("num_requests_running",)
_WAITING = ("num_requests_waiting",)
_QUERIES = ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total")
_HITS = ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total")
_PROMPT = ("prompt_tokens_total",)
_GENERATION = ("generation_tokens_total",)
_PREEMPTIONS = ("num_preemptions_total",)
_PREFILL_SUM = ("request_prefill_time_seconds_sum",)
_PREFILL_COUNT = ("request_prefill_time_seconds_count",)
_NIXL_BYTES = ("nixl_bytes_transferred_sum",)
_NIXL_SECONDS = ("nixl_xfer_time_seconds_sum",)
_NIXL_TRANSFERS = ("nixl_xfer_time_seconds_count",)
_NIXL_FAILED = ("nixl_num_failed_transfers_total",)
_NIXL_EXPIRED = ("nixl_num_kv_expired_reqs_total",)
_KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_WAITING_BY_REASON = "num_requests_waiting_by_reason"
_CACHE_CONFIG = "cache_config_info"
_SLEEP = "engine_sleep_state"
_START = "process_start_time_seconds"
_SUMMED = (
    *(_RUNNING, _WAITING, _QUERIES, _HITS, _PROMPT, _GENERATION, _PREEMPTIONS, _PREFILL_SUM, _PREFILL_COUNT),
    *(_NIXL_BYTES, _NIXL_SECONDS, _NIXL_FAILED, _NIXL_EXPIRED),
)
_ALL = [*(name for names in _SUMMED for name in names), *_KV_USAGE, _WAITING_BY_REASON, _CACHE_CONFIG, _SLEEP]
_NAMES = "|".join(sorted(_ALL, key=len, reverse=True))  # One name begins with another.
_MOST = 1e24
_MOST_COUNT = 10**12
"""No engine has so many blocks, nor tokens in one."""
_QUOTED = r'"(?:[^"\\\n]|\\.)*+"'
# Without the possessive marks and the look behind, a line of spaces or letters takes time by the square of its length.
_SERIES = re.compile(
    rf"^(?:vllm[:_]({_NAMES})|({_START}))[ \t]*+(?:\{{((?:[^\"}}\n]|{_QUOTED})*+)\}})?[ \t]*+([^ \t\r\n]++)",
    re.MULTILINE,
)
_LABEL = re.compile(rf"(?<![A-Za-z0-9_])([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+({_QUOTED})")

_Samples = dict[str, list[tuple[str, float]]]


class Scrape(msgspec.Struct, frozen=True):
    """One reading. `asleep` is None when the engine does not say; asleep, it serves nothing and has no cache."""

    stats: EngineStats
    asleep: bool | None
    kv_cache_dtype: str | None = None


def parse_metrics(text: str, scraped_at_s: float) -> Scrape:
    """Read the Prometheus text of one worker. Lines that are no samples are passed over."""
    samples: _Samples = defaultdict(list)
    for name, start, labels, number in _SERIES.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if 0 <= value < _MOST:  # All of them are counts, seconds, shares or sizes.
            samples[name or start].append((labels, value))
    usage = _newest(samples, _KV_USAGE)
    engines = [_labels(labels) for labels, _ in samples.get(_CACHE_CONFIG, ())]
    block_sizes = [_count(engine.get("block_size")) for engine in engines]
    blocks = [_count(engine.get("num_gpu_blocks")) for engine in engines]
    stats = EngineStats(
        scraped_at_s=scraped_at_s,
        running=_sum(samples, _RUNNING),
        waiting=_sum(samples, _WAITING),
        waiting_for_room=_waiting_for_room(samples.get(_WAITING_BY_REASON, ())),
        kv_usage=min(1.0, max(0.0, sum(usage) / len(usage))) if usage else None,
        block_size=next((size for size in block_sizes if size), None),
        kv_blocks=_total(blocks),
        kv_capacity_tokens=_capacity_tokens(engines, blocks, block_sizes),
        prefix_caching=_prefix_caching(engines),
        prefix_queries_tokens=_sum(samples, _QUERIES),
        prefix_hits_tokens=_sum(samples, _HITS),
        prompt_tokens=_sum(samples, _PROMPT),
        generation_tokens=_sum(samples, _GENERATION),
        preemptions=_sum(samples, _PREEMPTIONS),
        prefill_time_sum_s=_sum(samples, _PREFILL_SUM),
        prefill_time_count=_sum(samples, _PREFILL_COUNT),
        nixl_bytes=_sum(samples, _NIXL_BYTES),
        nixl_transfer_s=_sum(samples, _NIXL_SECONDS),
        nixl_transfers=_sum(samples, _NIXL_TRANSFERS),
        nixl_failed=_sum(samples, _NIXL_FAILED),
        nixl_expired=_sum(samples, _NIXL_EXPIRED),
        process_start_s=max((value for _, value in samples.get(_START, ())), default=None),
    )
    dtypes = {engine.get("cache_dtype", "auto") for engine in engines} - {"auto"}
    return Scrape(stats, _asleep(samples.get(_SLEEP, ())), next(iter(dtypes)) if len(dtypes) == 1 else None)


def _newest(samples: _Samples, names: Sequence[str]) -> list[float]:
    return next(([value for _, value in samples[name]] for name in names if name in samples), [])


def _sum(samples: _Samples, names: Sequence[str]) -> float | None:
    values = _newest(samples, names)
    return sum(values) if values else None


def _waiting_for_room(reasons: Sequence[tuple[str, float]]) -> float | None:
    values = [value for labels, value in reasons if _labels(labels).get("reason") == "capacity"]
    return sum(values) if values else None


def _labels(text: str) -> dict[str, str]:
    return {name: quoted[1:-1] for name, quoted in _LABEL.findall(text)}


def _capacity_tokens(
    engines: list[dict[str, str]], blocks: list[int | None], block_sizes: list[int | None]
) -> int | None:
    """Hybrid models have fewer tokens than blocks times block size, and newer engines say how many."""
    tokens = [_count(engine.get("kv_cache_size_tokens")) for engine in engines]
    if None in tokens:
        tokens = [n * size if n and size else None for n, size in zip(blocks, block_sizes, strict=True)]
    return _total(tokens)


def _prefix_caching(engines: list[dict[str, str]]) -> bool | None:
    said = [engine.get("enable_prefix_caching") for engine in engines]
    return None if not said or None in said else all(text == "True" for text in said)


def _count(text: str | None) -> int | None:
    """A label that holds a number above 0; "None" and 0 mean that the engine does not know. What is too large to be one
    is not known either.
    """
    try:
        count = int(float(text or ""))
    except (ValueError, OverflowError):
        return None
    return count if 0 < count < _MOST_COUNT else None


def _total(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _asleep(states: Sequence[tuple[str, float]]) -> bool | None:
    """One sample per state and engine; the state that holds is 1."""
    awake = [value for labels, value in states if _labels(labels).get("sleep_state") == "awake"]
    return any(value == 0 for value in awake) if awake else None
