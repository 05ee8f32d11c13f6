"""The event loop goes first: a thread that shares the interpreter with it holds back while it decides.

A decision is a millisecond of Python. A thread that takes in KV events beside it makes it three or four: each has the
interpreter for a switch interval in turn, and waits for what the other held when it was interrupted. `python -m bench
micro` has how late the loop is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from threading import Lock

_PATIENCE_S = 0.005


class RightOfWay:
    """The loop takes it for as long as it is busy; another thread gives it, between two pieces of work.

    That thread, when it has waited, works for as long before it waits again: it has half of the time at least, however
    busy the loop is.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, *, patience_s: float = _PATIENCE_S) -> None:
        """`patience_s`: longest wait at a time."""
        self._now = now
        self._patience_s = patience_s
        self._lock = Lock()
        self._is_taken = False
        self._works_until_s = -1.0

    def take(self) -> None:
        """In the loop's thread: until what is due by then has had its turn."""
        # Who has just waited holds the lock for a moment. The loop waits for nobody.
        if not self._is_taken and self._lock.acquire(blocking=False):
            self._is_taken = True
            loop = asyncio.get_running_loop()
            # Once more around, as timers and sockets that became due meanwhile come after what was called soon.
            loop.call_soon(loop.call_soon, self._end)

    def _end(self) -> None:
        self._is_taken = False
        self._lock.release()

    def give(self) -> None:
        """In one other thread: wait while the loop has it."""
        if not self._lock.locked():
            return
        began_s = self._now()
        if began_s < self._works_until_s:
            return
        if self._lock.acquire(timeout=self._patience_s):
            self._lock.release()
        ended_s = self._now()
        self._works_until_s = 2 * ended_s - began_s
