"""Read what workers serve before saying that nobody serves a model: adapters are loaded behind our back, too."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)

_LONGEST_S = 0.5
"""A slow worker keeps nobody waiting for longer."""


class LookAgain:
    """One reading for all who ask at a time, and none while the last is younger than `every_s`."""

    def __init__(
        self, read: Callable[[], Awaitable[None]], every_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._every_s = every_s
        self._now = now
        self._began_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        if self._task is None:
            now_s = self._now()
            if self._began_s is not None and now_s < self._began_s + self._every_s:
                return
            self._began_s = now_s
            self._task = asyncio.get_running_loop().create_task(self._run())
        await asyncio.wait({self._task}, timeout=_LONGEST_S)

    async def _run(self) -> None:
        try:
            await self._read()
        except Exception:
            _log.exception("reading what workers serve failed unexpectedly")
        finally:
            self._task = None

    async def close(self) -> None:
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
