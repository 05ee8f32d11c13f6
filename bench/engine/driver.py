"""Drives one pure engine by the event loop's clock: one timer, one step at a time, results at its end."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from bench.engine.events import Event
from bench.engine.histogram import Latencies
from bench.engine.model import Engine
from bench.engine.request import Admitted, FinishReason, Pull, Pulled, Request, StepResult, Token

# Falling this far behind the ideal clock (a busy machine) restarts it, rather than catching up in one burst.
_MAX_LAG_S: Final = 0.25


class Stream:
    """What a request has been given so far; one reader awaits `read`."""

    __slots__ = (
        "admitted",
        "cancelled",
        "first_s",
        "last_s",
        "reason",
        "request",
        "scheduled_s",
        "start_s",
        "unread",
        "waiter",
    )

    def __init__(self, request: Request, start_s: float) -> None:
        self.request = request
        self.start_s = start_s
        self.scheduled_s = start_s
        self.first_s = self.last_s = 0.0
        self.admitted: Admitted | None = None
        self.reason: FinishReason | None = None
        self.cancelled = False
        self.unread: list[int] = []
        self.waiter: asyncio.Future[None] | None = None

    async def read(self) -> list[int]:
        """Token ids since the last call, at least one; empty once the request has ended or was cancelled."""
        if not self.unread and self.reason is None and not self.cancelled:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        ids, self.unread = self.unread, []
        return ids

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Connector(Protocol):
    """What moves KV between engines."""

    def pull(self, pull: Pull) -> None:
        """Fetch KV and call `Driver.pull_done` at the end, or never."""

    def finished(self, stream: Stream, num_tokens: int) -> None:
        """A request that holds its blocks has ended with KV for `num_tokens` tokens."""

    def left(self, request_id: str) -> None:
        """A request was dropped before its end."""


class Driver:
    """Runs an engine in real time. `publish(ts, events)` is called once per step that has events."""

    def __init__(self, engine: Engine, publish: Callable[[float, list[Event]], None]) -> None:
        self.engine = engine
        self.latencies = Latencies()
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._publish = publish
        self._streams: dict[str, Stream] = {}
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._pending: StepResult | None = None
        self._due_s = 0.0
        self._paused = False
        self._loop = asyncio.get_running_loop()
        self.connector: Connector | None = None  # None: every pull works at once
        self.recompute_failed_pulls = False
        self.dead = False

    def submit(self, request: Request) -> Stream:
        """Queue a request; ValueError as from `Engine.add_request`."""
        now_s = self._loop.time()
        self.engine.add_request(request, now_s)
        stream = self._streams[request.request_id] = Stream(request, now_s)
        self._kick()
        return stream

    def cancel(self, request_id: str, reason: str = "abort") -> None:
        """The client left, or a stop string was found (`reason` "stop"): free everything at once."""
        stream = self._streams.pop(request_id, None)
        if self.engine.abort(request_id):
            self.finished[reason] += 1
            if self.connector is not None:
                self.connector.left(request_id)
        if stream is not None:
            stream.cancelled = True
            stream.wake()
        self._kick()

    def release(self, request_id: str) -> bool:
        released = self.engine.release(request_id)
        self._kick()
        return released

    def pause(self, paused: bool) -> None:
        """Freeze generation (a stalled or sleeping server); nothing is lost."""
        self._paused = paused
        if not paused and self._pending is not None and self._timer is None:
            self._timer = self._loop.call_soon(self._tick)
        elif not paused:
            self._kick()

    @property
    def paused(self) -> bool:
        return self._paused

    def close(self) -> None:
        """Stop for good; every open stream ends, and nobody is told."""
        self._paused = self.dead = True
        self.connector = None
        if self._timer is not None:
            self._timer.cancel()
        for request_id in list(self._streams):
            self.cancel(request_id)

    def _kick(self) -> None:
        """Have `_tick` called when there is something to do. Arrivals of one loop iteration share a step."""
        if self._paused or self._pending is not None:
            return
        wake_s = self.engine.next_wake_s(self._loop.time())
        if wake_s is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(wake_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._paused:
            return
        now_s = self._loop.time()
        start_s = now_s
        if self._pending is not None:
            result, self._pending = self._pending, None
            self._deliver(result, now_s)
            if now_s - self._due_s < _MAX_LAG_S:
                start_s = self._due_s  # the engine keeps its own pace, the loop's timer error does not add up
        if self.engine.next_wake_s(start_s) != start_s:
            self._kick()
            return
        result = self.engine.step(start_s)
        for admitted in result.admitted:
            stream = self._streams.get(admitted.request_id)
            if stream is not None:
                stream.admitted = admitted
                stream.scheduled_s = now_s
        for pull in result.pulls:
            if self.connector is not None:
                self.connector.pull(pull)
            else:
                self._loop.call_soon(self.pull_done, pull.request_id, Pulled(ok=True))
        if self.dead:  # of such a pull
            return
        self._pending = result
        self._due_s = start_s + result.dt_s
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def pull_done(self, request_id: str, pulled: Pulled) -> None:
        """A pull has ended; requests that are gone by now are ignored."""
        if not pulled.ok and not self.recompute_failed_pulls:
            self.cancel(request_id, "error")
            return
        self.engine.pull_done(request_id, pulled.ok, pulled.garbage)
        self._kick()

    def _deliver(self, result: StepResult, now_s: float) -> None:
        if result.events:
            self._publish(time.time(), result.events)
        for token in result.tokens:
            stream = self._streams.get(token.request_id)
            if stream is not None:
                self._hand_over(stream, token, now_s)

    def _hand_over(self, stream: Stream, token: Token, now_s: float) -> None:
        if token.position == 0:
            stream.first_s = now_s
            self.latencies.ttft.observe(now_s - stream.start_s)
        else:
            self.latencies.inter_token.observe(now_s - stream.last_s)
        stream.last_s = now_s
        stream.unread.append(token.token_id)
        if token.finish_reason is not None:
            stream.reason = token.finish_reason
            del self._streams[token.request_id]
            if stream.request.hold_blocks and self.connector is not None:
                self.connector.finished(stream, len(stream.request.prompt_token_ids) + token.position)
            self._record(stream, now_s)
        stream.wake()

    def _record(self, stream: Stream, now_s: float) -> None:
        assert stream.reason is not None  # noqa: S101 - set by the caller
        self.finished[stream.reason] += 1
        self.latencies.e2e.observe(now_s - stream.start_s)
        self.latencies.queue.observe(stream.scheduled_s - stream.start_s)
        self.latencies.prefill.observe(stream.first_s - stream.scheduled_s)
        self.latencies.decode.observe(now_s - stream.first_s)
