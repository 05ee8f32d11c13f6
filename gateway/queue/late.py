"""Is a request predicted to miss its time to first token, by predictions that have been right?"""

from __future__ import annotations

import random
from collections.abc import Sequence

from gateway.engine.available import Available
from gateway.queue.lane import Lane
from scorer.fleet import STALE_S, Worker
from scorer.planner import ModelNotFound, NoWorker, Planner
from scorer.types import RequestFacts


class Foresight:
    """Asks the planner what it would predict."""

    def __init__(self, planner: Planner, available: Available, rng: random.Random) -> None:
        self._planner = planner
        self._available = available
        self._rng = rng

    def late_by_s(
        self, lane: Lane, facts: RequestFacts, workers: Sequence[Worker], wait_s: float, waited_s: float, now_s: float
    ) -> float:
        """By how much the first token is predicted to come after the objective, by more than predictions are off; 0 if
        it is not, or nothing can be said: too few or too wrong samples, a worker whose figures are old. A worker with
        nothing to do takes a request whatever its objective.
        """
        if facts.slo_ttft_s is None or not lane.lateness.armed(now_s):
            return 0.0
        if any(_is_idle(worker) or _is_stale(worker, now_s) for worker in workers):
            return 0.0
        try:
            plan = self._planner.explain(facts, self._available.names(), now_s, self._rng)
        except (ModelNotFound, NoWorker):
            return 0.0
        best_s = waited_s + wait_s + min(candidate.price.ttft_s for candidate in plan.considered)
        error = lane.lateness.error(now_s) or 0.0
        return max(0.0, best_s / (1 + error) - facts.slo_ttft_s)


def _is_idle(worker: Worker) -> bool:
    stats = worker.stats
    inside = 0.0 if stats is None else (stats.running or 0.0) + (stats.waiting or 0.0)
    return not inside and not any(load.in_line or load.streams for load in worker.loads.values())


def _is_stale(worker: Worker, now_s: float) -> bool:
    return worker.stats is None or now_s - worker.stats.scraped_at_s > STALE_S
