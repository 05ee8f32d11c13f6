"""Hears what the other replicas do: their news as they come, and all they have in flight now and then, which mends
what was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any

from gateway.replicas import codec
from gateway.replicas.counts import Counts
from gateway.replicas.link import Client
from gateway.replicas.publisher import WHOLES_IN_TTL
from gateway.replicas.schema import FIELD_NEWS, FIELD_WRITER, Keys
from gateway.stored import Place, StoredResponses
from scorer.elsewhere import Elsewhere
from scorer.holdings import Assumed
from scorer.planner import Planner

_log = logging.getLogger(__name__)
MOST_ARRIVALS = 16_384
_AT_ONCE = 64
_LONGEST_NAME = 64
_MOST_NAMES = 4_096
"""Of writers, most of which are of the last hour and gone where processes are started again and again."""
_BLOCK_S = 0.5
_PRUNE_EVERY_S = 60.0
_NOT_READ_AGAIN_S = 0.1
"""Wholes are not read more often than this, whatever gets lost."""
_OTHER_VERSION_S = 60.0
STRANGE_AFTER_S = 20.0
_STRANGER_S = 60.0
_MOST_STRANGERS = 64
_NEVER = b"0-0"


class Reader:
    """`turn` again and again with a client whose answers may take `longest_s`; `lost` when that has failed."""

    def __init__(
        self,
        writer: str,
        keys: Keys,
        planner: Planner,
        stored: StoredResponses,
        counts: Counts,
        *,
        ttl_s: float,
        op_timeout_s: float,
    ) -> None:
        self.longest_s = _BLOCK_S + op_timeout_s
        self.elsewhere = Elsewhere(planner.fleet)
        self.has_begun = False
        """Whether what others had kept has been taken over, once: as soon as there are workers it could be about."""
        self._writer = writer
        self._name = writer.encode()
        self._keys = keys
        self._planner = planner
        self._stored = stored
        self._counts = counts
        self._ttl_s = ttl_s
        self._every_s = ttl_s / WHOLES_IN_TTL
        self._after: bytes | None = None
        self._is_sure = False
        """Whether `_after` is a number of the stream there is."""
        self._whole_at_s = 0.0
        self._prune_at_s = 0.0
        self._arrivals: OrderedDict[tuple[str, int], Assumed] = OrderedDict()
        self._other_version_s: float | None = None
        self._missed = 0
        self._strangers: dict[str, tuple[float, float]] = {}
        """Workers of others that are not here: since when, and when they were last named."""

    @property
    def strangers(self) -> list[str]:
        """Names of workers that others have used for a while and that are not here: not just found earlier there."""
        now_s, here = time.monotonic(), self._planner.fleet.workers
        told = self._strangers.items()
        return sorted(
            name
            for name, (since_s, last_s) in told
            if last_s - since_s >= STRANGE_AFTER_S and now_s - last_s < _STRANGER_S and name not in here
        )

    @property
    def hears_other_version(self) -> bool:
        since_s = self._other_version_s
        return since_s is not None and time.monotonic() - since_s < _OTHER_VERSION_S

    def lost(self) -> None:
        """The server may be another one now, with other numbers in its stream."""
        self._is_sure = False
        self._whole_at_s = 0.0

    def expire(self) -> None:
        """Give up those not heard of; to be called whether or not Redis answers."""
        now_s = time.monotonic()
        for name in self.elsewhere.expire(now_s, self._ttl_s):
            _log.info("replica %s is not heard of any more; its load is taken as gone", name)
        self._counts.others.set(len(self.elsewhere.writers))

    async def turn(self, client: Client) -> None:
        """Read what there is, or wait a little for it. Raises what the client raises."""
        if not self._is_sure:
            # At first what comes from here on, as what was before is in the wholes; later what was missed, if it is
            # still the same stream.
            found: Any = await client.xrevrange(self._keys.news, count=1)
            last = found[0][0] if found else _NEVER
            if self._after is None or _order(last) < _order(self._after):
                self._after = last
            self._is_sure = True
        if time.monotonic() >= self._whole_at_s:
            await self._read_wholes(client)
        wait_s = min(_BLOCK_S, max(0.001, self._whole_at_s - time.monotonic()))
        after: Any = self._after
        found = await client.xread({self._keys.news: after}, count=_AT_ONCE, block=max(1, round(1000 * wait_s)))
        for _, entries in _items(found):
            for number, fields in entries:
                self._after = number
                name = fields.get(FIELD_WRITER) if fields else None
                if name and name != self._name and len(name) <= _LONGEST_NAME:
                    self._take(name.decode("utf-8", "replace"), fields.get(FIELD_NEWS) or b"")
                    await asyncio.sleep(0)  # Requests come first, however much there is to catch up with.

    async def _read_wholes(self, client: Client) -> None:
        ask: Any = client  # Its annotations mix what is awaited and what is not.
        members = await ask.smembers(self._keys.writers)
        names = sorted(each.decode("utf-8", "replace") for each in members if len(each) <= _LONGEST_NAME)
        others = [name for name in names if name != self._writer][:_MOST_NAMES]
        # Written and read in turns of the same length: half of one, so that nobody looks late.
        self._whole_at_s = time.monotonic() + self._every_s / 2
        if others:
            found: Any = await client.mget([self._keys.load(name) for name in others])
            now_s = time.monotonic()
            for name, data in zip(others, found, strict=True):
                if data is not None:
                    self._take_whole(name, data, now_s)
                    await asyncio.sleep(0)
            if not self.has_begun and self._planner.fleet.workers:
                await self._begin(client, others)
            if now_s >= self._prune_at_s:
                self._prune_at_s = now_s + _PRUNE_EVERY_S
                await self._prune(client, [name for name, data in zip(others, found, strict=True) if data is None])
        self.has_begun = self.has_begun or bool(self._planner.fleet.workers)
        self.elsewhere.refold(time.monotonic())
        if self.elsewhere.missed > self._missed:
            self._counts.missed.inc(self.elsewhere.missed - self._missed)
            self._missed = self.elsewhere.missed

    async def _begin(self, client: Client, others: list[str]) -> None:
        """What others have learned, and who serves which session."""
        learned: Any = await client.mget([self._keys.learned(name) for name in others])
        states = [state for data in learned if data and (state := self._read(codec.read_learned, data)) is not None]
        n_factors = self._planner.calibration.adopt(states)
        if n_factors:
            _log.info("took over %d learned factors from %d replicas", n_factors, len(states))
            for name in list(self._planner.fleet.workers):
                self._planner.configure_worker(name)
        sessions: Any = await client.mget([self._keys.sessions(name) for name in others])
        now_s = time.monotonic()
        for data in sessions:
            for at in reversed((data and self._read(codec.read_sessions, data)) or []):
                self._planner.session_elsewhere(at, now_s)

    async def _prune(self, client: Client, silent: list[str]) -> None:
        """Forget the names of those of whom nothing is left."""
        if not silent:
            return
        kept: Any = await client.mget([self._keys.learned(name) for name in silent])
        gone = [name for name, data in zip(silent, kept, strict=True) if data is None]
        if gone:
            ask: Any = client
            await ask.srem(self._keys.writers, *gone)

    def _read(self, read: Any, data: bytes) -> Any:
        try:
            return read(data)
        except codec.OtherVersion:
            self._other_version_s = time.monotonic()
            self._counts.ignored("version")
        except codec.Bad:
            self._counts.ignored("malformed")
        return None

    def _take_whole(self, name: str, data: bytes, now_s: float) -> None:
        it: tuple[int, codec.Loads] | None = self._read(codec.read_whole, data)
        if it is not None:
            self._counts.received(len(data))
            self.elsewhere.whole(name, it[0], it[1], now_s)
            self._look_for(it[1], now_s)

    def _look_for(self, loads: codec.Loads, now_s: float) -> None:
        here = self._planner.fleet.workers
        for worker in {holder[0] for holder in loads} - here.keys():
            since_s, last_s = self._strangers.pop(worker, (now_s, now_s))
            if len(self._strangers) >= _MOST_STRANGERS:
                del self._strangers[next(iter(self._strangers))]
            self._strangers[worker] = (since_s if now_s - last_s < _STRANGER_S else now_s, now_s)

    def _take(self, name: str, data: bytes) -> None:
        news: codec.News | None = self._read(codec.read_news, data)
        if news is None:
            return
        self._counts.received(len(data))
        now_s = time.monotonic()
        if news.bye:
            self.elsewhere.gone(name, now_s)
            return
        self._look_for(news.loads, now_s)
        if not self.elsewhere.news(name, news.number, news.loads, now_s, news.after):
            self._whole_at_s = min(self._whole_at_s, now_s + _NOT_READ_AGAIN_S)
        holdings, workers, unknown = self._planner.holdings, self._planner.fleet.workers, 0
        for each in news.arrivals:
            worker = workers.get(each.holder[0])
            if worker is None:
                unknown += 1
                continue
            self._arrivals[name, each.number] = holdings.assume_elsewhere(worker, each.holder, each.keys, now_s)
            if len(self._arrivals) > MOST_ARRIVALS:
                self._arrivals.popitem(last=False)
        for number, prefilled in news.over.items():
            assumed = self._arrivals.pop((name, number), None)
            if assumed is not None:
                holdings.release(assumed, prefilled, now_s)
        for at in news.sessions:
            self._planner.session_elsewhere(at, now_s)
        for response_id, worker_name, rank, owner in news.responses:
            if worker_name in workers:
                self._stored.remember_elsewhere(response_id, Place(worker_name, rank), now_s, owner)
        self._counts.ignored("workers", unknown)


def _order(number: bytes) -> tuple[int, int]:
    """Of two numbers of one stream, which comes first."""
    at_ms, _, nth = number.partition(b"-")
    return int(at_ms), int(nth or 0)


def _items(found: Any) -> Any:
    """XREAD's answer, which is a list of pairs or a mapping, by version of protocol and client."""
    return found.items() if isinstance(found, dict) else (found or ())
