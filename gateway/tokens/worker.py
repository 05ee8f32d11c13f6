"""A few threads for CPU-bound work, with a bound on how much may wait, so that a burst sheds instead of queueing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.tokens.types import CannotTokenize, Reason

T = TypeVar("T")


class BoundedPool:
    """At most `max_jobs` jobs run or wait at any time. A job whose caller gave up still counts until it ends."""

    def __init__(self, threads: int, max_jobs: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokens")
        self._max_jobs = max_jobs
        self.jobs = 0
        self.shed = 0

    async def run(self, work: Callable[[], T], *, budget_s: float | None = None) -> T:
        """The result of `work`. Raises CannotTokenize when the pool is full or `budget_s` is over.

        A job that has begun cannot be stopped; one that still waits is dropped.
        """
        if self.jobs >= self._max_jobs:
            self.shed += 1
            raise CannotTokenize(Reason.QUEUE_FULL)
        loop = asyncio.get_running_loop()
        job = self._executor.submit(work)
        self.jobs += 1
        job.add_done_callback(lambda _: _call_soon(loop, self._ended))
        try:
            async with asyncio.timeout(budget_s):
                return await asyncio.wrap_future(job)
        except TimeoutError as exc:
            raise CannotTokenize(Reason.LOCAL_TIMEOUT) from exc

    def _ended(self) -> None:
        self.jobs -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
