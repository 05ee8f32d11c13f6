"""When a request may be planned: at once while a worker that could serve it has room, else in its turn.

The planner still decides where, and it decides then, not on arrival. One request is let go at a time, and the next
is looked at once that one is booked, so that a freed place is given once. Nothing depends on being told that there is
room: while anybody waits, everything is looked at anew each `_LOOK_S`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping

from gateway.config.schema import QueueConfig
from gateway.debug.metrics import Metrics
from gateway.engine.available import Available
from gateway.proxy.access import Record
from gateway.proxy.flight import Flight
from gateway.queue import shed
from gateway.queue.evictable import USUAL_PRIORITY, Evictable, Evictables
from gateway.queue.lane import Lane, Waiting
from gateway.queue.late import Foresight
from gateway.queue.shed import HEADER, Shed
from scorer.fleet import Worker
from scorer.planner import Planner
from scorer.queue import AGEING, Entry
from scorer.saturation import Saturation
from scorer.types import RequestFacts

_LOOK_S = 0.02
_EVICT_AGAIN_S = 0.1
"""After a look that found nobody whose going helps, which costs more than others."""
_MOST_LANES = 256
_ASKS = "late"


class Queue:
    """Of one gateway, a lane for each model. `by_tenant`: there are several tenants, and none may fill it alone."""

    def __init__(
        self,
        settings: QueueConfig,
        planner: Planner,
        available: Available,
        metrics: Metrics,
        rng: random.Random,
        *,
        by_tenant: bool = False,
    ) -> None:
        self.settings = settings
        self.lanes: dict[str, Lane] = {}
        self.closed = False
        self.n_waiting = 0
        self.saturation = Saturation(settings.waiting_per_worker)
        self._planner = planner
        self._available = available
        self._metrics = metrics
        self.evictables = Evictables()
        self._foresight = Foresight(planner, available, rng)
        self._by_tenant = by_tenant
        self._leaving: Waiting | None = None
        """Let go, and not booked yet."""
        self._looks = False
        self._let_go_so_far = 0
        self._evicts_again_s = 0.0
        self._by_age: str | None = None
        """Who was let go last, if that was for having waited longest; others of higher priority wait."""
        self._taken_for: Lane | None = None
        """A place was taken back for its first, and has not been given yet."""
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, settings: QueueConfig) -> None:
        """Go by other bounds from now on; `waiting_per_worker` stays as it was."""
        self.settings = settings
        if self.n_waiting:
            self._look_soon()

    # ---- for requests ------------------------------------------------------------------------------------------------

    async def enter(
        self,
        facts: RequestFacts,
        headers: Mapping[str, str],
        record: Record,
        *,
        sheddable: bool = False,
        within: frozenset[str] | None = None,
    ) -> float | None:
        """Returns when the request may be planned, which must be done before anything is awaited. How long it was
        thought to wait, in seconds (None: that could not be told); how long it did is in the record. One that is
        `sheddable` does not wait. `within`: it will be planned on these workers only. Raises Shed.
        """
        settings = self.settings
        # Who has chosen the worker has a queue of its own.
        if not settings.enabled or facts.subset is not None or facts.rank is not None:
            return 0.0
        now_s = time.monotonic()
        late = facts.slo_ttft_s is not None and (
            settings.shed_late == "objective" or (settings.shed_late == "asked" and headers.get(HEADER) == _ASKS)
        )
        if not self._is_contended(facts.model) and self._has_room(facts.model, now_s):
            if late and (lane := self.lanes.get(facts.model)) is not None:
                self._refuse_late(lane, facts, 0.0, 0.0, now_s)
            return 0.0
        if next(self._usable(facts.model), None) is None:
            return 0.0  # The planner says why.
        if sheddable:
            raise self._shed(self._lane(facts.model), shed.SATURATED, now_s)
        entry = self._entry(self._lane(facts.model), facts, within, now_s)
        return await self._wait(entry, facts, record, now_s, late=late)

    def sent(self, facts: RequestFacts, evictable: Evictable) -> bool:
        """The request was booked. Whether it may be taken back, until `evictables.remove`. Who has got its place by its
        age keeps it, or it would starve after all.
        """
        settings = self.settings
        may_go = settings.enabled and settings.evict_after_s is not None and facts.priority > USUAL_PRIORITY
        if may_go and facts.request_id != self._by_age:
            self.evictables.add(evictable)
            return True
        return False

    def ended(self, flight: Flight | None, wait_s: float | None, record: Record) -> None:
        """A request is over and its booking, if it came to one, given back. `wait_s` is what `enter` returned."""
        if self.n_waiting:
            self._look_soon()
        ttft_ms = record.ttft_ms
        if flight is None or wait_s is None or ttft_ms is None or record.retries:
            return
        predicted_s = wait_s + flight.plan.chosen.price.ttft_s
        self._lane(flight.facts.model).lateness.note(predicted_s, ttft_ms / 1000, time.monotonic())

    async def _wait(
        self, entry: Waiting, facts: RequestFacts, record: Record, now_s: float, *, late: bool
    ) -> float | None:
        lane = entry.lane
        expected_s = lane.wait_s(lane.queue.ahead(entry.priority, entry.tenant), now_s)
        if late and expected_s is not None:
            self._refuse_late(lane, facts, expected_s, 0.0, now_s)
        self._make_room(lane, entry, now_s)
        if not lane:
            lane.leaving.begin(now_s)
        lane.queue.add(entry)
        lane.held += 1
        self.n_waiting += 1
        self._look_soon()
        try:
            await entry.future
        finally:
            if lane.queue.remove(entry):  # The client left.
                self.n_waiting -= 1
            elif self._leaving is entry:
                self._leaving = None
                self._by_age = facts.request_id if entry.by_age else None
                self._look_soon()  # Not before this task has booked, and waits for something else.
            waited_s = time.monotonic() - now_s
            record.queued_ms = round(waited_s * 1000, 3)
            self._metrics.queue_wait.observe(waited_s)
        if late:
            self._refuse_late(lane, facts, 0.0, waited_s, now_s + waited_s)
        return expected_s

    def _entry(self, lane: Lane, facts: RequestFacts, within: frozenset[str] | None, now_s: float) -> Waiting:
        within_s = self.settings.max_wait_s
        answer_tokens = self._planner.cost.output_tokens(facts.max_output_tokens) * facts.n_sequences
        entry = Waiting(
            since_s=now_s,
            deadline_s=now_s + (within_s if facts.slo_ttft_s is None else min(within_s, facts.slo_ttft_s)),
            priority=facts.priority,
            tenant=facts.tenant or "",
            tokens=facts.prompt_tokens,
            cost=facts.prompt_tokens + answer_tokens,
        )
        entry.lane = lane
        entry.by_age = False
        entry.within = within
        entry.future = asyncio.get_running_loop().create_future()
        return entry

    def _make_room(self, lane: Lane, entry: Waiting, now_s: float) -> None:
        """Raises Shed, unless somebody of lower priority can go instead."""
        settings, queue = self.settings, lane.queue
        if self.closed:
            raise self._shed(lane, shed.DRAINING, now_s)
        n, tokens = queue.of_tenant(entry.tenant)
        share = settings.tenant_share if self._by_tenant else 1.0
        most, most_tokens = settings.max_requests * share, settings.max_tokens * share
        if share < 1 and (n + 1 > max(1, most) or (n and tokens + entry.tokens > most_tokens)):
            raise self._shed(lane, shed.TENANT_FULL, now_s)
        while len(queue) + 1 > settings.max_requests or (queue and queue.tokens + entry.tokens > settings.max_tokens):
            other = queue.displaced_by(entry.priority)
            if not isinstance(other, Waiting):
                raise self._shed(lane, shed.QUEUE_FULL, now_s)
            self._turn_away(other, shed.QUEUE_FULL, now_s)

    def _refuse_late(self, lane: Lane, facts: RequestFacts, wait_s: float, waited_s: float, now_s: float) -> None:
        over_s = self._foresight.late_by_s(lane, facts, list(self._usable(facts.model)), wait_s, waited_s, now_s)
        if over_s > 0:
            raise self._shed(lane, shed.LATE, now_s, over_s)

    # ---- what happens around it --------------------------------------------------------------------------------------

    def scraped(self, worker: Worker) -> None:
        """Its figures are new."""
        self.saturation.read(worker)
        if self.n_waiting:
            self._look_soon()

    def forget(self, worker: str) -> None:
        self.saturation.forget(worker)

    def close(self) -> None:
        """Whoever waits is told that we are going down."""
        self.closed = True
        now_s = time.monotonic()
        for lane in self.lanes.values():
            for entry in list(lane.queue):
                if isinstance(entry, Waiting):
                    self._turn_away(entry, shed.DRAINING, now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- letting go --------------------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Let go of the next, if there is room for it."""
        self._looks = False
        if self.n_waiting and self._timer is None and not self.closed:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)
        if self._leaving is not None:
            return
        now_s = time.monotonic()
        self._turn_away_old(now_s)
        for lane in self._in_turn():
            workers = list(self._usable(lane.model))
            if not workers or self.saturation.has_place(workers, now_s):
                self._let_go(lane, now_s)
                break
            if self._evict_for(lane, workers, now_s):
                break  # The place may be there at once, and is this lane's at the next look.

    def _in_turn(self) -> list[Lane]:
        """Lanes may have workers in common (adapters): by priority, but in each `AGEING`-th turn by age."""
        if self._taken_for is not None and not self._taken_for.queue:
            self._taken_for = None
        by_age = self._turn_is_by_age()
        rows = [
            (by_age and lane is not self._taken_for, 0 if by_age else head.priority, oldest.since_s, name)
            for name, lane in self.lanes.items()
            if (head := self._next(lane)) is not None and (oldest := lane.queue.oldest()) is not None
        ]
        return [self.lanes[name] for *_, name in sorted(rows)]

    def _turn_is_by_age(self) -> bool:
        return self._let_go_so_far % AGEING == AGEING - 1

    def _next(self, lane: Lane) -> Entry | None:
        """A place that was taken back by priority is given by priority."""
        return lane.queue.first() if lane is self._taken_for else lane.queue.head()

    def _look_again(self) -> None:
        self._timer = None
        self._look_soon()

    def _let_go(self, lane: Lane, now_s: float) -> None:
        was_taken = lane is self._taken_for
        entry = lane.queue.pop(by_priority=was_taken)
        if isinstance(entry, Waiting):
            self.n_waiting -= 1
            self._let_go_so_far += not (was_taken and self._turn_is_by_age())
            self._taken_for = None if was_taken else self._taken_for
            lane.leaving.note(now_s)
            if not entry.future.done():
                self._leaving = entry
                entry.by_age = any(
                    (first := each.queue.first()) and first.priority < entry.priority for each in self.lanes.values()
                )
                entry.future.set_result(None)

    def _evict_for(self, lane: Lane, workers: list[Worker], now_s: float) -> bool:
        """If the first of the lane has waited long enough, take its place from others; at most once until they have
        left, since what an engine says lags behind. Whether one of them goes.
        """
        after_s, first, evictables = self.settings.evict_after_s, lane.queue.first(), self.evictables
        if (
            after_s is None
            or not isinstance(first, Waiting)
            or not evictables
            or evictables.going
            or now_s < self._evicts_again_s
        ):
            return False
        if now_s - first.since_s < min(after_s, (first.deadline_s - first.since_s) / 2):
            return False
        goes = False
        chosen = evictables.chosen(
            first.priority,
            [worker.name for worker in workers if first.within is None or worker.name in first.within],
            lambda name, n: self.saturation.has_place(workers, now_s, {name: n}),
        )
        for evictable in chosen:
            evictable.record.cut = shed.EVICTED  # Before it is over, and its line written.
            if evictable.take_back(Shed(shed.EVICTED, self._retry_after_s(lane, now_s))):
                lane.sheds[shed.EVICTED] += 1
                self._metrics.rejected(shed.EVICTED)
                evictables.told(evictable)
                self._taken_for, goes = lane, True
            else:
                evictable.record.cut = None
                evictables.remove(evictable)
        if chosen:
            self._look_soon()
        else:
            self._evicts_again_s = now_s + _EVICT_AGAIN_S
        return goes

    def _turn_away_old(self, now_s: float) -> None:
        before_s = now_s - self.settings.max_wait_s
        for lane in self.lanes.values():
            while (oldest := lane.queue.oldest()) is not None and oldest.since_s <= before_s:
                if isinstance(oldest, Waiting):
                    self._turn_away(oldest, shed.TIMEOUT, now_s)

    def _turn_away(self, entry: Waiting, reason: str, now_s: float) -> None:
        if entry.lane.queue.remove(entry):
            self.n_waiting -= 1
        if not entry.future.done():
            entry.future.set_exception(self._shed(entry.lane, reason, now_s))
            entry.future.exception()  # Nobody may be left to look at it.

    def _shed(self, lane: Lane, reason: str, now_s: float, retry_after_s: float | None = None) -> Shed:
        lane.sheds[reason] += 1
        self._metrics.rejected(reason)
        if retry_after_s is None and reason != shed.DRAINING:
            retry_after_s = self._retry_after_s(lane, now_s)
        return Shed(reason, retry_after_s or 1.0)

    def _retry_after_s(self, lane: Lane, now_s: float) -> float:
        """When those who wait now will have left."""
        expected_s = lane.wait_s(len(lane), now_s)
        return self.settings.max_wait_s if expected_s is None else expected_s

    # ---- the fleet ---------------------------------------------------------------------------------------------------

    def _is_contended(self, model: str) -> bool:
        """Whether others wait for the workers of this model, or are just going there."""
        if not self.n_waiting and self._leaving is None:
            return False
        others = {name for name, lane in self.lanes.items() if lane}
        if self._leaving is not None:
            others.add(self._leaving.lane.model)
        return model in others or any(worker.serves(name) for worker in self._usable(model) for name in others)

    def _has_room(self, model: str, now_s: float) -> bool:
        is_open = self.saturation.is_open
        return any(is_open(worker, now_s) for worker in self._usable(model))

    def _usable(self, model: str) -> Iterator[Worker]:
        is_up = self._available.is_up
        for worker in self._planner.fleet.workers.values():
            # None, not asked yet, is as good as a no for the planner too.
            if worker.role.decodes and not worker.draining and worker.serves(model) and is_up(worker.name):
                yield worker

    def _lane(self, model: str) -> Lane:
        lane = self.lanes.get(model)
        if lane is None:
            if len(self.lanes) >= _MOST_LANES:
                served = self._planner.fleet.models()
                self.lanes = {name: each for name, each in self.lanes.items() if each or name in served}
            lane = self.lanes[model] = Lane(model)
        return lane
