"""What replicas tell each other through Redis, in simulated time: the turns of gateway/replicas around the classes that
serve (`Journal`, `Elsewhere`, `Holdings.assume_elsewhere`, sessions). Redis itself is a delay here.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

import msgspec

from bench.sim.clock import Clock
from indexer import Holder
from scorer.elsewhere import Elsewhere
from scorer.holdings import Assumed
from scorer.journal import Arrival, Journal, SessionAt
from scorer.ledger import NOTHING, InFlight
from scorer.planner import Planner

WHOLES_IN_TTL = 3
"""So many times all is told before others give a replica up; it is read twice as often."""
NOT_READ_AGAIN_S = 0.1
MOST_ARRIVALS = 16_384


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`interval_s` and `ttl_s` are `redis.interval_ms` and `redis.ttl_s`. A message takes `delay_s` from its writer to
    a reader that waits for it; each reader misses the share `loss` of them.
    """

    interval_s: float = 0.02
    ttl_s: float = 3.0
    delay_s: float = 0.002
    loss: float = 0.0


class News(msgspec.Struct, frozen=True):
    """One message: what has changed at its writer."""

    number: int
    loads: Mapping[Holder, InFlight]
    arrivals: list[Arrival]
    over: Mapping[int, bool]
    sessions: list[SessionAt]
    after: int
    """The number of its news before."""


class Exchange:
    """Between planners of one fleet. Chance comes from `rng`."""

    def __init__(self, settings: Settings, clock: Clock, rng: random.Random) -> None:
        self.settings = settings
        self.clock = clock
        self.rng = rng
        self.members: list[Member] = []
        self.wholes: dict[str, tuple[int, Mapping[Holder, InFlight]]] = {}
        """What each has in flight, as it said last."""
        self.sent = self.lost = 0
        """Messages written, and how often one did not reach a reader."""

    def join(self, planners: list[Planner]) -> None:
        """All of them; each at another point of its turn."""
        every_s = self.settings.ttl_s / WHOLES_IN_TTL
        for i, planner in enumerate(planners):
            self.members.append(Member(str(i), planner, self, every_s * i / len(planners)))

    def publish(self, writer: Member, news: News) -> None:
        self.sent += 1
        for reader in self.members:
            if reader is not writer:
                if self.is_lost():
                    self.lost += 1
                else:
                    self.clock.after(self.settings.delay_s, partial(reader.reach, writer.name, news))

    def store(self, writer: Member, number: int, loads: Mapping[Holder, InFlight]) -> None:
        def written() -> None:
            self.wholes[writer.name] = number, loads

        self.clock.after(self.settings.delay_s, written)

    def is_lost(self) -> bool:
        return bool(self.settings.loss) and self.rng.random() < self.settings.loss


class Member:
    """One replica: tells as gateway/replicas/publisher.py does, hears as reader.py does."""

    def __init__(self, name: str, planner: Planner, exchange: Exchange, phase_s: float) -> None:
        self.name = name
        self.elsewhere = Elsewhere(planner.fleet)
        self.journal = Journal(self._wake)
        planner.tell(self.journal)
        self._planner = planner
        self._exchange = exchange
        self._clock = exchange.clock
        self._settings = exchange.settings
        self._every_s = exchange.settings.ttl_s / WHOLES_IN_TTL
        self._number = self._news_number = 0
        self._is_woken = False
        self._told_s = self._heard_s = 0.0
        """Until then it rests from having told and heard."""
        self._whole_at_s = self._read_at_s = phase_s
        self._inbox: list[tuple[str, News]] = []
        self._is_reading = False
        self._arrivals: OrderedDict[tuple[str, int], Assumed] = OrderedDict()
        self._clock.at(phase_s, self._tell)
        self._clock.at(phase_s, self._read_wholes)

    # ---- telling -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._clock.at(max(self._clock.now_s, self._told_s), self._tell)

    def _tell(self) -> None:
        now_s = self._clock.now_s
        if now_s < self._told_s:  # All of it is due while it rests.
            self._clock.at(self._told_s, self._tell)
            return
        self._is_woken = False
        told = self.journal.take()
        if told:
            self._number += 1
            loads = {holder: self._own(holder, now_s) for holder in told.loads}
            sessions = list(told.sessions.values())
            news = News(self._number, loads, told.arrivals, told.over, sessions, self._news_number)
            self._news_number = self._number
            self._exchange.publish(self, news)
        if now_s >= self._whole_at_s:
            self._number += 1
            self._exchange.store(self, self._number, self._all(now_s))
            self._whole_at_s = now_s + self._every_s
            self._clock.at(self._whole_at_s, self._tell)
        self._told_s = now_s + self._settings.delay_s + self._settings.interval_s

    def _own(self, holder: Holder, now_s: float) -> InFlight:
        worker = self._planner.fleet.workers.get(holder[0])
        load = None if worker is None else worker.loads.get(holder[1])
        return NOTHING if load is None else load.own(now_s)

    def _all(self, now_s: float) -> Mapping[Holder, InFlight]:
        return {
            (worker.name, rank): load.own(now_s)
            for worker in self._planner.fleet.workers.values()
            for rank, load in worker.loads.items()
            if load.prefills or load.streaming
        }

    # ---- hearing -----------------------------------------------------------------------------------------------------

    def reach(self, writer: str, news: News) -> None:
        self._inbox.append((writer, news))
        if not self._is_reading:
            self._is_reading = True
            self._clock.at(max(self._clock.now_s, self._heard_s), self._read)

    def _read(self) -> None:
        self._is_reading = False
        inbox, self._inbox = self._inbox, []
        for writer, news in inbox:
            self._take(writer, news)
        self._heard_s = self._clock.now_s + self._settings.interval_s / 2

    def _read_wholes(self) -> None:
        now_s = self._clock.now_s
        if now_s < self._read_at_s:  # It was read meanwhile, after a gap.
            return
        for writer, (number, loads) in self._exchange.wholes.items():
            if writer != self.name and not self._exchange.is_lost():
                self.elsewhere.whole(writer, number, loads, now_s)
        self.elsewhere.expire(now_s, self._settings.ttl_s)
        self.elsewhere.refold(now_s)
        self._read_at_s = now_s + self._every_s / 2
        self._clock.at(self._read_at_s, self._read_wholes)

    def _take(self, writer: str, news: News) -> None:
        now_s, holdings = self._clock.now_s, self._planner.holdings
        if not self.elsewhere.news(writer, news.number, news.loads, now_s, news.after):
            soon_s = now_s + NOT_READ_AGAIN_S
            if soon_s < self._read_at_s:
                self._read_at_s = soon_s
                self._clock.at(soon_s, self._read_wholes)
        for each in news.arrivals:
            worker = self._planner.fleet.workers.get(each.holder[0])
            if worker is not None:
                assumed = holdings.assume_elsewhere(worker, each.holder, each.keys, now_s)
                self._arrivals[writer, each.number] = assumed
                if len(self._arrivals) > MOST_ARRIVALS:
                    self._arrivals.popitem(last=False)
        for number, prefilled in news.over.items():
            gone = self._arrivals.pop((writer, number), None)
            if gone is not None:
                holdings.release(gone, prefilled, now_s)
        for at in news.sessions:
            self._planner.session_elsewhere(at, now_s)
