"""Who holds what of a prompt: what engines' events say, and what requests under way are assumed to bring.

Blocks a request will bring are assumed on its worker for a few seconds and given up as soon as the worker's own events
speak for them, or the request fails. Where there are no events, they are all that is known, and stay.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from indexer import ApproximateIndex, Holder, Link, Match, MediaReferences, PrefixIndex, Prompt
from scorer.fleet import Worker
from scorer.journal import Journal
from scorer.ledger import Booking
from scorer.pricing import USUAL_BLOCK_SIZE
from scorer.types import RequestFacts

EVENT_GRACE_S: Final = 0.5
"""How long after a request's end its blocks stay assumed while its worker's events have not said so."""

_AT_ONCE: Final = 8
"""More than requests bring, so that all are looked at again soon; a look takes a microsecond."""


class Assumed:
    """The blocks a request is assumed (since `assumed_s`) to bring to one rank."""

    __slots__ = ("assumed_s", "holder", "keys", "worker")

    def __init__(self, worker: Worker, holder: Holder) -> None:
        self.worker = worker
        self.holder = holder
        self.keys: list[int] = []
        self.assumed_s = 0.0


class Stay(Assumed):
    """What a request has on one rank: its booking, and the blocks it is assumed to bring there."""

    __slots__ = ("booking", "known_links", "media_links", "told")

    def __init__(self, worker: Worker, holder: Holder, booking: Booking) -> None:
        super().__init__(worker, holder)
        self.booking = booking
        self.told = 0
        """Under which number other replicas were told; 0: they were not."""
        self.media_links: tuple[Link, ...] = ()
        self.known_links = 0
        """Of them, how many had been computed on this rank before."""


class Holdings:
    """`index` is the exact index, fed elsewhere."""

    def __init__(self, index: PrefixIndex, optimistic_ttl_s: float) -> None:
        self.index = index
        self.approximate = ApproximateIndex()
        """For workers without events."""
        self.optimistic = ApproximateIndex(ttl_s=optimistic_ttl_s, capacity_blocks=1 << 20)
        """For workers with events: what was just sent there and not announced yet."""
        self.media = MediaReferences()
        """Prompts with media in them, by reference."""
        self.journal: Journal | None = None
        """For other replicas, where there are any."""
        self._unannounced: deque[tuple[float, Holder, list[int], float]] = deque()

    def configure(self, worker: Worker) -> None:
        """Carry what is known of a worker (names, block size, capacity) into the indexes."""
        name, models, stats = worker.name, None if worker.models is None else list(worker.models), worker.stats
        self.index.set_worker(name, models=models, loras=worker.adapters)
        block_size = None if stats is None else stats.block_size
        capacity = None if stats is None else stats.kv_blocks
        self.approximate.set_worker(
            name, models=models, loras=worker.adapters, block_size=block_size, capacity_blocks=capacity
        )
        self.optimistic.set_worker(name, models=models, loras=worker.adapters, block_size=block_size)

    def remove(self, worker: str) -> None:
        for index in (self.index, self.approximate, self.optimistic):
            index.remove_worker(worker)
        self.media.clear(worker)

    def forget(self, worker: str, rank: int | None = None) -> None:
        """Nothing assumed there holds any longer."""
        self.approximate.clear(worker, rank)
        self.optimistic.clear(worker, rank)
        self.media.clear(worker, rank)

    def assumed_blocks(self, worker: str) -> int:
        return self.approximate.blocks(worker) + self.optimistic.blocks(worker)

    def held(self, facts: RequestFacts, prompt: Prompt, now_s: float) -> dict[Holder, Match]:
        """What each rank holds of the prompt, or is about to; those with nothing are left out."""
        held = self.index.match(prompt, model=facts.model, lora=facts.lora)
        held |= self.optimistic.beyond(prompt, held, now_s=now_s, model=facts.model, lora=facts.lora)
        for holder, match in self.approximate.match(prompt, now_s=now_s, model=facts.model, lora=facts.lora).items():
            known = held.get(holder)
            if known is None or known.reach_tokens < match.reach_tokens:
                held[holder] = match
        return held

    def with_media(
        self, facts: RequestFacts, held: dict[Holder, Match], now_s: float
    ) -> tuple[dict[Holder, Match], dict[Holder, int]]:
        """`held`, as far as that is likely with what was given to each rank by reference; and how many tokens of it are
        known to be there: by `held`, or because an answer has said so.
        """
        recalled = self.media.match(facts.media_links, now_s)
        likely = dict(held)
        known: dict[Holder, int] = {}
        for holder, media in recalled.items():
            reach_tokens = 0 if (match := held.get(holder)) is None else match.reach_tokens
            known[holder] = max(reach_tokens, media.confirmed_tokens)
            if media.assumed_tokens > reach_tokens:
                likely[holder] = Match(media.assumed_tokens, 0, 0, media.assumed_tokens, True)
        return likely, known

    def assume(self, stay: Stay, facts: RequestFacts, prompt: Prompt | None, cached_tokens: int, now_s: float) -> None:
        """The prompt's blocks will come to be where the request stays, beyond the `cached_tokens` that are there."""
        stay.assumed_s = now_s
        if facts.media_links:
            stay.media_links = facts.media_links
            stay.known_links = self.media.assume(stay.media_links, stay.holder, now_s)
        if prompt is None:
            return
        worker = stay.worker
        index, known = self.approximate, 0
        if worker.publishes_events:
            index, known = self.optimistic, cached_tokens // (worker.block_size() or USUAL_BLOCK_SIZE)
        stay.keys = index.assume(*stay.holder, prompt, now_s, model=facts.model, lora=facts.lora, first_block=known)
        if self.journal is not None and stay.keys:
            stay.told = self.journal.assumed(stay.holder, stay.keys)

    def assume_elsewhere(self, worker: Worker, holder: Holder, keys: list[int], now_s: float) -> Assumed:
        """Another replica has sent a request there, which will bring the blocks of `keys`; for `release`."""
        assumed = Assumed(worker, holder)
        assumed.keys, assumed.assumed_s = keys, now_s
        index = self.optimistic if worker.publishes_events else self.approximate
        index.assume_keys(*holder, keys, now_s)
        return assumed

    def confirm(self, stay: Stay) -> None:
        """Its prompt is computed."""
        if stay.media_links:
            self.media.computed(stay.media_links, stay.holder)
        self._settle_announced(stay)

    def _settle_announced(self, stay: Assumed) -> None:
        """Give up the assumption when the worker's events have said so themselves."""
        if stay.keys and stay.worker.publishes_events and self.index.holds(*stay.holder, stay.keys[-1]):
            self.optimistic.retract(*stay.holder, stay.keys, stay.assumed_s)
            stay.keys = []

    def leave(self, stay: Stay, prefilled: bool, now_s: float) -> None:
        """The request has left; its prompt was computed there or not."""
        if stay.media_links and not prefilled:
            self.media.retract(stay.media_links, stay.holder, stay.assumed_s)
        if stay.told and self.journal is not None:
            self.journal.left(stay.told, prefilled)
        self.release(stay, prefilled, now_s)

    def release(self, stay: Assumed, prefilled: bool, now_s: float) -> None:
        """The request of those blocks is over; its prompt was computed there or not."""
        if not stay.keys:
            return
        if not stay.worker.publishes_events:
            if not prefilled:
                self.approximate.retract(*stay.holder, stay.keys, stay.assumed_s)
            return
        self._settle_announced(stay)
        if stay.keys and prefilled:
            self._unannounced.append((now_s + EVENT_GRACE_S, stay.holder, stay.keys, stay.assumed_s))
        elif stay.keys:
            self.optimistic.retract(*stay.holder, stay.keys, stay.assumed_s)

    def settle(self, now_s: float) -> None:
        """Give up what was not announced in time, and what was; some of it at a time."""
        for _ in range(min(_AT_ONCE, len(self._unannounced))):
            until_s, holder, keys, assumed_s = self._unannounced.popleft()
            if until_s <= now_s or self.index.holds(*holder, keys[-1]):
                self.optimistic.retract(*holder, keys, assumed_s)
            else:
                self._unannounced.append((until_s, holder, keys, assumed_s))

    def correct(self, stay: Stay, facts: RequestFacts, prompt: Prompt | None, cached_tokens: int) -> None:
        """The engine found so many tokens cached: believed where its events do not tell."""
        if stay.media_links:
            self.media.confirm(stay.media_links, stay.holder, stay.known_links, cached_tokens)
        if prompt is not None and not stay.worker.publishes_events:
            self.approximate.correct(
                *stay.holder, prompt, cached_tokens, stay.assumed_s, model=facts.model, lora=facts.lora
            )
