"""The index, fed with a real engine's events, says what the engine's own prefix cache says.

Before each request the index is asked how many of its prompt tokens the engine holds; the engine then reports, in
`usage.prompt_tokens_details.cached_tokens`, how many it did not have to compute. Requests go one after the other and
the events of each are in before the next, so the two must be equal, not close. An engine computes at least one prompt
token and shares whole blocks only, hence `(n - 1) // BLOCK_TOKENS * BLOCK_TOKENS` as the upper end.

One difference is the engine's: a reset of its cache is announced with its next request only. See the reset tests.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import BLOCK_TOKENS, VllmServer
from event_tap import DEADLINE_S, EventTap

from indexer import PrefixIndex, decode_batch
from indexer.events import AllBlocksCleared, BlockRemoved, BlockStored

SEED = 20
REQUESTS = 60
# Ordinary ids: the first ones are special tokens, the last one is 2047.
TOKEN_IDS = range(300, 2000)


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    model: str = "tiny"
    lora: str | None = None
    cache_salt: str | None = None

    def extended(self, more: tuple[int, ...]) -> "Prompt":
        return Prompt(self.tokens + more, self.model, self.lora, self.cache_salt)


@dataclass
class Follower:
    """One engine, a tap on its events and an index that is fed from the tap alone."""

    server: VllmServer
    tap: EventTap
    index: PrefixIndex
    applied: int = 0
    seen: Counter[type] = field(default_factory=Counter)
    prompts: list[Prompt] = field(default_factory=list)

    def follow(self) -> None:
        """Bring the index up to all that the engine has published."""
        self.tap.settle()
        for sequence, payload in self.tap.batches[self.applied :]:
            self._apply(sequence, payload)
            self.applied += 1

    def _apply(self, sequence: int, payload: bytes) -> None:
        batch = decode_batch(payload)
        assert not batch.malformed, f"sequence {sequence}: {batch.malformed} malformed events"
        assert not batch.unknown, f"sequence {sequence}: {batch.unknown}"
        for kind in (BlockStored, BlockRemoved, AllBlocksCleared):
            self.seen[kind] += sum(isinstance(event, kind) for event in batch.events)
        self.index.apply(self.server.worker, 0, batch)

    def join(self, rng: random.Random) -> None:
        """Wait until the subscription is in force, then learn from a replay what was published before."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not self.tap.joined:
            assert time.monotonic() < deadline_s, "no event arrives"
            send(self.server, Prompt(random_tokens(rng, BLOCK_TOKENS + 1)))
            self.tap.poll(0.5)
        first = self.tap.batches[0][0]
        for sequence, payload in self.tap.replay(0):
            if sequence < first:
                self._apply(sequence, payload)
        self.follow()

    def ask(self, prompt: Prompt, max_tokens: int = 1) -> "Outcome":
        """Predict, send, compare, and take in the events that the request made."""
        expected = expected_cached_tokens(self.index, self.server.worker, prompt)
        answer = send(self.server, prompt, max_tokens)
        self.prompts.append(prompt)
        self.follow()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Outcome(prompt, expected, cached, tuple(answer["choices"][0]["token_ids"]))


@dataclass(frozen=True)
class Outcome:
    prompt: Prompt
    expected_tokens: int
    cached_tokens: int
    generated: tuple[int, ...]


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(TOKEN_IDS, k=count))


