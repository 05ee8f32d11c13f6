"""Picking a worker, and arms made of a way to pick and a rule: what most of the published routers consist of."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from bench.sim.router import Arm, Placement, SimRequest, View, WorkerView

Cached = Mapping[str, int]
"""Worker -> prompt tokens it holds; workers that hold none are left out."""
Chooser = Callable[[SimRequest, Sequence[WorkerView], Cached, random.Random], WorkerView]
Rule = Callable[[int, int], bool]
"""(prompt tokens, tokens cached on the decode worker) -> whether a prefill worker is to compute the prompt."""


def lowest(workers: Sequence[WorkerView], costs: Sequence[float], rng: random.Random) -> WorkerView:
    """The cheapest worker; among equals any."""
    best = min(costs)
    equal = [worker for worker, cost in zip(workers, costs, strict=True) if cost == best]
    return equal[0] if len(equal) == 1 else rng.choice(equal)


def by_load(request: SimRequest, workers: Sequence[WorkerView], cached: Cached, rng: random.Random) -> WorkerView:
    """The fewest requests in flight."""
    return lowest(workers, [worker.booked.requests for worker in workers], rng)


def by_prefix(request: SimRequest, workers: Sequence[WorkerView], cached: Cached, rng: random.Random) -> WorkerView:
    """The most cached tokens whatever the load; among equals the least loaded."""
    most = max(cached.get(worker.name, 0) for worker in workers)
    return by_load(request, [worker for worker in workers if cached.get(worker.name, 0) == most], cached, rng)


def by_fresh_tokens(
    request: SimRequest, workers: Sequence[WorkerView], cached: Cached, rng: random.Random
) -> WorkerView:
    """The fewest prompt tokens to compute before the first token: those booked and what of this prompt is not held."""
    fresh = [worker.booked.uncached_tokens + request.prompt_tokens - cached.get(worker.name, 0) for worker in workers]
    return lowest(workers, fresh, rng)


def at_random(request: SimRequest, workers: Sequence[WorkerView], cached: Cached, rng: random.Random) -> WorkerView:
    return rng.choice(workers)


class Ruled(Arm):
    """Decode first: `choose` picks the decode worker, then `rule` decides whether a prefill worker, picked by
    `choose_prefill`, computes the prompt for it.
    """

    def __init__(
        self, name: str, choose: Chooser, rule: Rule | None = None, choose_prefill: Chooser = by_fresh_tokens
    ) -> None:
        self.name = name
        self._choose = choose
        self._rule = rule
        self._choose_prefill = choose_prefill

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        cached = view.cached_tokens(request)
        decode = self._choose(request, view.decoders, cached, rng)
        held = cached.get(decode.name, 0)
        if self._rule is None or not view.prefillers or not self._rule(request.prompt_tokens, held):
            return Placement(decode.name, cached_tokens=held)
        prefill = self._choose_prefill(request, view.prefillers, cached, rng)
        return Placement(decode.name, prefill.name, held, cached.get(prefill.name, 0))
