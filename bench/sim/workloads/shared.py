"""Prompts with shared beginnings: llm-d's ladder of rates, SGLang's batch of groups, a hot prefix."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.sim.load import Ask, Stage
from bench.sim.prompts import stretch
from bench.sim.record import Record

LADDER: Sequence[tuple[float, float]] = (
    (15, 50), (3, 20), (10, 20), (15, 20), (20, 38), (25, 30), (30, 25), (40, 38), (50, 30), (60, 25),
)  # fmt: skip
"""(requests a second, seconds): the first warms up. After llm-d's 73 % benchmark, which has sixteen."""


class Ladder:
    """`groups` x `members` fixed prompts (a shared beginning and a question each), asked in turns of a random order, in
    stages: each begins when all requests of the one before have ended. Requests are named for their stage.
    """

    def __init__(
        self,
        seed: int,
        *,
        groups: int = 150,
        members: int = 5,
        shared_tokens: int = 6000,
        own_tokens: int = 1200,
        output_tokens: int = 520,
        stages: Sequence[tuple[float, float]] = LADDER,
        slo_ttft_s: float | None = None,
        slo_tpot_s: float | None = None,
    ) -> None:
        self._rng = random.Random(f"ladder {seed}")
        self._pairs = [(group, member) for group in range(groups) for member in range(members)]
        self._sizes = shared_tokens, own_tokens
        self._output_tokens = output_tokens
        self._stages = stages
        self._slo = slo_ttft_s, slo_tpot_s
        self._stage = -1
        self._left = 0
        self._asked = 0
        self._order: list[tuple[int, int]] = []

    def start(self, stage: Stage) -> None:
        self._next_stage(stage)

    def _next_stage(self, stage: Stage) -> None:
        self._stage += 1
        if self._stage >= len(self._stages):
            return
        rate, duration_s = self._stages[self._stage]
        self._left = n = max(1, round(rate * duration_s))
        name = "warm-up" if self._stage == 0 and len(self._stages) > 1 else f"{rate:g}/s"
        at_s = stage.now_s
        for _ in range(n):
            at_s += self._rng.expovariate(rate)
            if not self._order:
                self._order = self._rng.sample(self._pairs, len(self._pairs))
            group, member = self._order.pop()
            stage.submit(at_s, self._ask(group, member, name))

    def _ask(self, group: int, member: int, name: str) -> Ask:
        shared, own = self._sizes
        self._asked += 1

        def tokens() -> bytes:
            return stretch(group, shared) + stretch(1_000_000 + group * 1000 + member, own)

        out = self._output_tokens
        return Ask(tokens, out, out, *self._slo, group=name, seed=self._asked)

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        self._left -= 1
        if not self._left:
            self._next_stage(stage)


class Batch:
    """SGLang's generated shared prefixes: `groups` x `members` prompts all at once, group by group or shuffled."""

    def __init__(
        self,
        seed: int,
        *,
        shuffled: bool = False,
        groups: int = 64,
        members: int = 16,
        shared_tokens: int = 2048,
        own_tokens: int = 128,
        output_tokens: int = 256,
    ) -> None:
        pairs = [(group, member) for group in range(groups) for member in range(members)]
        if shuffled:
            random.Random(f"batch {seed}").shuffle(pairs)
        self._pairs = pairs
        self._sizes = shared_tokens, own_tokens
        self._output_tokens = output_tokens

    def start(self, stage: Stage) -> None:
        shared, own = self._sizes
        for number, (group, member) in enumerate(self._pairs):

            def tokens(group: int = group, member: int = member) -> bytes:
                return stretch(group, shared) + stretch(1_000_000 + group * 1000 + member, own)

            out = self._output_tokens
            stage.submit(0.0, Ask(tokens, out, out, seed=number))

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        pass


class Hotspot:
    """Poisson requests over `prefixes` shared beginnings: one takes `hot_share`, the others by Zipf's law (without a
    hot one, `hot_share` 0, all are equal). Every `shift_s` seconds another order of popularity begins.
    """

    def __init__(
        self,
        seed: int,
        *,
        rate: float,
        duration_s: float,
        prefixes: int = 64,
        shared_tokens: int = 4096,
        own_tokens: int = 256,
        output_tokens: int = 128,
        hot_share: float = 0.5,
        zipf: float = 1.0,
        shift_s: float | None = None,
    ) -> None:
        rng = random.Random(f"hotspot {seed}")
        self._sizes = shared_tokens, own_tokens
        self._output_tokens = output_tokens
        self._asks: list[tuple[float, int]] = []
        if hot_share:
            weights = [1 / rank**zipf for rank in range(1, prefixes)]
            rest = (1 - hot_share) / sum(weights)
            weights = [hot_share, *(weight * rest for weight in weights)]
        else:
            weights = [1.0] * prefixes
        order = rng.sample(range(prefixes), prefixes)
        at_s, shift_at_s = 0.0, shift_s
        while (at_s := at_s + rng.expovariate(rate)) < duration_s:
            if shift_at_s is not None and shift_s is not None and at_s >= shift_at_s:
                shift_at_s += shift_s
                order = rng.sample(range(prefixes), prefixes)
            self._asks.append((at_s, rng.choices(order, weights)[0]))

    def start(self, stage: Stage) -> None:
        shared, own = self._sizes
        for number, (at_s, prefix) in enumerate(self._asks):

            def tokens(number: int = number, prefix: int = prefix) -> bytes:
                return stretch(prefix, shared) + stretch(1_000_000 + number, own)

            out = self._output_tokens
            stage.submit(at_s, Ask(tokens, out, out, group=f"prefix {prefix}", seed=number))

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        pass
