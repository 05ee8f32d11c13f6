"""The latest deltas, as they go over the wire: made once, whoever watches, and kept so that a watcher may resume."""

from __future__ import annotations

import asyncio
import contextlib

_OBJECT_BYTES = 64
"""What one takes in memory beside its content."""


class History:
    """At most `most_bytes` of them, but always the last. In a running event loop."""

    def __init__(self, most_bytes: int) -> None:
        self.sequence = 0
        """Of the last one; the first is 1."""
        self.bytes = 0
        self._most_bytes = most_bytes
        self._kept: list[bytes] = []
        self._first = 0
        """Those before it in `_kept` are given up; moved together now and then."""
        self._news = asyncio.Event()

    def append(self, update: bytes) -> None:
        """An Update with the delta of the next sequence number in it."""
        self.sequence += 1
        self._kept.append(update)
        self.bytes += len(update) + _OBJECT_BYTES
        while self.bytes > self._most_bytes and self._first < len(self._kept) - 1:
            self.bytes -= len(self._kept[self._first]) + _OBJECT_BYTES
            self._kept[self._first] = b""
            self._first += 1
        if self._first > len(self._kept) // 2:
            del self._kept[: self._first]
            self._first = 0
        self._wake()

    def forget(self) -> None:
        """Nobody can go on from here."""
        self._kept, self._first = [], 0
        self.bytes = 0
        self.sequence += 1
        self._wake()

    def has_all_after(self, sequence: int) -> bool:
        return self.sequence - (len(self._kept) - self._first) <= sequence <= self.sequence

    def after(self, sequence: int, most_bytes: int) -> tuple[bytes, int]:
        """The deltas that follow `sequence`, as one Update of about so many bytes, and the last one's number.

        Raises LookupError where they are no longer kept.
        """
        if not self.has_all_after(sequence):
            raise LookupError(sequence)
        start = at = len(self._kept) - (self.sequence - sequence)
        size = 0
        while at < len(self._kept) and size < most_bytes:
            size += len(self._kept[at])
            at += 1
        # Messages that follow each other are one, with the repeated fields of all.
        return b"".join(self._kept[start:at]), sequence + at - start

    async def wait(self, sequence: int, timeout_s: float) -> None:
        """Until there is something after `sequence`, or the time is over."""
        if self.sequence == sequence:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
