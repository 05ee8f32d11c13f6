"""Bookings of requests whose responses the proxy does not show us: when they end has to be guessed.

A prefill is thought to be over when it was predicted to be. The booking is given back when the engine's own metrics
say that it has fewer requests inside than are booked there (the oldest first), at the latest after twice the time that
was predicted for the whole answer. Nothing is learned from any of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from gateway.epp.metrics import EppMetrics
from gateway.proxy import errors
from gateway.proxy.flight import Flight
from scorer.fleet import STALE_S, Worker

_log = logging.getLogger(__name__)
_LOOK_S = 0.25
_LATE = 2.0
_SLACK_S = 1.0
"""Requests booked so shortly before a reading may not have been inside yet."""
_RECENT_S = 60.0


class _Entry:
    __slots__ = ("booked_s", "ends_s", "first_s", "flight", "prefilled")

    def __init__(self, flight: Flight, longest_s: float) -> None:
        self.flight = flight
        self.booked_s = flight.plan.decided_at_s
        self.first_s = self.booked_s + flight.plan.chosen.price.ttft_s
        self.ends_s = self.booked_s + min(longest_s, _SLACK_S + _LATE * flight.expected_s())
        self.prefilled = False


class Unseen:
    """`longest_s`: no request lives longer."""

    def __init__(self, workers: Mapping[str, Worker], metrics: EppMetrics, longest_s: float) -> None:
        self._workers = workers
        self._metrics = metrics
        self._longest_s = longest_s
        self._entries: dict[str, list[_Entry]] = {}
        """By worker, the oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = -_RECENT_S

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def take(self, flight: Flight) -> None:
        flight.lost_sight()
        self._metrics.unseen.inc()
        self._last_s = time.monotonic()
        self._entries.setdefault(flight.worker, []).append(_Entry(flight, self._longest_s))
        if self._timer is None:
            self._look_later()

    @property
    def problem(self) -> str | None:
        """For people; None while all responses are seen."""
        if not self._entries and time.monotonic() - self._last_s > _RECENT_S:
            return None
        return (
            f"the proxy shows no responses (response_header_mode: SKIP): {len(self)} bookings are given back by "
            "estimate and engines' metrics; nothing is learned, and no request tells of failing endpoints"
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for entries in self._entries.values():
            for entry in entries:
                entry.flight.cancel()
        self._entries.clear()

    def look(self, now_s: float) -> None:
        """Give back what is due."""
        for name in list(self._entries):
            left = self._left(name, self._entries[name], now_s)
            if left:
                self._entries[name] = left
            else:
                del self._entries[name]
        self._metrics.unseen_booked.set(len(self))

    def _left(self, name: str, entries: list[_Entry], now_s: float) -> list[_Entry]:
        surplus = self._surplus(name, entries, now_s)
        left = []
        for i, entry in enumerate(entries):
            if i < surplus or now_s >= entry.ends_s:
                entry.flight.cancel()
                continue
            if not entry.prefilled and now_s >= entry.first_s:
                entry.prefilled = True
                entry.flight.prefilled(guessed=True)
                entry.flight.first_byte(guessed=True)
            left.append(entry)
        return left

    def _surplus(self, name: str, entries: list[_Entry], now_s: float) -> int:
        """How many of the oldest cannot be inside any more."""
        worker = self._workers.get(name)
        stats = None if worker is None else worker.stats
        if stats is None or stats.running is None or now_s - stats.scraped_at_s > STALE_S:
            return 0
        before = sum(entry.booked_s < stats.scraped_at_s - _SLACK_S for entry in entries)
        return max(0, before - int(stats.running + (stats.waiting or 0)))

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        try:
            self.look(time.monotonic())
        except Exception as exc:
            errors.log_unexpected(_log, "unexpected; going on", exc)
        if self._entries:
            self._look_later()
