"""The metrics of several processes as those of one gateway.

Counters and histograms are summed, with what processes that are gone had counted: they never go back. Gauges are summed
where each process has its own part, else the one that says more is shown; what is learned by each process for itself
has the label `process`. What comes from an engine and is the same for whoever reads it is taken once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from gateway.processes.families import Family, Labels, Sample

Key = tuple[str, Labels]
HUB: Final = "hub"

_SUMMED: Final = frozenset(
    f"warmroute_{name}"
    for name in (
        "requests_in_flight", "realtime_sessions", "worker_booked_prefills", "worker_booked_streams",
        "worker_booked_kv_tokens", "queue_requests", "queue_tokens", "queue_ttft_samples", "pd_stranded_tokens",
        "index_bytes", "index_budget_bytes", "index_orphan_blocks", "event_replays", "tokenizer_jobs",
        "tokenizer_cache_bytes",
    )
)  # fmt: skip
_LEAST: Final = frozenset(
    f"warmroute_{name}"
    for name in (
        "worker_available", "events_arriving", "events_rank_arriving", "events_rank_age_seconds",
        "index_service_up", "replicas_shared", "replicas_known", "queue_shedding_armed",
    )
)  # fmt: skip
_BY_PROCESS: Final = frozenset(f"warmroute_{name}" for name in ("learned_factor", "learned_pull_scale"))
_OF_THE_HUB: Final = frozenset(
    f"warmroute_{name}" for name in ("event_batches", "events", "event_gaps", "event_missing_batches", "events_refused")
)
"""Counters that data planes only repeat: the hub's, or those of an indexer that they all follow."""
_OF_ENGINES: Final = frozenset(
    f"warmroute_{name}"
    for name in ("pd_transfer_bytes", "pd_transfer_seconds", "pd_transfers_failed", "pd_leases_expired")
)
"""Counters that engines keep."""
_OF_DATA_PLANES: Final = frozenset({"warmroute_degraded", "warmroute_worker_available"})
"""The hub has these too, and knows less."""


class Totals:
    """What is to be told, from what each process says. `gone` when one has ended: what it said last stays counted."""

    def __init__(self) -> None:
        self._latest: dict[str, list[Family]] = {}
        self._of_the_dead: dict[Key, float] = {}
        self._about: dict[str, tuple[str, str]] = {}
        """Families of the dead: text and kind."""
        self._workers: frozenset[str] = frozenset()

    def heard(self, life: str, families: list[Family]) -> None:
        """What a process says now. `life` begins with what it is: hub, or the number of a data plane, then `/`."""
        self._latest[life] = families

    def gone(self, life: str) -> None:
        for family in self._latest.pop(life, ()):
            if _is_counted(family) and family.name not in _OF_ENGINES and not _is_repeated(family, life):
                self._about[family.name] = family.text, family.kind
                for sample in family.samples:
                    key = sample.name, sample.labels
                    self._of_the_dead[key] = self._of_the_dead.get(key, 0.0) + sample.value
        self._workers = frozenset()  # Whom others have not met yet is not gone.

    def told(self) -> list[Family]:
        """Of all together."""
        self._forget_workers()
        # One that is gone counts too: what the others repeat of it is in what it had counted.
        has_hub = not _OF_THE_HUB.isdisjoint(self._about)
        has_hub = has_hub or any(them and _is_hub(life) for life, them in self._latest.items())
        merged: dict[str, tuple[Family, dict[Key, float]]] = {}
        for life, families in sorted(self._latest.items()):
            for family in families:
                if has_hub and _is_repeated(family, life):
                    continue
                if family.name in _OF_DATA_PLANES and _is_hub(life):
                    continue
                values = merged.setdefault(family.name, (family, {}))[1]
                _take_in(values, family, life)
        for name, (text, kind) in self._about.items():
            merged.setdefault(name, (Family(name, text, kind, []), {}))
        out: list[Family] = []
        for name, (family, values) in merged.items():
            if name in self._about:
                self._add_dead(family, values)
            samples = [Sample(key[0], key[1], value) for key, value in values.items()]
            out.append(Family(name, family.text, family.kind, samples))
        return out

    def _add_dead(self, family: Family, values: dict[Key, float]) -> None:
        names = _sample_names(family)
        for key, value in self._of_the_dead.items():
            if key[0] in names:
                values[key] = values.get(key, 0.0) + value

    def _forget_workers(self) -> None:
        """Series of a worker go with it, as those of one process do."""
        there = frozenset(
            value
            for families in self._latest.values()
            for family in families
            for sample in family.samples
            for label, value in sample.labels
            if label == "worker"
        )
        gone = self._workers - there
        if gone:
            self._of_the_dead = {
                key: value for key, value in self._of_the_dead.items() if gone.isdisjoint(_workers_in(key[1]))
            }
        self._workers = there


def _workers_in(labels: Labels) -> Iterable[str]:
    return (value for label, value in labels if label == "worker")


def _sample_names(family: Family) -> frozenset[str]:
    endings = ("_total", "") if family.kind == "counter" else ("_bucket", "_count", "_sum", "")
    return frozenset(family.name + ending for ending in endings)


def _is_hub(life: str) -> bool:
    return life.partition("/")[0] == HUB


def _is_counted(family: Family) -> bool:
    return family.kind in ("counter", "histogram", "summary")


def _is_repeated(family: Family, life: str) -> bool:
    return family.name in _OF_THE_HUB and not _is_hub(life)


def _take_in(values: dict[Key, float], family: Family, life: str) -> None:
    put: Callable[[float, float], float]
    if family.name in _BY_PROCESS:
        process = ("process", life.partition("/")[0])
        if not _is_hub(life):
            values.update({(it.name, (*it.labels, process)): it.value for it in family.samples})
        return
    if family.name in _OF_ENGINES or _is_repeated(family, life):
        put = max
    elif _is_counted(family) or family.name in _SUMMED:
        put = _plus
    else:
        put = min if family.name in _LEAST else max
    for it in family.samples:
        key = it.name, it.labels
        before = values.get(key, math.nan)
        values[key] = it.value if math.isnan(before) else before if math.isnan(it.value) else put(before, it.value)


def _plus(a: float, b: float) -> float:
    return a + b


def labelled(name: str, text: str, label: str, values: Mapping[str, float], kind: str = "gauge") -> Family:
    """A family of the supervisor's own."""
    sample = f"{name}_total" if kind == "counter" else name
    return Family(name, text, kind, [Sample(sample, ((label, key),), value) for key, value in values.items()])
