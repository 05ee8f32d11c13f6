"""Several replicas of the router behind a balancer that knows nothing, as one arm of a simulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from bench.scale.exchange import Exchange, Settings
from bench.sim.arms.basic import PlannerRouter
from bench.sim.clock import Clock
from bench.sim.router import Placement, Setup, SimRequest, View
from scorer.fleet import Fleet
from scorer.types import ChangeKind, EngineStats, Outcome, OutcomeKind, WorkerChange

Balance = Callable[[random.Random, int, int], int]
"""(chance, requests so far, replicas) -> the replica that gets the next one."""

BALANCES: dict[str, Balance] = {
    "random": lambda rng, n_so_far, n: rng.randrange(n),
    "turns": lambda rng, n_so_far, n: n_so_far % n,
}
_OVER = {OutcomeKind.END, OutcomeKind.ERROR, OutcomeKind.CANCELLED}


class Replicas:
    """A `bench.sim.router.Router`: `n` planners, each with a fleet, bookings and learned factors of its own. The index
    is one, as all hear the same events. `exchange`: how they tell each other of their load; None: they do not.

    The world is to scrape `n` times as often as one replica does: each scrape of a worker goes to another replica.
    """

    clairvoyant = False
    own_books = True

    def __init__(
        self, setup: Setup, n: int, *, name: str, exchange: Settings | None, balance: str = "random", seed: int = 0
    ) -> None:
        self.name = name
        self.replicas = [PlannerRouter(replace(setup, fleet=_same_workers(setup.fleet))) for _ in range(n)]
        self.clock = Clock()
        """Of the exchange: behind the world's until somebody asks, never before it."""
        self.exchange: Exchange | None = None
        if exchange is not None:
            self.exchange = Exchange(exchange, self.clock, random.Random(f"exchange {seed}"))
            self.exchange.join([replica.planner for replica in self.replicas])
        self._balance = BALANCES[balance]
        self._rng = random.Random(f"balance {seed}")
        self._placed = 0
        self._owners: dict[str, PlannerRouter] = {}
        self._scrapes: dict[str, int] = {}

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        self.pass_time(now_s)
        replica = self.replicas[self._balance(self._rng, self._placed, len(self.replicas))]
        self._placed += 1
        self._owners[request.request_id] = replica
        return replica.place(request, view, now_s, rng)

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        self.pass_time(now_s)
        replica = self._owners.pop(request_id) if outcome.kind in _OVER else self._owners[request_id]
        replica.observe(request_id, outcome, now_s)

    def scraped(self, worker: str, stats: EngineStats) -> None:
        self.pass_time(stats.scraped_at_s)
        number = self._scrapes.get(worker)
        self._scrapes[worker] = 0 if number is None else number + 1
        hearing = self.replicas if number is None else [self.replicas[number % len(self.replicas)]]
        for replica in hearing:  # All know an engine's settings from the beginning.
            replica.planner.fleet.set_stats(worker, stats)
            replica.scraped(worker, stats)

    def restarted(self, worker: str) -> None:
        for replica in self.replicas:
            replica.restarted(worker)

    def pass_time(self, now_s: float) -> None:
        """Messages come and go until `now_s`. Nothing else changes what replicas know between two calls, so they may be
        carried when the next one comes.
        """
        self.clock.run(now_s)
        self.clock.now_s = now_s


def _same_workers(fleet: Fleet) -> Fleet:
    out = Fleet()
    for worker in fleet.workers.values():
        change = WorkerChange(kind=ChangeKind.ADDED, worker=worker.name, role=worker.role, weight=worker.weight)
        out.apply(change)
        out.set_capabilities(worker.name, models=worker.models or (), max_model_len=worker.max_model_len)
        out.workers[worker.name].publishes_events = worker.publishes_events
    return out
