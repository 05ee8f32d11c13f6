"""`/debug/queue`, the queue's gauges, and what `/readyz?verbose` says of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.queue.lane import Lane
from gateway.queue.queue import Queue
from gateway.queue.shed import REASONS
from gateway.tenancy import shown
from scorer.fleet import Fleet
from scorer.lateness import MIN_SAMPLES, MOST_ERROR

_MOST_TENANTS = 100
_NONE = Lane("")
_FILLING = 0.5
"""Of a bound."""


def queue_page(queue: Queue, fleet: Fleet) -> dict[str, Any]:
    """By model: who waits, what was refused, and how good predictions are. `workers`: whether they have room."""
    now_s = time.monotonic()
    return {
        "enabled": queue.settings.enabled,
        "waiting": queue.n_waiting,
        "evictable": len(queue.evictables),
        "models": {name: _lane(lane, now_s) for name, lane in sorted(queue.lanes.items())},
        "workers": {
            name: {
                "has_room": queue.saturation.is_open(worker, now_s),
                "waiting_inside": None if worker.stats is None else worker.stats.waiting,
                "runs_at_most": queue.saturation.ceiling(worker),
            }
            for name, worker in sorted(fleet.workers.items())
            if worker.role.decodes
        },
    }


def _lane(lane: Lane, now_s: float) -> dict[str, Any]:
    tenants = sorted(lane.queue.tenants().items(), key=lambda row: row[1], reverse=True)
    return {
        "waiting": len(lane),
        "tokens": lane.queue.tokens,
        "oldest_s": round(lane.oldest_s(now_s), 3),
        "leaving_per_s": round(lane.leaving.per_s(now_s), 3),
        "tenants": {shown(name): {"waiting": n, "tokens": tokens} for name, (n, tokens) in tenants[:_MOST_TENANTS]},
        "held": lane.held,
        "shed": {reason: lane.sheds[reason] for reason in REASONS},
        "predictions": {
            "samples": lane.lateness.samples(now_s),
            "mean_error": lane.lateness.error(now_s),
            "armed": lane.lateness.armed(now_s),
            "needed_samples": MIN_SAMPLES,
            "most_error": MOST_ERROR,
        },
    }


def queue_gauges(queue: Queue, fleet: Fleet) -> Iterator[Metric]:
    """Series of the models the fleet serves, whether anybody has waited for them or not."""
    now_s = time.monotonic()
    waited_for = [name for name, lane in queue.lanes.items() if lane]
    lanes = [(name, queue.lanes.get(name, _NONE)) for name in sorted({*fleet.models(), *waited_for})]
    for name, text, read in (
        ("requests", "Requests that wait for a worker with room.", lambda lane: len(lane)),
        ("tokens", "Their prompt tokens.", lambda lane: lane.queue.tokens),
        ("oldest_seconds", "How long the first of them has waited.", lambda lane: lane.oldest_s(now_s)),
        ("tenants", "Tenants with requests that wait.", lambda lane: len(lane.queue.tenants())),
        ("ttft_samples", "Predicted times to the first token compared.", lambda lane: lane.lateness.samples(now_s)),
        ("ttft_error", "Their mean relative error.", lambda lane: _or_nan(lane.lateness.error(now_s))),
        ("shedding_armed", "Whether they are right enough to refuse by.", lambda lane: lane.lateness.armed(now_s)),
    ):
        family = GaugeMetricFamily(f"warmroute_queue_{name}", text, labels=["model"])
        for model, lane in lanes:
            family.add_metric([model], float(read(lane)))
        yield family
    evictable = GaugeMetricFamily("warmroute_queue_evictable", "Requests at workers that could be taken back.")
    evictable.add_metric([], len(queue.evictables))
    yield evictable


def filling(queue: Queue) -> Iterator[tuple[str, str]]:
    """(model, how) of each queue that is at half of a bound."""
    settings, now_s = queue.settings, time.monotonic()
    for model, lane in sorted(queue.lanes.items()):
        shares = {
            f"{len(lane)} of {settings.max_requests} requests": len(lane) / max(1, settings.max_requests),
            f"{lane.queue.tokens} of {settings.max_tokens} tokens": lane.queue.tokens / settings.max_tokens,
            f"{lane.oldest_s(now_s):.0f} of {settings.max_wait_s:g} s": lane.oldest_s(now_s) / settings.max_wait_s,
        }
        how, share = max(shares.items(), key=lambda row: row[1])
        if len(lane) and share >= _FILLING:
            yield model, f"no worker has room: {how} waited"


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
