"""What must not happen to a decode leg that carries transfer params, looked at while it is on its way.

The params are good until the lease is over, and a decode engine cannot tell when it reads them later. So the body is
held back until the engine's server asks for it (Expect: 100-continue, RFC 9110 10.1.1): a frozen one never does, and
never finds stale params in its socket when it wakes up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum

from gateway.proxy.timed import TimedBody

LEAVE_S = 2.0
"""Who lives and has not asked for the body after this time does not know how to ask. vLLM takes under 1 ms."""
GIVE_UP_S = 3.0
"""Who has neither asked for the body nor answered anything after this time is left, if there is anybody else: nothing
was sent there yet.
"""
_LOOK_S = 0.1


class Verdict(Enum):
    DEAF = "deaf"
    """It answers other requests and does not ask for the body."""
    LATE = "late"
    """It lives, and has not the whole body by the deadline."""
    SILENT = "silent"
    """It answers nothing."""


class LegWatch:
    """Ends the wait `limit` when there is a verdict. `heard_since(s)`: whether the engine has answered anything.
    `replaceable`: another worker could decode.
    """

    def __init__(
        self,
        limit: asyncio.Timeout,
        body: TimedBody,
        *,
        asks: bool,
        replaceable: bool,
        deadline_s: float,
        lease_ends_s: float,
        heard_since: Callable[[float], bool],
    ) -> None:
        self.verdict: Verdict | None = None
        self._limit = limit
        self._body = body
        self._asks = asks
        self._replaceable = replaceable
        self._deadline_s = deadline_s
        self._lease_ends_s = lease_ends_s
        self._heard_since = heard_since
        self._began_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now_s = time.monotonic()
        self.verdict = self._judged(now_s)
        if self.verdict is not None:
            self._limit.reschedule(self._loop.time())
        elif self._body.written_s is None or now_s < self._lease_ends_s:
            wait_s = _LOOK_S if self._body.written_s is None else max(_LOOK_S, self._lease_ends_s - now_s)
            self._timer = self._loop.call_later(wait_s, self._look)

    def _judged(self, now_s: float) -> Verdict | None:
        heard = self._heard_since(self._began_s)
        if self._body.written_s is None:
            held_back, waited_s = self._asks and not self._body.begun, now_s - self._began_s
            if held_back and heard and waited_s >= LEAVE_S:
                return Verdict.DEAF
            is_over = now_s >= self._deadline_s
            if heard:
                return Verdict.LATE if is_over else None
            if held_back and waited_s < GIVE_UP_S:
                return None  # Nothing is sent to who asks for it after the deadline, and a busy one may yet answer.
            return Verdict.SILENT if is_over or (held_back and self._replaceable) else None
        # One that lives has renewed the lease.
        return Verdict.SILENT if now_s >= self._lease_ends_s and not heard else None
