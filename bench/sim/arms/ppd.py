"""PPD (arXiv 2603.13358): later turns that append little are prefilled where they decode, others if the relative gain
in TTFT outweighs the relative loss in TPOT.

The paper looks both up in a table profiled at the present request rate. Here the cost priors stand for the table: a
server busy with prefills for a share of its time answers and decodes slower by 1 / (1 - share).
"""

from __future__ import annotations

import random
from collections import deque

from bench.sim.arms.choosing import by_fresh_tokens, by_prefix
from bench.sim.router import Arm, Factory, Placement, Setup, SimRequest, View, WorkerView
from scorer.cost import CostModel

BYPASS_TOKENS = 512
BUSIEST = 0.95
WINDOW_S = 60.0


def prefers_local(
    ttft_remote_s: float,
    ttft_local_s: float,
    tpot_remote_s: float,
    tpot_local_s: float,
    *,
    ttft_weight: float = 1.0,
    tpot_weight: float = 1.0,
) -> bool:
    """The decision engine's score: relative gain in TTFT against relative loss in TPOT, both of the local way."""
    gain = (ttft_remote_s - ttft_local_s) / ttft_remote_s if ttft_remote_s > 0 else 0.0
    loss = (tpot_local_s - tpot_remote_s) / tpot_remote_s if tpot_remote_s > 0 else 0.0
    return ttft_weight * gain > tpot_weight * loss


class Ppd(Arm):
    """A session stays with the decode worker that holds most of it; its first turn goes through a prefill worker."""

    name = "ppd"

    def __init__(self, setup: Setup) -> None:
        self._cost = CostModel(setup.constants)
        self._later: deque[float] = deque()
        """When later turns arrived lately."""

    def place(self, request: SimRequest, view: View, now_s: float, rng: random.Random) -> Placement:
        cached = view.cached_tokens(request)
        decode = by_prefix(request, view.decoders, cached, rng)
        held = cached.get(decode.name, 0)
        local = Placement(decode.name, cached_tokens=held)
        if not view.prefillers:
            return local
        prefill = by_fresh_tokens(request, view.prefillers, cached, rng)
        held_there = cached.get(prefill.name, 0)
        if request.turn:
            self._later.append(now_s)
            while self._later[0] < now_s - WINDOW_S:
                self._later.popleft()
            if request.prompt_tokens - held < BYPASS_TOKENS:
                return local
            rate = len(self._later) / min(WINDOW_S, max(now_s, 1.0))
            if self._local(request, view, decode, held, held_there, rate):
                return local
        return Placement(decode.name, prefill.name, held, held_there)

    def _local(
        self, request: SimRequest, view: View, decode: WorkerView, held: int, held_there: int, rate: float
    ) -> bool:
        c, n = self._cost.constants, request.prompt_tokens
        here_s = self._cost.comp_s(n, held, decode.weight)
        there_s = self._cost.comp_s(n, held_there)
        busy_here = min(BUSIEST, rate * here_s / len(view.decoders))
        busy_there = min(BUSIEST, rate * there_s / len(view.prefillers))
        front_s = self._cost.front_s(n)
        pull_s = c.pull_base_s + c.pull_per_block_s * -(-(n - held) // decode.block_size)
        step_s = self._cost.step_s(len(decode.booked.streams) + 1, decode.booked.kv_tokens + n, decode.weight)
        return prefers_local(
            2 * front_s + there_s / (1 - busy_there) + c.hop_s + pull_s + step_s,
            front_s + here_s / (1 - busy_here),
            step_s,
            step_s / (1 - busy_here),
        )


ARMS: dict[str, Factory] = {"ppd": Ppd}
