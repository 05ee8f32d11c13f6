"""The latest deltas, as they go over the wire: made once, whoever watches, and kept so that a watcher may resume."""

from __future__ import annotations

import asyncio
from collections import deque


class History:
    """At most `most_bytes` of them, but always the last. In a running event loop."""

    def __init__(self, most_bytes: int) -> None:
        self.sequence = 0
        """Of the last one; the first is 1."""
        self.bytes = 0
        self._most_bytes = most_bytes
        self._kept: deque[bytes] = deque()
        self._news = asyncio.Event()

    def append(self, update: bytes) -> None:
        """An Update with the delta of the next sequence number in it."""
        self.sequence += 1
        self._kept.append(update)
        self.bytes += len(update)
        while self.bytes > self._most_bytes and len(self._kept) > 1:
            self.bytes -= len(self._kept.popleft())
        self._news.set()
        self._news = asyncio.Event()

    def forget(self) -> None:
        """Nobody can go on from here."""
        self._kept.clear()
        self.bytes = 0
        self.sequence += 1
        self._news.set()
        self._news = asyncio.Event()

    def has_all_after(self, sequence: int) -> bool:
        return self.sequence - len(self._kept) <= sequence <= self.sequence

    def after(self, sequence: int, most_bytes: int) -> tuple[bytes, int]:
        """The deltas that follow `sequence`, as one Update of about so many bytes, and the last one's number.

        Raises LookupError where they are no longer kept.
        """
        if not self.has_all_after(sequence):
            raise LookupError(sequence)
        at = len(self._kept) - (self.sequence - sequence)
        parts: list[bytes] = []
        size = 0
        while at < len(self._kept) and size < most_bytes:
            parts.append(self._kept[at])
            size += len(self._kept[at])
            at += 1
        # Messages that follow each other are one, with the repeated fields of all.
        return b"".join(parts), sequence + len(parts)

    async def wait(self, sequence: int, timeout_s: float) -> None:
        """Until there is something after `sequence`, or the time is over."""
        if self.sequence == sequence:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return
