"""llm-d's router (v0.10): its scorers, its prefix-based P/D decider and its prefix-cache-affinity filter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from bench.sim.arms.choosing import Cached, Chooser, Ruled, lowest
from bench.sim.router import Factory, Setup, SimRequest, WorkerView
from scorer.cost import Constants, CostModel

PEAK_PROMPT_TOKENS = 8192
"""`peakPrefillThroughput` is measured with one prompt of a chunk."""
STICKY_S = 18.0
"""`maxTTFTPenaltyMs` as shipped."""


def queue_scores(queues: Sequence[float]) -> list[float]:
    """`queue-scorer`: relative to the longest and the shortest queue, so that 0 against 1 counts like 0 against 100."""
    low, high = min(queues), max(queues)
    return [1.0] * len(queues) if low == high else [(high - queue) / (high - low) for queue in queues]


def is_remote(prompt_tokens: int, cached_tokens: int, *, least_fresh_tokens: int, least_prompt_tokens: int = 0) -> bool:
    """`prefix-based-pd-decider`. `least_fresh_tokens` of 0 turns it off."""
    if not least_fresh_tokens or prompt_tokens < max(least_prompt_tokens, least_fresh_tokens):
        return False
    return prompt_tokens - cached_tokens >= least_fresh_tokens


def sticky(
    hit_shares: Sequence[float], in_flight_tokens: Sequence[float], *, saturated_tokens: float, least_share: float = 0.8
) -> list[int]:
    """`prefix-cache-affinity-filter`: the positions to choose among. Those that hold `least_share` of the prompt,
    unless nobody does or the least loaded of them is `saturated_tokens` busier than the least loaded of the others.
    """
    everybody = list(range(len(hit_shares)))
    warm = [i for i in everybody if hit_shares[i] >= least_share]
    cold = [i for i in everybody if hit_shares[i] < least_share]
    if not warm:
        return everybody
    if cold and min(in_flight_tokens[i] for i in warm) - min(in_flight_tokens[i] for i in cold) > saturated_tokens:
        return everybody
    return warm


def weighted(prefix: float, queue: float, kv: float) -> Chooser:
    """precise-prefix-cache, queue and kv-cache-utilization scorers with these weights.

    Queues are those booked at this very moment rather than scraped ones: fresher than llm-d's own 50 ms.
    """

    def choose(request: SimRequest, workers: Sequence[WorkerView], cached: Cached, rng: random.Random) -> WorkerView:
        queues = queue_scores([len(worker.booked.prefills) for worker in workers])
        scores = []
        for worker, queue_score in zip(workers, queues, strict=True):
            blocks = request.prompt_tokens // worker.block_size
            share = cached.get(worker.name, 0) // worker.block_size / blocks if blocks else 0.0
            usage = 0.0 if worker.stats is None else worker.stats.kv_usage or 0.0
            scores.append(prefix * share + queue * queue_score + kv * (1.0 - usage))
        return lowest(workers, [-score for score in scores], rng)

    return choose


def sticky_until_saturated(constants: Constants) -> Chooser:
    """The affinity filter, then `token-load-scorer` with look-ahead: uncached tokens in flight, this prompt's too."""
    peak = PEAK_PROMPT_TOKENS / CostModel(constants).comp_s(PEAK_PROMPT_TOKENS, 0)

    def choose(request: SimRequest, workers: Sequence[WorkerView], cached: Cached, rng: random.Random) -> WorkerView:
        n = max(1, request.prompt_tokens)
        held = [cached.get(worker.name, 0) for worker in workers]
        load = [worker.booked.uncached_tokens / worker.weight for worker in workers]
        kept = sticky([tokens / n for tokens in held], load, saturated_tokens=peak * STICKY_S)
        return lowest([workers[i] for i in kept], [load[i] + n - held[i] for i in kept], rng)

    return choose


def _threshold(tokens: int) -> Callable[[int, int], bool]:
    return lambda prompt, cached: is_remote(prompt, cached, least_fresh_tokens=tokens)


def _sticky(setup: Setup) -> Ruled:
    return Ruled("sticky", sticky_until_saturated(setup.constants))


ARMS: dict[str, Factory] = {
    "llm-d-111": lambda setup: Ruled("llm-d-111", weighted(1, 1, 1)),
    "llm-d-322": lambda setup: Ruled("llm-d-322", weighted(3, 2, 2)),
    "sticky": _sticky,
    "threshold-16": lambda setup: Ruled("threshold-16", weighted(3, 2, 2), _threshold(16)),
    "threshold-1024": lambda setup: Ruled("threshold-1024", weighted(3, 2, 2), _threshold(1024)),
}
