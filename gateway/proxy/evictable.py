"""A request that this task has sent on, which the queue may take back until its answer begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.proxy.access import Record
from gateway.proxy.flight import Flight
from gateway.queue.evictable import Evictable
from gateway.queue.queue import Queue
from gateway.queue.shed import Shed
from scorer.types import RequestFacts


class Sent(Evictable):
    """``async with Sent(...): answer = await ...`` around the wait for the answer. Taken back, that wait is cancelled
    and ends with Shed.
    """

    def __init__(self, queue: Queue, facts: RequestFacts, record: Record, flight: Callable[[], Flight | None]) -> None:
        super().__init__(facts.priority, record, flight)
        self._queue = queue
        self._facts = facts
        self._shed: Shed | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - who awaits is in one
        self._task = task
        self._cancelling = task.cancelling()
        self._queue.sent(self._facts, self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._queue.evictables.remove(self)
        if self._shed is None or self._task.uncancel() > self._cancelling or kind is not asyncio.CancelledError:
            return
        raise self._shed from None

    def take_back(self, shed: Shed) -> bool:
        self._shed = shed
        return self._task.cancel()
