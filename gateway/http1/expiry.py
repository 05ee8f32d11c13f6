"""What is to end after the same time for all, by one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Expiry(Generic[T]):
    """Calls `expire(item)` `after_s` after it was added, unless it was taken out before."""

    __slots__ = ("_after_s", "_due_s", "_expire", "_loop", "_timer")

    def __init__(self, after_s: float, expire: Callable[[T], None]) -> None:
        self._after_s = after_s
        self._expire = expire
        self._due_s: dict[T, float] = {}
        """The oldest first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: T) -> None:
        """Its time begins anew if it is here already."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        self._due_s.pop(item, None)
        due_s = self._due_s[item] = loop.time() + self._after_s
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._look)

    def add_once(self, item: T) -> None:
        if item not in self._due_s:
            self.add(item)

    def discard(self, item: T) -> None:
        self._due_s.pop(item, None)

    def newest(self) -> T | None:
        """Takes out the last added."""
        return self._due_s.popitem()[0] if self._due_s else None

    def take_all(self) -> list[T]:
        """All there are, the oldest first; none is here any more."""
        items = list(self._due_s)
        self._due_s.clear()
        return items

    def close(self) -> None:
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        over = []
        for item, due_s in self._due_s.items():
            if due_s > now_s:
                self._timer = loop.call_at(due_s, self._look)
                break
            over.append(item)
        for item in over:
            del self._due_s[item]
        for item in over:
            self._expire(item)