def send(server: VllmServer, prompt: Prompt, max_tokens: int = 1) -> Any:
    body: dict[str, Any] = {
        "model": prompt.lora or prompt.model,
        "prompt": prompt.tokens,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if prompt.cache_salt is not None:
        body["cache_salt"] = prompt.cache_salt
    response = server.post("/v1/completions", body)
    assert response.status == 200, response.body
    return response.body


def held_tokens(index: PrefixIndex, worker: str, prompt: Prompt) -> int:
    found = index.match(prompt.tokens, model=prompt.model, lora=prompt.lora, cache_salt=prompt.cache_salt)
    return found[worker, 0].gpu_tokens if (worker, 0) in found else 0


def expected_cached_tokens(index: PrefixIndex, worker: str, prompt: Prompt) -> int:
    return min(held_tokens(index, worker, prompt), (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


def new_index(server: VllmServer) -> PrefixIndex:
    index = PrefixIndex()
    index.set_worker(server.worker, models=server.served_names, loras=server.loras)
    return index


def next_prompt(rng: random.Random, prefixes: list[tuple[int, ...]], past: list[Outcome]) -> Prompt:
    """Something a router sees: a shared prefix with a new end, the same again, the next turn of a conversation."""
    kind = rng.random()
    if past and kind < 0.15:
        return rng.choice(past).prompt
    if past and kind < 0.35:
        turn = rng.choice(past[-8:])
        prompt = turn.prompt.extended(turn.generated + random_tokens(rng, rng.randint(1, 60)))
        if len(prompt.tokens) < 1800:
            return prompt
    if kind < 0.4:
        return Prompt(random_tokens(rng, rng.randint(1, BLOCK_TOKENS)))
    prefix = rng.choice(prefixes)
    # Cut anywhere, and at block boundaries more often than chance has it.
    cut = rng.choice(
        (len(prefix), rng.randint(1, len(prefix)), rng.randint(1, len(prefix) // BLOCK_TOKENS) * BLOCK_TOKENS)
    )
    tokens = prefix[:cut] + random_tokens(rng, rng.choice((0, 0, 1, BLOCK_TOKENS, rng.randint(2, 200))))
    return Prompt(
        tokens,
        model=rng.choice(("tiny", "tiny", "tiny-alias")),
        lora=rng.choice((None, None, None, "l1")),
        cache_salt=rng.choice((None, None, None, "tenant-a", "tenant-b")),
    )


@pytest.fixture(scope="module")
def follower(engine: VllmServer) -> Iterator[Follower]:
    with EventTap(engine.events_endpoint, engine.replay_endpoint) as tap:
        follower = Follower(engine, tap, new_index(engine))
        follower.join(random.Random(SEED))
        yield follower


def assert_all_equal(outcomes: list[Outcome]) -> None:
    wrong = [
        f"request {number}: {len(o.prompt.tokens)} tokens, {o.prompt.model}, lora {o.prompt.lora}, "
        f"salt {o.prompt.cache_salt}: index {o.expected_tokens}, engine {o.cached_tokens}"
        for number, o in enumerate(outcomes)
        if o.expected_tokens != o.cached_tokens
    ]
    assert not wrong, "\n".join(wrong)


def test_match_equals_the_engines_cached_tokens(follower: Follower) -> None:
    rng = random.Random(SEED)
    prefixes = [
        random_tokens(rng, blocks * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)) for blocks in (3, 7, 12, 18, 25)
    ]
    before = follower.seen.copy()
    outcomes: list[Outcome] = []
    for _ in range(REQUESTS):
        outcomes.append(follower.ask(next_prompt(rng, prefixes, outcomes), max_tokens=rng.choice((1, 1, 8, 70))))
    assert_all_equal(outcomes)
    # The run has to have met what it is about.
    hits = [o for o in outcomes if o.cached_tokens]
    assert len(hits) > REQUESTS // 5
    assert any(o.prompt.lora for o in hits)
    assert any(o.prompt.cache_salt for o in hits)
    assert any(o.prompt.model == "tiny-alias" for o in hits)
    during = follower.seen - before
    assert during[BlockStored] > 20
    assert during[BlockRemoved] > 20


def test_namespaces_do_not_share_blocks(follower: Follower) -> None:
    """The same tokens under the base model, an adapter and two salts are four prefixes; an alias is the base model."""
    tokens = random_tokens(random.Random(SEED + 1), 5 * BLOCK_TOKENS + 3)
    first = [
        Prompt(tokens),
        Prompt(tokens, lora="l1"),
        Prompt(tokens, cache_salt="tenant-a"),
        Prompt(tokens, cache_salt="tenant-b"),
        Prompt(tokens, lora="l1", cache_salt="tenant-a"),
    ]
    cold = [follower.ask(prompt) for prompt in first]
    warm = [follower.ask(prompt) for prompt in (*first, Prompt(tokens, model="tiny-alias"))]
    assert_all_equal(cold + warm)
    assert [o.cached_tokens for o in cold] == [0] * len(cold)
    assert [o.cached_tokens for o in warm] == [5 * BLOCK_TOKENS] * len(warm)


def test_recomputed_last_block_is_a_second_copy(follower: Follower) -> None:
    """A repeated prompt of whole blocks has its last one computed and stored again; one removal leaves the others."""
    rng = random.Random(SEED + 2)
    tokens = random_tokens(rng, 4 * BLOCK_TOKENS)
    outcomes = [follower.ask(Prompt(tokens))]
    stored = follower.seen[BlockStored]
    outcomes += [follower.ask(Prompt(tokens)) for _ in range(2)]
    assert [o.cached_tokens for o in outcomes] == [0, 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS]
    assert follower.seen[BlockStored] == stored + 2
    longer = Prompt(tokens).extended(random_tokens(rng, 1))
    fill = follower.server.num_blocks // 4
    # Its first copy is used in every round and stays; the others age and are evicted.
    for _ in range(5):
        outcomes += [follower.ask(longer), follower.ask(Prompt(random_tokens(rng, fill * BLOCK_TOKENS)))]
    assert outcomes[-2].cached_tokens == 4 * BLOCK_TOKENS
    # Then all of it.
    outcomes += [follower.ask(Prompt(random_tokens(rng, fill * BLOCK_TOKENS))) for _ in range(4)]
    outcomes.append(follower.ask(longer))
    assert outcomes[-1].cached_tokens == 0
    assert_all_equal(outcomes)


def test_reset_by_others_shows_with_the_next_request(follower: Follower) -> None:
    """A reset that went around us: the index is wrong for exactly one request, whose events then carry the reset."""
    prompt = Prompt(random_tokens(random.Random(SEED + 3), 6 * BLOCK_TOKENS + 5))
    follower.ask(prompt)
    assert follower.ask(prompt).cached_tokens == 6 * BLOCK_TOKENS
    cleared = follower.seen[AllBlocksCleared]
    assert follower.server.post("/reset_prefix_cache").status == 200
    follower.follow()
    assert follower.seen[AllBlocksCleared] == cleared, (
        "the engine now announces a reset at once: tell the index's users"
    )
    unaware = follower.ask(prompt)
    assert (unaware.expected_tokens, unaware.cached_tokens) == (6 * BLOCK_TOKENS, 0)
    assert follower.seen[AllBlocksCleared] == cleared + 1
    others = [o for o in follower.prompts if o != prompt][-10:]
    assert_all_equal([follower.ask(prompt), *(follower.ask(other) for other in others)])


def test_reset_through_us_is_right_at_once(follower: Follower) -> None:
    """Clearing the index together with the engine: the late announcement must not take away what was stored since."""
    prompt = Prompt(random_tokens(random.Random(SEED + 4), 6 * BLOCK_TOKENS + 5))
    follower.ask(prompt)
    assert follower.server.post("/reset_prefix_cache").status == 200
    follower.index.clear(follower.server.worker)
    outcomes = [follower.ask(prompt), follower.ask(prompt)]
    assert_all_equal(outcomes)
    assert [o.cached_tokens for o in outcomes] == [0, 6 * BLOCK_TOKENS]


def test_replay_rebuilds_the_same_index(follower: Follower) -> None:
    """An index made from the replay socket alone matches the one that was there all along, for every prompt so far."""
    follower.follow()
    live_sequences = [sequence for sequence, _ in follower.tap.batches]
    assert live_sequences == list(range(live_sequences[0], live_sequences[-1] + 1)), "live frames are missing"
    replayed = follower.tap.published(0)
    assert [sequence for sequence, _ in replayed] == list(range(len(replayed)))
    assert dict(follower.tap.batches).items() <= dict(replayed).items(), "replay and live frames differ"
    rebuilt = new_index(follower.server)
    for _, payload in replayed:
        rebuilt.apply(follower.server.worker, 0, decode_batch(payload))
    asked = [*follower.prompts, Prompt(random_tokens(random.Random(SEED), 100))]
    worker = follower.server.worker
    live = [held_tokens(follower.index, worker, prompt) for prompt in asked]
    assert [held_tokens(rebuilt, worker, prompt) for prompt in asked] == live
    assert any(live)


def test_replay_from_the_middle_and_past_the_end(follower: Follower) -> None:
    follower.follow()
    replayed = follower.tap.published(0)
    last = replayed[-1][0]
    assert follower.tap.replay(last) == replayed[-1:]
    assert follower.tap.replay(last - 4) == replayed[-5:]
    assert follower.tap.replay(last + 1000) == []
