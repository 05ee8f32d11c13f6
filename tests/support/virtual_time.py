"""An event loop whose clock stands still while there is anything to do, and jumps to the next timer when there is not.

Peers that talk over loopback in this process are always done before time passes, so that minutes of timers take as long
as what they do, and a busy machine times nothing out. Threads and other processes are not waited for.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

import pytest

_IN_FLIGHT_S = 0.00002
"""What the kernel may take to bring a byte from one end of a connection to the other."""
_TURN_S = 1e-6
"""Passes with each turn of the loop, as some time always does; else what waits for a rounding error waits for good."""


class _Selector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            time.sleep(_IN_FLIGHT_S)  # `select` rounds up to milliseconds.
            ready = super().select(0)
        self.now_s += _TURN_S if ready else max(timeout, _TURN_S)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


class VirtualPolicy(asyncio.DefaultEventLoopPolicy):
    """Of all tests of a module that imports `event_loop_policy` from here."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return VirtualPolicy()
