"""Which rank served a session last, and what that is worth to its next request.

Where KV events tell what is cached, the price has it already, and a session only settles what is equal. Where they do
not (no events, no token ids), what the session's history is thought to save is taken off the price: that of computing
as many tokens as the worker had of it, and never more than the prompt has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Final

import msgspec

from indexer import Holder
from scorer.cost import CostModel
from scorer.journal import Journal, SessionAt
from scorer.policies import TIE_S
from scorer.pricing import Place
from scorer.types import Price, RequestFacts, SessionOutcome

MODES: Final = ("off", "prefer", "strict")
MOST_SESSIONS: Final = 65_536
_EQUAL_S: Final = 2 * TIE_S
"""Enough to settle what is equal otherwise."""


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`mode` is one of MODES. `idle_s`: a session not heard of for longer is over; `wait_s`: the longest predicted wait
    for which a strict one stays.
    """

    mode: str = "off"
    idle_s: float = 3600.0
    wait_s: float = 10.0


class _Home(msgspec.Struct, frozen=True, gc=False):
    """`generation` is the worker's; `turn` numbers the decision that made it."""

    holder: Holder
    generation: int
    tokens: int
    turn: int
    at_s: float


class Sessions:
    """At most `most`; the one not heard of for longest goes first. Session ids are kept as hashes only."""

    def __init__(self, settings: SessionSettings, cost: CostModel, *, most: int = MOST_SESSIONS) -> None:
        if settings.mode not in MODES:
            raise ValueError(f"unknown session affinity {settings.mode!r}; there are {', '.join(MODES)}")
        self._settings = settings
        self._cost = cost
        self._most = most
        self.counts = dict.fromkeys(SessionOutcome, 0)
        """Decisions about requests of sessions."""
        self._homes: OrderedDict[bytes, _Home] = OrderedDict()
        self.journal: Journal | None = None
        """For other replicas, where there are any."""
        self._emptied: dict[str, int] = {}
        """The last turn before a worker's cache was emptied."""

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def strict(self) -> bool:
        return self._settings.mode == "strict"

    def applies(self, facts: RequestFacts) -> bool:
        return facts.session is not None and self._settings.mode != "off"

    def home(self, facts: RequestFacts, places: Sequence[Place], now_s: float) -> tuple[int, int] | None:
        """(position in `places` of the rank that served the session last, tokens it had of it); None if it is none of
        them, or there is no such session.
        """
        home = self._homes.get(_key(facts))
        if home is None or now_s - home.at_s > self._settings.idle_s:
            return None
        for i, (worker, holder, _) in enumerate(places):
            if holder == home.holder and worker.generation == home.generation:
                return i, 0 if home.turn <= self._emptied.get(worker.name, -1) else home.tokens
        return None

    def is_known(self, facts: RequestFacts, now_s: float) -> bool:
        home = self._homes.get(_key(facts))
        return home is not None and now_s - home.at_s <= self._settings.idle_s

    def preferred(self, facts: RequestFacts, place: Place, price: Price, cached_tokens: int, tokens: int) -> Price:
        """The price at the session's own rank, which had `tokens` of it."""
        worker = place[0]
        saved_s = 0.0
        if facts.tokens is None or not worker.publishes_events:
            n = facts.prompt_tokens
            held = min(tokens, n)
            if held > cached_tokens:
                factors = worker.weight, worker.floor_factor, worker.work_factor
                saved_s = self._cost.comp_s(n, cached_tokens, *factors) - self._cost.comp_s(n, held, *factors)
        session_s = -max(saved_s, _EQUAL_S)
        return msgspec.structs.replace(price, session_s=session_s, total_s=price.total_s + session_s)

    def stays(self, price: Price) -> bool:
        """Whether a strict session waits for its worker."""
        return price.wait_s + price.adm_s <= self._settings.wait_s

    def served(self, facts: RequestFacts, place: Place, what: SessionOutcome, turn: int, now_s: float) -> None:
        """Its next request is worth most where this one went."""
        self.counts[what] += 1
        key = _key(facts)
        self._put(key, _Home(place[1], place[0].generation, facts.prompt_tokens, turn, now_s))
        if self.journal is not None:
            self.journal.session(SessionAt(key, place[1], facts.prompt_tokens))

    def served_elsewhere(self, at: SessionAt, generation: int, turn: int, now_s: float) -> None:
        """Another replica has served it, or freed it."""
        if at.holder is not None:
            self._put(at.key, _Home(at.holder, generation, at.tokens, turn, now_s))
        else:
            self._homes.pop(at.key, None)

    def recent(self, most: int) -> Iterator[SessionAt]:
        """Those heard of last, the latest first."""
        for key, home in islice(reversed(self._homes.items()), most):
            yield SessionAt(key, home.holder, home.tokens)

    def _put(self, key: bytes, home: _Home) -> None:
        self._homes[key] = home
        self._homes.move_to_end(key)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def failed(self, facts: RequestFacts, holder: Holder) -> None:
        """Its worker did not serve it: the session is free."""
        home = self._homes.get(_key(facts))
        if home is not None and home.holder == holder:
            del self._homes[_key(facts)]
            if self.journal is not None:
                self.journal.session(SessionAt(_key(facts), None, 0))

    def emptied(self, worker: str, turn: int) -> None:
        """The worker's cache is gone: sessions may stay, but have no history there."""
        self._emptied[worker] = turn

    def gone(self, worker: str) -> None:
        """Its sessions are free; the worker's next life has another generation."""
        self._emptied.pop(worker, None)


def session_outcome(known: bool, home: int | None, chosen: int, busy: bool) -> SessionOutcome:
    """`home` and `chosen` are positions of places; `busy`: a strict session has left for that."""
    if home is None:
        return SessionOutcome.MOVED_UNAVAILABLE if known else SessionOutcome.NEW
    if home == chosen:
        return SessionOutcome.KEPT
    return SessionOutcome.MOVED_BUSY if busy else SessionOutcome.MOVED_CHEAPER


def _key(facts: RequestFacts) -> bytes:
    """Its tenant's own: of another's sessions nobody hears, and nobody moves them. Framed by lengths."""
    digest = blake2b(digest_size=16)
    for part in (facts.tenant, facts.model, facts.session):
        raw = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update((0 if part is None else len(raw) + 1).to_bytes(8, "big") + raw)
    return digest.digest()
