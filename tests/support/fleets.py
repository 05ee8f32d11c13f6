"""A small language for decision tests: `fleet(W("a", running=2), W("b"))`, `hold(...)`, `route(...)`."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

from indexer import PrefixIndex, decode_batch
from scorer.answers import Answer
from scorer.fleet import Fleet
from scorer.ledger import Booking
from scorer.planner import Planner
from scorer.types import ChangeKind, EngineStats, Outcome, OutcomeKind, PdReason, Plan, RequestFacts, Role, WorkerChange
from tests.support.wire import stored

BLOCK = 16


@dataclass
class W:
    """One worker: what it serves and what its last scrape said."""

    name: str
    models: tuple[str, ...] = ("m",)
    adapters: tuple[str, ...] = ()
    role: Role = Role.BOTH
    ranks: int = 1
    waiting: float | None = 0
    running: float | None = 0
    kv_usage: float | None = 0.0
    kv_blocks: int | None = 4096
    events: bool = True
    weight: float = 1.0
    scraped: bool = True
    asked: bool = True
    """Whether it has said what it serves."""
    block_size: int | None = BLOCK
    max_model_len: int | None = None
    nixl: bool = False
    """Whether its engine tells of a KV connector."""


def P(name: str, **changes: Any) -> W:
    """A prefill worker."""
    return W(name, role=Role.PREFILL, **changes)


def D(name: str, **changes: Any) -> W:
    """A decode worker."""
    return W(name, role=Role.DECODE, **changes)


@dataclass
class Rig:
    """A planner over a fleet, with a clock that only moves when told."""

    planner: Planner
    index: PrefixIndex
    rng: random.Random
    now_s: float = 1000.0
    ids: int = 0
    hashes: dict[str, int] = field(default_factory=dict)

    def hold(self, worker: str, tokens: list[int], *, rank: int = 0, lora: str | None = None) -> None:
        """The engine announces that it holds the full blocks of `tokens`."""
        seed = self.hashes[worker] = self.hashes.get(worker, 0) + 1
        hashes = [seed << 32 | i for i in range(len(tokens) // BLOCK)]
        ids = tokens[: len(hashes) * BLOCK]
        self.index.apply(worker, rank, decode_batch(stored(hashes, ids, block_size=BLOCK, rank=rank, lora=lora)))

    def facts(self, tokens: list[int] | int, **kwargs: object) -> RequestFacts:
        self.ids += 1
        known = None if isinstance(tokens, int) else array("I", tokens).tobytes()
        n = tokens if isinstance(tokens, int) else len(tokens)
        values = {"request_id": f"r{self.ids}", "model": "m", "prompt_tokens": n, "tokens": known, **kwargs}
        return RequestFacts(**values)  # type: ignore[arg-type]

    def route(self, tokens: list[int] | int, available: list[str] | None = None, **kwargs: object) -> Plan:
        return self.planner.plan(self.facts(tokens, **kwargs), available, self.now_s, self.rng)

    def observe(self, plan: Plan, kind: OutcomeKind, **kwargs: object) -> None:
        self.planner.observe(plan.request_id, Outcome(kind=kind, **kwargs), self.now_s)  # type: ignore[arg-type]

    def next_prefill(
        self, plan: Plan, why: PdReason = PdReason.PREFILL_FAILED, *, local: bool = False, available: Any = None
    ) -> Plan:
        """What is planned after the prefill worker of `plan` has failed."""
        after = self.planner.next_prefill(plan.request_id, why, available, self.now_s, self.rng, local=local)
        assert after is not None
        return after

    def check_loads(self) -> None:
        """That nothing booked is below zero, and what is counted is what there is."""
        for worker in self.planner.fleet.workers.values():
            for load in worker.loads.values():
                assert load.streams >= 0
                assert load.kv_tokens >= 0
                assert load.prefill_backlog_s(self.now_s) >= 0
                assert load.with_objective == sum(booking.slo_tpot_s is not None for booking in load.streaming)

    def load(self, worker: str, rank: int = 0) -> int:
        return self.planner.fleet.workers[worker].loads[rank].requests

    def answer(self, worker: str, n_streams: int, kv_tokens: int, *, slo_tpot_s: float | None = None) -> None:
        """So many answers begin to run there, of so many KV tokens each."""
        load = self.planner.fleet.workers[worker].loads[0]
        for _ in range(n_streams):
            Booking(load, 0.0, kv_tokens, self.now_s, answer=Answer(256), slo_tpot_s=slo_tpot_s).first_token(self.now_s)

    def loads(self) -> dict[str, int]:
        """Booked requests by worker."""
        return {
            worker.name: sum(load.requests for load in worker.loads.values())
            for worker in self.planner.fleet.workers.values()
        }


def fleet(*workers: W, policy: str = "warmroute", pd_policy: str = "local", peers: bool = True, seed: int = 1) -> Rig:
    index = PrefixIndex()
    planner = Planner(Fleet(), index, policy=policy, pd_policy=pd_policy, peers=peers)
    rig = Rig(planner, index, random.Random(seed))
    for w in workers:
        add(rig, w)
    return rig


def add(rig: Rig, w: W) -> None:
    fleet_ = rig.planner.fleet
    worker = fleet_.apply(
        WorkerChange(kind=ChangeKind.ADDED, worker=w.name, url=f"http://{w.name}", role=w.role, weight=w.weight)
    )
    assert worker is not None
    if w.asked:
        fleet_.set_capabilities(
            w.name, models=w.models, adapters=w.adapters, ranks=range(w.ranks), max_model_len=w.max_model_len
        )
    if w.scraped:
        fleet_.set_stats(
            w.name,
            EngineStats(
                scraped_at_s=rig.now_s,
                running=w.running,
                waiting=w.waiting,
                kv_usage=w.kv_usage,
                kv_blocks=w.kv_blocks,
                block_size=w.block_size,
                nixl_bytes=0.0 if w.nixl else None,
            ),
        )
    worker.publishes_events = w.events
    rig.planner.configure_worker(w.name)


def prompt(n_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32_000) for _ in range(n_tokens)]
