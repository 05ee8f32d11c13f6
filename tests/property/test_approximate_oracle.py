"""The approximate index against a naive LRU list per holder."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from indexer import ApproximateIndex, Match, Prompt
from tests.support import IN_CI

SIZE = 2
TTL_S = 50.0
SEEDED_LOOPS = 3000 if IN_CI else 300


class NaiveHolder:
    """Paths with the time of their last use, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: list[tuple[tuple[int, ...], float]] = []

    def expire(self, now_s: float) -> None:
        self.used = [(path, at) for path, at in self.used if at + TTL_S > now_s]

    def assume(self, tokens: list[int], now_s: float) -> None:
        self.expire(now_s)
        for path in reversed(paths(tokens)):
            self.used = [entry for entry in self.used if entry[0] != path] + [(path, now_s)]
        self.used = self.used[max(0, len(self.used) - self.capacity) :]

    def depth(self, tokens: list[int], now_s: float, known_tokens: int = 0) -> int:
        """`known_tokens` are held anyway."""
        self.expire(now_s)
        held = {path for path, _ in self.used}
        n = known_tokens // SIZE
        for path in paths(tokens)[n:]:
            if path not in held:
                break
            n += 1
        return n * SIZE


def paths(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]


def run(rng: random.Random, steps: int) -> None:
    capacities = {("a", 0): rng.randint(1, 12), ("b", 0): rng.randint(1, 12)}
    capacities["b", 1] = capacities["b", 0]
    index = ApproximateIndex(ttl_s=TTL_S, block_size=SIZE)
    for (worker, _), capacity in capacities.items():
        index.set_worker(worker, capacity_blocks=capacity)
    naive = {holder: NaiveHolder(capacity) for holder, capacity in capacities.items()}
    prompts = [[rng.randrange(2) for _ in range(rng.randint(0, 14))] for _ in range(5)]
    now_s = 0.0
    for _ in range(steps):
        now_s += rng.choice([0.0, 1.0, 20.0])
        holder = rng.choice(list(naive))
        tokens = rng.choice(prompts)
        action = rng.random()
        if action < 0.6:
            index.assume(*holder, Prompt(tokens), now_s)
            naive[holder].assume(tokens, now_s)
        elif action < 0.65:
            index.clear(*holder)
            naive[holder].used.clear()
        elif action < 0.7:
            # what a request brought and nothing else speaks for goes with it
            naive[holder].expire(now_s)
            had = [path for path, _ in naive[holder].used]
            keys = index.assume(*holder, Prompt(tokens), now_s)
            naive[holder].assume(tokens, now_s)
            index.retract(*holder, keys, now_s)
            kept = {path for path in paths(tokens) if path in had}
            naive[holder].used = [(p, at) for p, at in naive[holder].used if p in kept or p not in paths(tokens)]
        expected = {name: depth for name, each in naive.items() if (depth := each.depth(tokens, now_s))}
        found = index.match(tokens, now_s=now_s)
        assert {name: match.gpu_tokens for name, match in found.items()} == expected
        assert all(match.approximate for match in found.values())
        reach = {name: SIZE * rng.randint(0, len(tokens) // SIZE) for name in naive}
        known = {name: Match(n, 0, 0, n) for name, n in reach.items() if n}
        beyond = {name: match.reach_tokens for name, match in index.beyond(Prompt(tokens), known, now_s=now_s).items()}
        assert beyond == {
            name: n for name, each in naive.items() if (n := each.depth(tokens, now_s, reach[name])) > reach[name]
        }
    for worker in ("a", "b"):
        index.remove_worker(worker)
    assert index.stats()["assumed_blocks"] == {}
    assert not any(index._plane.masks)


@given(st.randoms(use_true_random=False))
def test_assumed_holders_answer_like_a_list(rng: random.Random) -> None:
    run(rng, 20)


def test_assumed_holders_answer_like_a_list_seeded() -> None:
    for seed in range(SEEDED_LOOPS):
        run(random.Random(seed), 40)
