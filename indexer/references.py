"""Who was given prompts with images, audio or video in them: known by reference, as their KV blocks cannot be.

An engine hashes the content of a media item into its blocks' keys, and how many tokens it takes is the model's
business: neither is known to who never fetches it. So a prompt is a chain of *links* here, one for each media item and
each message from the first item on: a hash of all there is up to that point (text, and what the client wrote in place
of content), with an estimate of its length in tokens. Whoever was given a chain is assumed to hold it, until an
answer's `cached_tokens` says otherwise; what answers have said is told apart from what is only assumed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from indexer.match import Holder

Link = tuple[int, int]
"""(hash of the prompt up to here, estimated tokens of it)"""


class Recalled(msgspec.Struct, frozen=True, gc=False):
    """Of the longest part of a chain that a holder was given: `assumed_tokens` may be cached there; `confirmed_tokens`
    an answer has said were.
    """

    assumed_tokens: int = 0
    confirmed_tokens: int = 0


class _Seen:
    __slots__ = ("at_s", "computed", "confirmed", "life", "tokens")

    def __init__(self, tokens: int, at_s: float, life: int) -> None:
        self.tokens = tokens
        self.at_s = at_s
        self.life = life
        self.computed = False
        """Before, whoever comes finds nothing cached, which says nothing."""
        self.confirmed: int | None = None

    def recalled(self) -> Recalled:
        if self.confirmed is None:
            return Recalled(self.tokens, 0)
        if 2 * self.confirmed < self.tokens:  # It was evicted, or nothing is cached there at all.
            return Recalled(self.confirmed, self.confirmed)
        return Recalled(max(self.tokens, self.confirmed), self.confirmed)


class MediaReferences:
    """At most `most` pairs of link and holder, the least recently given first to go; each for `ttl_s`. Times are
    monotonic seconds given by the caller. Not thread-safe. Raises ValueError for bounds that are not positive.
    """

    def __init__(self, *, ttl_s: float = 600.0, most: int = 1 << 16) -> None:
        if ttl_s <= 0 or most <= 0:
            raise ValueError("ttl_s and most must be positive")
        self._ttl_s = ttl_s
        self._most = most
        self._seen: OrderedDict[tuple[int, Holder], _Seen] = OrderedDict()
        self._holders: dict[int, dict[Holder, None]] = {}
        self._lives: dict[Holder, int] = {}
        self._n_lives = 0

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, links: Sequence[Link], now_s: float) -> dict[Holder, Recalled]:
        """What each holder was given of the chain; those with nothing are left out."""
        out: dict[Holder, Recalled] = {}
        for key, _ in reversed(links):
            for holder in self._holders.get(key, ()):
                if holder not in out and (seen := self._live(key, holder, now_s)) is not None:
                    out[holder] = seen.recalled()
        return out

    def assume(self, links: Sequence[Link], holder: Holder, now_s: float) -> int:
        """It is given the chain. How many of its links it had computed before."""
        life = self._lives.get(holder)
        if life is None:
            self._n_lives += 1
            life = self._lives[holder] = self._n_lives
        known = 0
        for i, (key, tokens) in enumerate(links, 1):
            before = self._live(key, holder, now_s)
            if before is not None:
                known = i if before.computed else known
                before.at_s, before.tokens = now_s, tokens
                self._seen.move_to_end((key, holder))
                continue
            self._seen[key, holder] = _Seen(tokens, now_s, life)
            self._holders.setdefault(key, {})[holder] = None
        while len(self._seen) > self._most:
            self._drop(*next(iter(self._seen)))
        return known

    def computed(self, links: Sequence[Link], holder: Holder) -> None:
        """The chain's KV is there now."""
        for key, _ in links:
            seen = self._seen.get((key, holder))
            if seen is not None:
                seen.computed = True

    def confirm(self, links: Sequence[Link], holder: Holder, known: int, cached_tokens: int) -> None:
        """The engine found so many tokens of the chain cached, of which it had computed `known` links before: they lie
        within the last of those. Without one, that says nothing of the chain.
        """
        for key, _ in links[known - 1 :] if known else ():
            seen = self._seen.get((key, holder))
            if seen is not None:
                seen.confirmed = cached_tokens

    def retract(self, links: Sequence[Link], holder: Holder, assumed_at_s: float) -> None:
        """What was assumed then did not come about: those links that nothing else speaks for are forgotten."""
        for key, _ in links:
            seen = self._seen.get((key, holder))
            if seen is not None and not seen.computed and seen.at_s == assumed_at_s:
                self._drop(key, holder)

    def clear(self, worker: str, rank: int | None = None) -> None:
        """Its cache is gone."""
        for holder in [held for held in self._lives if held[0] == worker and rank in (None, held[1])]:
            del self._lives[holder]

    def _live(self, key: int, holder: Holder, now_s: float) -> _Seen | None:
        seen = self._seen.get((key, holder))
        if seen is None or now_s >= seen.at_s + self._ttl_s or seen.life != self._lives.get(holder):
            return None
        return seen

    def _drop(self, key: int, holder: Holder) -> None:
        if self._seen.pop((key, holder), None) is None:
            return
        holders = self._holders[key]
        del holders[holder]
        if not holders:
            del self._holders[key]
