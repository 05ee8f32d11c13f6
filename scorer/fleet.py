"""The workers, what they can do, what they last said of themselves, and what is booked on them."""

from __future__ import annotations

from collections.abc import Iterable

from indexer import Holder
from scorer.ledger import Load
from scorer.pulls import Pulls
from scorer.types import ChangeKind, EngineStats, Role, WorkerChange

STALE_S = 5.0
"""Queue and cache figures of an engine older than this (it is asked each second) say nothing of now."""


class Worker:
    """One vLLM server. `generation` differs between two lives under one name."""

    def __init__(self, name: str, generation: int) -> None:
        self.name = name
        self.generation = generation
        self.url: str | None = None
        self.role = Role.BOTH
        self.weight = 1.0
        self.labels: dict[str, str] = {}
        self.draining = False
        self.models: frozenset[str] | None = None
        """Names of its base model; None until the worker was asked."""
        self.adapters: frozenset[str] = frozenset()
        self.max_model_len: int | None = None
        self.loads: dict[int, Load] = {0: Load()}
        self.stats: EngineStats | None = None
        self.front_factor = self.wait_factor = self.floor_factor = 1.0
        self.work_factor = self.step_factor = self.stall_factor = 1.0
        """What it takes, part by part, relative to the constants at its weight: learned."""
        self.pulls = Pulls()
        self.publishes_events = False
        """Whether its KV events are arriving, so that the exact index speaks for it."""

    def serves(self, model: str) -> bool | None:
        """None while it is unknown what the worker serves."""
        if self.models is None:
            return None
        return model in self.models or model in self.adapters

    def reuse(self, prior: float) -> float:
        """Share of prompt tokens it finds in its cache: how likely a cached block is used again."""
        stats = self.stats
        if stats is None or not stats.prefix_queries_tokens or stats.prefix_hits_tokens is None:
            return prior
        return min(1.0, max(0.0, stats.prefix_hits_tokens / stats.prefix_queries_tokens))

    def block_size(self) -> int | None:
        return None if self.stats is None else self.stats.block_size


class Fleet:
    """All workers by name. Changes come from discovery, capabilities and scrapes; load from bookings."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self._generations = 0

    def apply(self, change: WorkerChange) -> Worker | None:
        """Take in what discovery says. The worker it is about, None when it is gone."""
        if change.kind is ChangeKind.REMOVED:
            self.workers.pop(change.worker, None)
            return None
        worker = self.workers.get(change.worker)
        if worker is None:
            self._generations += 1
            worker = self.workers[change.worker] = Worker(change.worker, self._generations)
        worker.draining = change.kind is ChangeKind.DRAINING
        if change.kind is not ChangeKind.DRAINING:
            worker.url = change.url
            worker.role = change.role
            worker.weight = change.weight
            worker.labels = dict(change.labels)
        return worker

    def set_capabilities(
        self,
        name: str,
        *,
        models: Iterable[str],
        adapters: Iterable[str] = (),
        ranks: Iterable[int] = (0,),
        max_model_len: int | None = None,
    ) -> None:
        """What the worker says it serves. Ranks that stay keep their load."""
        worker = self.workers.get(name)
        if worker is None:
            return
        worker.models = frozenset(models)
        worker.adapters = frozenset(adapters)
        worker.max_model_len = max_model_len
        wanted = sorted(set(ranks)) or [0]
        worker.loads = {rank: worker.loads.get(rank) or Load() for rank in wanted}

    def set_stats(self, name: str, stats: EngineStats) -> None:
        worker = self.workers.get(name)
        if worker is not None:
            worker.pulls.scraped(worker.stats, stats)
            worker.stats = stats

    def models(self) -> dict[str, list[str]]:
        """Model and adapter names -> the workers that serve them."""
        out: dict[str, list[str]] = {}
        for worker in self.workers.values():
            for name in sorted((worker.models or frozenset()) | worker.adapters):
                out.setdefault(name, []).append(worker.name)
        return out

    def holders(self, model: str, roles: Iterable[Role]) -> list[tuple[Worker, Holder, Load]]:
        """Every rank of the workers in `roles` that serve `model` and are not draining."""
        wanted = tuple(roles)
        return [
            (worker, (worker.name, rank), load)
            for worker in self.workers.values()
            if worker.role in wanted
            and not worker.draining
            and worker.models is not None  # `serves` written out, as this is asked of every worker for each request.
            and (model in worker.models or model in worker.adapters)
            for rank, load in worker.loads.items()
        ]
