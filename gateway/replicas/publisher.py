"""Tells the other replicas what this one does: changes at once and then in bundles, and now and then all of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gateway.replicas import codec
from gateway.replicas.counts import Counts
from gateway.replicas.link import Client
from gateway.replicas.schema import FIELD_NEWS, FIELD_WRITER, KEPT_TTL_S, NEWS_ENTRIES, NEWS_TTL_S, WRITERS_TTL_S, Keys
from gateway.stored import Place
from scorer.journal import Journal
from scorer.ledger import NOTHING
from scorer.planner import Planner

MOST_RESPONSES = 4_096
MOST_SESSIONS_KEPT = 4_096
WHOLES_IN_TTL = 3
"""So many times all is told before others give us up."""
_KEPT_EVERY_S = 10.0


class Publisher:
    """`send` once with a client; between two, `journal` wakes it."""

    def __init__(self, writer: str, keys: Keys, planner: Planner, counts: Counts, ttl_s: float, idle_s: float) -> None:
        """`idle_s`: how long a session may be kept without being heard of."""
        self.wanted = asyncio.Event()
        """There is something others should know soon."""
        self.journal = Journal(self.wanted.set)
        self._writer = writer
        self._keys = keys
        self._planner = planner
        self._counts = counts
        self._ttl_ms = round(1000 * ttl_s)
        self._kept_ttl_s = max(1, min(KEPT_TTL_S, round(idle_s)))
        self._whole_every_s = ttl_s / WHOLES_IN_TTL
        self._responses: dict[str, tuple[Place, str | None]] = {}
        self._number = self._news_number = 0
        self._whole_at_s = 0.0
        self._kept_at_s = 0.0
        self._kept: dict[str, bytes] = {}

    def response(self, response_id: str, place: Place, owner: str | None) -> None:
        """A stored response was made there, for its owner."""
        if len(self._responses) < MOST_RESPONSES:
            self._responses[response_id] = place, owner
            self.wanted.set()
        else:
            self._counts.left_out("responses")

    def due_in_s(self) -> float:
        """Until all has to be told again."""
        return max(0.0, self._whole_at_s - time.monotonic())

    def drop(self) -> None:
        """What could not be told goes; all is told at the next chance."""
        told = self.journal.take()
        self._counts.left_out("arrivals", len(told.arrivals))
        self._counts.left_out("sessions", len(told.sessions))
        self._counts.left_out("responses", len(self._responses))
        self._responses = {}
        self.wanted.clear()
        self._whole_at_s = 0.0
        self._kept_at_s = 0.0

    async def send(self, client: Client) -> None:
        """One bundle. Raises what the client raises; what was in it is lost then."""
        self.wanted.clear()
        now_s = time.monotonic()
        told = self.journal.take()
        self._counts.left_out("journal", self.journal.left_out)
        self.journal.left_out = 0
        responses, self._responses = self._responses, {}
        pipeline: Any = client.pipeline(transaction=False)
        loads = {holder: self._own(holder, now_s) for holder in told.loads}
        # The first, also after a failure, is said even if it is nothing: others know at once that we are there.
        if told or responses or not self._whole_at_s:
            for i, arrivals in enumerate(codec.parted(told.arrivals)):
                after = self._news_number
                self._number += 1
                self._news_number = self._number
                news = codec.News(number=self._number, after=after, arrivals=arrivals)
                if not i:
                    news = codec.News(
                        number=self._number,
                        after=after,
                        loads=loads,
                        arrivals=arrivals,
                        over=told.over,
                        sessions=list(told.sessions.values()),
                        responses=[(each, *place, owner) for each, (place, owner) in responses.items()],
                    )
                self._add(pipeline, news)
            pipeline.expire(self._keys.news, NEWS_TTL_S)
        if now_s >= self._whole_at_s:
            self._number += 1
            data = codec.whole(self._number, self._all(now_s))
            pipeline.set(self._keys.load(self._writer), data, px=self._ttl_ms)
            pipeline.sadd(self._keys.writers, self._writer)
            pipeline.expire(self._keys.writers, WRITERS_TTL_S)
            self._counts.sent(len(data))
        kept = self._to_keep(pipeline, now_s)
        answers: list[Any] = await pipeline.execute()
        if now_s >= self._whole_at_s:
            self._whole_at_s = now_s + self._whole_every_s
        self._kept.update(kept)
        for key, was_there in zip(reversed(kept), reversed(answers), strict=False):
            if not was_there:  # It was emptied, or has evicted it: next time it is written, not only kept for longer.
                del self._kept[key]
                self._kept_at_s = 0.0

    async def leave(self, client: Client) -> None:
        """Nothing is in flight here any more."""
        self._number += 1
        pipeline: Any = client.pipeline(transaction=False)
        self._add(pipeline, codec.News(number=self._number, bye=True))
        pipeline.delete(self._keys.load(self._writer))
        self._kept_at_s = 0.0
        self._to_keep(pipeline, time.monotonic())
        await pipeline.execute()

    def _add(self, pipeline: Any, news: codec.News) -> None:
        data = codec.news(news)
        pipeline.xadd(
            self._keys.news,
            {FIELD_WRITER: self._writer, FIELD_NEWS: data},
            maxlen=NEWS_ENTRIES,
            approximate=True,
        )
        self._counts.sent(len(data))

    def _to_keep(self, pipeline: Any, now_s: float) -> dict[str, bytes]:
        """What those who start later begin with, where it is due and has changed."""
        if now_s < self._kept_at_s:
            return {}
        self._kept_at_s = now_s + _KEPT_EVERY_S
        learned = self._keys.learned(self._writer)
        kept = {learned: codec.learned(self._planner.calibration.state())}
        if len(self._planner.sessions):
            recent = self._planner.sessions.recent(MOST_SESSIONS_KEPT)
            kept[self._keys.sessions(self._writer)] = codec.sessions(recent)
        for key, data in kept.items():
            ttl_s = KEPT_TTL_S if key == learned else self._kept_ttl_s
            if self._kept.get(key) == data:
                pipeline.expire(key, ttl_s)
            else:
                pipeline.set(key, data, ex=ttl_s)
                self._counts.sent(len(data))
        return kept

    def _own(self, holder: Any, now_s: float) -> Any:
        worker = self._planner.fleet.workers.get(holder[0])
        load = None if worker is None else worker.loads.get(holder[1])
        return NOTHING if load is None else load.own(now_s)

    def _all(self, now_s: float) -> codec.Loads:
        """Where there is anything."""
        return {
            (worker.name, rank): load.own(now_s)
            for worker in self._planner.fleet.workers.values()
            for rank, load in worker.loads.items()
            if load.prefills or load.streaming
        }
