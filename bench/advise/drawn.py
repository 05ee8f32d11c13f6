"""Requests made by numbers: lengths out of a histogram, beginnings in common."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from itertools import accumulate

from bench.advise.errors import InputError
from bench.sim.load import Ask, Stage
from bench.sim.prompts import unique
from bench.sim.record import Record
from bench.sim.workloads.traces import Row

_USES = 50
"""So many requests have one beginning in common; its first use is no hit, so not few."""


class Histogram:
    """Prometheus buckets: (upper bound, how many are in it alone), bounds rising, the last may be infinite. `mean` is
    exact, so draws are scaled to it. Raises InputError when there is nothing in it.
    """

    def __init__(self, buckets: Sequence[tuple[float, float]], mean: float) -> None:
        filled = [(below, upper, n) for (below, upper, n) in _edges(buckets) if n > 0]
        if not filled or mean <= 0:
            raise InputError("the servers have counted no finished request yet; send traffic first")
        self._ranges = [(below, upper) for below, upper, _ in filled]
        self._sums = list(accumulate(n for _, _, n in filled))
        middle = sum(n * _mean(below, upper) for below, upper, n in filled) / self._sums[-1]
        self._factor = mean / middle

    def draw(self, rng: random.Random) -> int:
        below, upper = self._ranges[bisect.bisect_left(self._sums, rng.random() * self._sums[-1])]
        return max(1, round(self._factor * math.exp(rng.uniform(math.log(below), math.log(upper)))))


def _edges(buckets: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Evenly on a logarithmic scale within a bucket; the open one reaches to twice its lower bound."""
    found, below = [], 1.0
    for upper, n in buckets:
        end = 2 * below if math.isinf(upper) else max(upper, below)
        found.append((below, end, n))
        below = end
    return found


def _mean(below: float, upper: float) -> float:
    return below if upper <= below else (upper - below) / math.log(upper / below)


class Drawn:
    """Each prompt begins with `shared` of itself taken from its group's text; each group has some _USES prompts."""

    def __init__(
        self, rows: Sequence[Row], shared: float, seed: int, faster: float, slo_ttft_s: float, slo_tpot_s: float
    ) -> None:
        rng = random.Random(f"drawn {seed}")
        groups = max(1, len(rows) // _USES)
        self._rows = [(row, rng.randrange(groups)) for row in rows]
        self._groups = groups
        self._shared, self._faster = shared, faster
        self._slo = slo_ttft_s, slo_tpot_s

    def start(self, stage: Stage) -> None:
        for number, (row, group) in enumerate(self._rows):
            stage.submit(row.at_s / self._faster, self._ask(number, row, group))

    def _ask(self, number: int, row: Row, group: int) -> Ask:
        common = int(self._shared * row.input_tokens)

        def tokens() -> bytes:
            return unique(group, common) + unique(self._groups + number, row.input_tokens - common)

        return Ask(tokens, row.output_tokens, None, *self._slo, seed=number)

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        pass
