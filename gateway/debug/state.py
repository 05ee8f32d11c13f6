"""`/debug/state`: the fleet at a glance, in JSON's terms. What the page and `warmroute top` show.

Numbers and names only. A snapshot is made of rows that can be compared, so that a stream need only tell what changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec

from gateway.core import Core
from gateway.debug.decisions import Row, rows
from gateway.debug.health import degradations, shown_worker
from gateway.debug.pace import Percentiles
from gateway.debug.remedies import REMEDIES
from gateway.engine.feed import FeedStatus
from scorer.fleet import Worker

SHOWN_DECISIONS = 40
_SHOWN_PREFIXES = 10
_SHOWN_WARNINGS = 100
_SHOWN_RANKS = 16
_SHOWN_MODELS = 16
_LONGEST_TEXT = 400
_WARNINGS_S = 3.0
"""To look for them takes as long as all the rest, and they do not come and go by the second."""


class RankRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`events` None: nobody reads any of its events. `*_tokens`: what the index knows it to hold, by tier."""

    rank: int
    requests: int
    gpu_tokens: int = 0
    cpu_tokens: int = 0
    disk_tokens: int = 0
    events: str | None = None
    epoch: int | None = None
    gaps: int = 0
    missing_batches: int = 0


class WorkerRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`prefills`, `streams`, `kv_tokens`: what is booked there; `running`, `waiting`, `kv_usage`: what it says itself.
    Hits: tokens of the answers that told what was cached.
    """

    name: str
    role: str
    state: str
    reason: str | None = None
    models: list[str] = []
    weight: float = 1.0
    prefills: int
    streams: int
    kv_tokens: int
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    kv_capacity_tokens: int | None = None
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    actual_tokens: int = 0
    ranks: list[RankRow] = []
    n_ranks: int = 1
    """All of them; `ranks` are the first `_SHOWN_RANKS`."""


class Warned(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    what: str
    about: str | None = None
    detail: str
    remedy: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """`ttft_ms` and `itl_ms`: percentiles (`pace.SHARES`) by second, the oldest first."""

    at_s: float
    head: dict[str, Any]
    workers: list[WorkerRow]
    hits: dict[str, int]
    ttft_ms: list[list[float] | None]
    itl_ms: list[list[float] | None]
    prefixes: list[dict[str, Any]]
    warnings: list[Warned]
    more_warnings: int
    decisions: list[Row]


class Snapshots:
    """Makes snapshots of one process. `face` is its name."""

    def __init__(self, core: Core, face: str, *, draining: Callable[[], bool], in_flight: Callable[[], int]) -> None:
        self._core = core
        self._face = face
        self._draining = draining
        self._in_flight = in_flight
        self._started_s = time.time()
        self._version = version("warmroute")
        self._look_again_s = 0.0
        self._warned: list[Warned] = []
        self._rate = 0.0
        self._rated_s = time.monotonic()
        self._rated_at = 0

    def take(self) -> Snapshot:
        core, now_s = self._core, time.monotonic()
        pace = core.decisions.pace
        if now_s >= self._look_again_s:
            self._look_again_s = now_s + _WARNINGS_S
            self._warned = self._warnings()
        warnings = self._warned
        return Snapshot(
            at_s=round(time.time(), 1),
            head={
                "face": self._face,
                "version": self._version,
                "started_s": round(self._started_s, 1),
                "draining": self._draining(),
                "in_flight": self._in_flight(),
                "queued": core.queue.n_waiting,
                "decisions": core.decisions.made,
                "decisions_per_s": self._per_s(now_s),
                "policy": core.config.scorer.policy,
                "pd_policy": core.config.pd.policy,
                "index_bytes": core.index.bytes_used(),
                "index_budget_bytes": core.config.index.budget_bytes,
            },
            workers=self._workers(),
            hits=self._hits(),
            ttft_ms=_in_ms(pace.ttft.percentiles(now_s)),
            itl_ms=_in_ms(pace.itl.percentiles(now_s)),
            prefixes=core.prefixes.top(_SHOWN_PREFIXES),
            warnings=warnings[:_SHOWN_WARNINGS],
            more_warnings=max(0, len(warnings) - _SHOWN_WARNINGS),
            decisions=rows(core.decisions.last(SHOWN_DECISIONS)),
        )

    def _per_s(self, now_s: float) -> float:
        """Over the last second or more."""
        elapsed_s, made = now_s - self._rated_s, self._core.decisions.made
        if elapsed_s >= 0.9:
            self._rate = round((made - self._rated_at) / elapsed_s, 1)
            self._rated_s, self._rated_at = now_s, made
        return self._rate

    def _workers(self) -> list[WorkerRow]:
        core = self._core
        held = core.index.held_tokens()
        feeds: dict[str, dict[int, FeedStatus]] = {}
        for (name, rank), feed in core.ingest.status().items():
            feeds.setdefault(name, {})[rank] = feed
        found: list[WorkerRow] = []
        for name, worker in sorted(core.fleet.workers.items()):
            mine = feeds.get(name, {})
            ranks = sorted({*worker.loads, *mine})
            found.append(
                _worker_row(
                    core,
                    worker,
                    [
                        _rank_row(worker, rank, held.get((name, rank), {}), mine.get(rank))
                        for rank in ranks[:_SHOWN_RANKS]
                    ],
                    len(ranks),
                )
            )
        return found

    def _hits(self) -> dict[str, int]:
        every = self._core.hits.workers.values()
        return {
            "prompt_tokens": sum(hits.compared_prompt_tokens for hits in every),
            "predicted_tokens": sum(hits.compared_predicted_tokens for hits in every),
            "actual_tokens": sum(hits.actual_tokens for hits in every),
            "over_tokens": sum(hits.over_tokens for hits in every),
            "under_tokens": sum(hits.under_tokens for hits in every),
            "answers": sum(hits.compared for hits in every),
        }

    def _warnings(self) -> list[Warned]:
        found = [
            Warned(what=it.what, about=it.worker or it.model, detail=_cut(it.detail), remedy=REMEDIES.get(it.what, ""))
            for it in degradations(self._core)
        ]
        for name, hits in self._core.hits.workers.items():
            share = hits.missed_share()
            if share is not None:
                detail = f"{share:.0%} of the tokens predicted to be cached were not, over {hits.compared} answers"
                remedy = REMEDIES["hits_missed"]
                found.append(Warned(what="hits_missed", about=name, detail=detail, remedy=remedy))
        return found


def _worker_row(core: Core, worker: Worker, ranks: list[RankRow], n_ranks: int) -> WorkerRow:
    shown = shown_worker(core, worker)
    loads, stats = worker.loads.values(), worker.stats
    hits = core.hits.workers.get(worker.name)
    return WorkerRow(
        name=worker.name,
        role=shown["role"],
        state=shown["state"],
        reason=None if shown["reason"] is None else _cut(shown["reason"]),
        models=[*shown["models"], *shown["adapters"]][:_SHOWN_MODELS],
        weight=worker.weight,
        prefills=sum(len(load.prefills) for load in loads),
        streams=sum(len(load.streaming) for load in loads),
        kv_tokens=sum(load.own_kv_tokens for load in loads),
        running=None if stats is None else stats.running,
        waiting=None if stats is None else stats.waiting,
        kv_usage=None if stats is None or stats.kv_usage is None else round(stats.kv_usage, 3),
        kv_capacity_tokens=None if stats is None else stats.kv_capacity_tokens,
        prompt_tokens=0 if hits is None else hits.compared_prompt_tokens,
        predicted_tokens=0 if hits is None else hits.compared_predicted_tokens,
        actual_tokens=0 if hits is None else hits.actual_tokens,
        ranks=ranks,
        n_ranks=n_ranks,
    )


def _rank_row(worker: Worker, rank: int, tokens: dict[str, int], feed: FeedStatus | None) -> RankRow:
    load = worker.loads.get(rank)
    return RankRow(
        rank=rank,
        requests=0 if load is None else load.requests,
        gpu_tokens=tokens.get("gpu", 0),
        cpu_tokens=tokens.get("cpu", 0),
        disk_tokens=tokens.get("disk", 0),
        events=None if feed is None else _events(feed),
        epoch=None if feed is None else feed.epoch,
        gaps=0 if feed is None else feed.gaps,
        missing_batches=0 if feed is None else feed.missing_batches,
    )


def _events(feed: FeedStatus) -> str:
    if feed.endpoint_state not in ("connected", "listening"):
        return feed.endpoint_state
    return f"{feed.phase}, partial" if feed.partial else feed.phase


def _in_ms(seconds: Any) -> list[list[float] | None]:
    return [None if each is None else _rounded(each) for each in seconds]


def _rounded(percentiles: Percentiles) -> list[float]:
    return [round(value * 1000, 1) for value in percentiles]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."
