"""Responses that an engine goes on computing after their request was answered (`"background": true`).

They stay at work in the books of their key until they are known to be over, and are counted by what they say then. The
worker that has one is asked for it now and then, sooner when somebody reads or cancels it through us.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal
from urllib.parse import quote

import msgspec
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.auth.door import Visit
from gateway.proxy.errors import log_unexpected
from gateway.proxy.peer import UpstreamError
from gateway.proxy.upstream import UpstreamPool
from gateway.proxy.usage import UsageTail

_log = logging.getLogger(__name__)
Outcome = Literal["finished", "lost", "over_time", "unfollowed"]

_FIRST_S = 1.0
_LONGEST_WAIT_S = 15.0
_SLOWER = 1.5
_LEAST_S = 0.5
"""Between two questions about one response, however often it is read."""
_TIMEOUT_S = 10.0
_LOST_AFTER_S = 60.0
"""A worker that says nothing for so long has lost what it had."""
_MOST = 4096
"""Followed at once; one more is counted at once, by what was reserved for it."""
_LARGEST_BYTES = 4 << 20
"""A longer answer is not read, and says nothing of the end."""
_UNREADABLE = b"{"
_RUNS = frozenset({"queued", "in_progress"})


class _Said(msgspec.Struct):
    status: str | None = None


_decoder = msgspec.json.Decoder(_Said)


class Running:
    """A response that has begun. `is_alone`: not so once another one has the same id, which a client may choose: what
    is said of that says nothing of this one.
    """

    __slots__ = ("is_alone", "response_id", "touched")

    def __init__(self, response_id: str, *, is_alone: bool) -> None:
        self.response_id = response_id
        self.is_alone = is_alone
        self.touched = asyncio.Event()


class Background:
    """`longest_s`: one that has not ended by then counts as over."""

    def __init__(self, upstreams: UpstreamPool, registry: CollectorRegistry, *, longest_s: float) -> None:
        self._upstreams = upstreams
        self._longest_s = longest_s
        self._by_id: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = Gauge(
            "warmroute_background_responses",
            "Responses at work in engines in the background, in the books of their keys.",
            registry=registry,
        )
        self._ended = Counter(
            "warmroute_background_responses_ended",
            "Those that left the books: finished as their worker says, lost by it, after the longest time, or never "
            "followed as there were too many.",
            ("outcome",),
            registry=registry,
        )

    def __len__(self) -> int:
        return len(self._tasks)

    def begun(self, response_id: str) -> Running:
        """To be followed, or `over`."""
        other = self._by_id.get(response_id)
        running = Running(response_id, is_alone=other is None)
        if other is None:
            self._by_id[response_id] = running
        else:
            other.is_alone = False
        return running

    def over(self, running: Running) -> None:
        if self._by_id.get(running.response_id) is running:
            del self._by_id[running.response_id]

    def follow(self, running: Running, visit: Visit, worker: str, headers: CIMultiDict[str]) -> None:
        """Takes over the visit of a response that goes on at `worker`. `headers`: of its request, as engines see
        them.
        """
        if len(self._tasks) >= _MOST:
            self.over(running)
            self._leave(visit, "unfollowed")
            return
        mine = CIMultiDict((name, value) for name, value in headers.items() if name.lower() == "authorization")
        task = asyncio.get_running_loop().create_task(
            self._follow(running, visit, worker, mine), name="background response"
        )
        self._tasks.add(task)
        self._running.set(len(self._tasks))
        task.add_done_callback(self._done)

    def touched(self, response_id: str) -> None:
        """Somebody reads or cancels it."""
        if (running := self._by_id.get(response_id)) is not None:
            running.touched.set()

    async def close(self) -> None:
        """Whatever still runs counts by what was reserved."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running.set(len(self._tasks))
        if not task.cancelled() and (exc := task.exception()) is not None:
            log_unexpected(_log, "unexpected; a response in the background counts as over", exc)

    def _leave(self, visit: Visit, outcome: Outcome) -> None:
        visit.used(None, None)
        visit.leave()
        self._ended.labels(outcome).inc()

    async def _follow(self, running: Running, visit: Visit, worker: str, headers: CIMultiDict[str]) -> None:
        outcome: Outcome = "lost"
        try:
            outcome = await self._until_over(running, visit, worker, headers)
        finally:
            self.over(running)
            self._leave(visit, outcome)

    async def _until_over(self, running: Running, visit: Visit, worker: str, headers: CIMultiDict[str]) -> Outcome:
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        end_s = heard_s + self._longest_s
        wait_s = _FIRST_S
        while True:
            if await _touched(running, min(wait_s, end_s - loop.time())):
                wait_s = _FIRST_S
            body = await self._ask(running.response_id, worker, headers) if running.is_alone else None
            if running.is_alone:
                if body is not None:
                    heard_s = loop.time()
                if body == b"" or loop.time() - heard_s >= _LOST_AFTER_S:
                    return "lost"
                if body is not None and _is_over(body):
                    _count(visit, body)
                    return "finished"
            if loop.time() >= end_s:
                return "over_time"
            wait_s = min(wait_s * _SLOWER, _LONGEST_WAIT_S)

    async def _ask(self, response_id: str, worker: str, headers: CIMultiDict[str]) -> bytes | None:
        """What the worker says of it; nothing: it has no such response. None: nothing was learned."""
        upstream = self._upstreams.get(worker)
        if upstream is None:
            return None
        target = "/v1/responses/" + quote(response_id, safe="")
        upstream.acquire()
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                await upstream.send("GET", target, headers.copy(), b"") as answer,
            ):
                body = await answer.read(_LARGEST_BYTES)
        except (UpstreamError, OSError):
            return None
        finally:
            self._upstreams.release(upstream)
        if answer.status == 200:
            return body or _UNREADABLE
        return b"" if answer.status == 404 else None


def _count(visit: Visit, body: bytes) -> None:
    tail = UsageTail()
    tail.feed(body)
    usage = tail.read()
    if usage is not None:
        visit.used(usage.prompt_tokens, usage.output_tokens or 0)


def _is_over(body: bytes) -> bool:
    try:
        status = _decoder.decode(body).status
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return status is not None and status not in _RUNS


async def _touched(running: Running, wait_s: float) -> bool:
    """Wait for that, or so long; in any case for a moment."""
    await asyncio.sleep(min(_LEAST_S, max(0.0, wait_s)))
    try:
        async with asyncio.timeout(max(0.0, wait_s - _LEAST_S)):
            await running.touched.wait()
    except TimeoutError:
        return False
    running.touched.clear()
    return True
