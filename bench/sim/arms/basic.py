"""The planner that serves, and the plainest rules to hold it against."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from bench.sim.router import Arm, Factory, Placement, Router, Setup, SimRequest, View, WorkerView
from bench.sim.view import MODEL
from scorer.cost import CostModel
from scorer.planner import Planner
from scorer.types import EngineStats, Outcome, RequestFacts, TokenSource


class PlannerRouter:
    """The very `scorer.planner.Planner` the gateway serves with."""

    clairvoyant = False
    own_books = True

    def __init__(
        self, setup: Setup, *, name: str = "warmroute", policy: str = "warmroute", pd_policy: str = ""
    ) -> None:
        self.name = name
        self.planner = Planner(
            setup.fleet,
            setup.index,
            policy=policy,
            pd_policy=pd_policy or setup.pd_policy,
            cost=CostModel(setup.constants),
        )
        self._configured: set[str] = set()

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        facts = RequestFacts(
            request_id=request.request_id,
            model=MODEL,
            prompt_tokens=request.prompt_tokens,
            tokens=request.tokens,
            token_source=TokenSource.GIVEN,
            max_output_tokens=request.max_output_tokens,
            streaming=True,
            session=request.session,
            slo_ttft_s=request.slo_ttft_s,
            slo_tpot_s=request.slo_tpot_s,
        )
        available = [worker.name for worker in (*view.decoders, *view.prefillers)]
        chosen = self.planner.plan(facts, available, now_s, rng).chosen
        prefill = None if chosen.prefill is None else chosen.prefill[0]
        return Placement(chosen.decode[0], prefill, chosen.cached_tokens, chosen.prefill_cached_tokens)

    def observe(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        self.planner.observe(request_id, outcome, now_s)

    def scraped(self, worker: str, stats: EngineStats) -> None:
        if worker not in self._configured:
            self._configured.add(worker)
            self.planner.configure_worker(worker)

    def restarted(self, worker: str) -> None:
        self.planner.forget_blocks(worker)


class RoundRobin(Arm):
    """One after the other."""

    name = "round-robin"

    def __init__(self, setup: Setup) -> None:
        self._turn = 0

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        decoders = view.decoders
        self._turn += 1
        return Placement(decoders[self._turn % len(decoders)].name)


class RandomChoice(Arm):
    """Any."""

    name = "random"

    def __init__(self, setup: Setup) -> None:
        pass

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        return Placement(rng.choice(view.decoders).name)


class LeastLoad(Arm):
    """The fewest requests in flight; among equals any."""

    name = "least-load"

    def __init__(self, setup: Setup) -> None:
        pass

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        return Placement(least_loaded(view.decoders, rng).name)


def least_loaded(workers: Sequence[WorkerView], rng: random.Random) -> WorkerView:
    least = min(worker.booked.requests for worker in workers)
    return rng.choice([worker for worker in workers if worker.booked.requests == least])


def planner(name: str, *, policy: str = "warmroute", pd_policy: str = "") -> Callable[[Setup], Router]:
    """A planner with another policy, or another rule for prefill workers, than the default one."""
    return lambda setup: PlannerRouter(setup, name=name, policy=policy, pd_policy=pd_policy)


ARMS: dict[str, Factory] = {
    "warmroute": planner("warmroute"),
    "local": planner("local", pd_policy="local"),
    "always-remote": planner("always-remote", pd_policy="always-remote"),
    "round-robin": RoundRobin,
    "random": RandomChoice,
    "least-load": LeastLoad,
    "longest-prefix": planner("longest-prefix", policy="longest-prefix", pd_policy="local"),
}
