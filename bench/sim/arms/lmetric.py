"""LMetric (arXiv 2603.15202): prompt tokens to compute times batch size; the product needs no weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.sim.arms.choosing import Cached, Ruled, lowest
from bench.sim.router import Factory, SimRequest, WorkerView


def score(fresh_tokens: float, queued_tokens: float, requests: int) -> float:
    """`requests` are in flight without this one, which llm-d's scorer of that name adds so that idle is not zero."""
    return (queued_tokens + fresh_tokens) * (requests + 1)


def choose(request: SimRequest, workers: Sequence[WorkerView], cached: Cached, rng: random.Random) -> WorkerView:
    scores = [
        score(request.prompt_tokens - cached.get(worker.name, 0), worker.booked.uncached_tokens, worker.booked.requests)
        for worker in workers
    ]
    return lowest(workers, scores, rng)


ARMS: dict[str, Factory] = {"lmetric": lambda setup: Ruled("lmetric", choose)}
