"""What API keys have used of their limits, by all processes of a gateway together, in memory they share.

Each change is made with the row locked, by a lock the kernel gives up for a process that is killed. Time is the
machine's monotonic clock, the same for all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gateway.auth.keys import Key
from gateway.auth.limits import Account, Bucket, Limits
from gateway.processes.seats import FIRST_BOOK, N_SEATS, Table

_log = logging.getLogger(__name__)
N_ROWS: Final = 32_768
_DIGEST_BYTES: Final = 16
_ROW_BYTES: Final = 64
_BUCKET = struct.Struct("ddd")
"""limit (0: never used), level, and when it was so in seconds."""
_ROWS: Final = FIRST_BOOK + 64
_RUNNING: Final = _ROWS + N_ROWS * _ROW_BYTES
BYTES: Final = 64 + N_ROWS * _ROW_BYTES + 4 * N_ROWS * N_SEATS
_LOCKED_S: Final = 0.01
"""Others hold a row for microseconds; one that was stopped just then is not waited for."""


class Books:
    """Of one process, at its seat."""

    def __init__(self, table: Table, seat: int) -> None:
        self.table = table
        self.seat = seat
        self._n_rows = memoryview(table.map)[FIRST_BOOK : FIRST_BOOK + 4].cast("I")
        self._running = memoryview(table.map)[_RUNNING : _RUNNING + 4 * N_ROWS * N_SEATS].cast("I")
        self._known: dict[bytes, int] = {}
        self._is_full = False

    def account(self, key: Key, now_s: float) -> Account:
        row = self._row(hashlib.blake2b(f"{key.tenant}\0{key.name}".encode(), digest_size=_DIGEST_BYTES).digest())
        return Account(key.limits, now_s) if row is None else SharedAccount(self, row, key.limits, now_s)

    def clear_seat(self, seat: int) -> None:
        """Its process is gone, and so is what it served."""
        start = seat * N_ROWS
        for at in range(start, start + self._n_rows[0]):
            self._running[at] = 0

    def _row(self, digest: bytes) -> int | None:
        with self.locked(FIRST_BOOK):
            for row in range(len(self._known), self._n_rows[0]):
                start = _ROWS + row * _ROW_BYTES
                self._known[bytes(self.table.map[start : start + _DIGEST_BYTES])] = row
            found = self._known.get(digest)
            if found is not None:
                return found
            row = self._n_rows[0]
            if row >= N_ROWS:
                if not self._is_full:
                    self._is_full = True
                    _log.warning("more than %d API keys were seen: limits of the rest hold for each process", N_ROWS)
                return None
            start = _ROWS + row * _ROW_BYTES
            self.table.map[start : start + _DIGEST_BYTES] = digest
            self._known[digest] = row
            self._n_rows[0] = row + 1
            return row

    @contextmanager
    def locked(self, at: int) -> Iterator[None]:
        deadline_s = None
        while True:
            try:
                fcntl.lockf(self.table.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
                break
            except OSError:
                now_s = time.monotonic()
                deadline_s = deadline_s or now_s + _LOCKED_S
                if now_s > deadline_s:
                    break
                os.sched_yield()
        try:
            yield
        finally:
            fcntl.lockf(self.table.fd, fcntl.LOCK_UN, 1, at)

    def bucket_at(self, row: int, nth: int) -> int:
        return _ROWS + row * _ROW_BYTES + _DIGEST_BYTES + nth * _BUCKET.size

    def running(self, row: int) -> int:
        return sum(self._running[row : row + self.table.n_used * N_ROWS : N_ROWS])

    def add_running(self, row: int, n: int) -> None:
        at = self.seat * N_ROWS + row
        self._running[at] = max(0, self._running[at] + n)


class SharedAccount(Account):
    """An `Account` whose numbers are everybody's."""

    __slots__ = ("_books", "_is_held", "_row")

    def __init__(self, books: Books, row: int, limits: Limits, now_s: float) -> None:
        self._books = books
        self._row = row
        self._is_held = False
        super().__init__(limits, now_s)

    def configure(self, limits: Limits, now_s: float) -> None:
        # What is there is of the limits before, by whoever was the first to read these: it is put right once.
        self._requests = self._requests or _placeholder(limits.requests_per_minute, now_s)
        self._tokens = self._tokens or _placeholder(limits.tokens_per_minute, now_s)
        with self._shared():
            super().configure(limits, now_s)

    def enter(self, now_s: float) -> None:
        with self._shared():
            super().enter(now_s)

    def ask(self, now_s: float) -> None:
        with self._shared():
            super().ask(now_s)

    def leave(self) -> None:
        with self._shared():
            super().leave()

    def reserve(self, prompt_tokens: int, output_tokens: int, now_s: float) -> int:
        with self._shared():
            return super().reserve(prompt_tokens, output_tokens, now_s)

    def settle(self, reserved: int, used: int, now_s: float) -> None:
        with self._shared():
            super().settle(reserved, used, now_s)

    def headers(self, now_s: float) -> list[tuple[str, str]]:
        with self._shared():
            return super().headers(now_s)

    @contextmanager
    def _shared(self) -> Iterator[None]:
        if self._is_held:  # By the method this one is a part of.
            yield
            return
        books = self._books
        with books.locked(books.bucket_at(self._row, 0)):
            before = self.running = books.running(self._row)
            for nth, bucket in enumerate((self._requests, self._tokens)):
                if bucket is not None:
                    limit, level, at_s = _BUCKET.unpack_from(books.table.map, books.bucket_at(self._row, nth))
                    if limit:
                        bucket.restore(round(limit), level, at_s)
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False
                for nth, bucket in enumerate((self._requests, self._tokens)):
                    if bucket is not None:
                        _BUCKET.pack_into(books.table.map, books.bucket_at(self._row, nth), *bucket.state())
                if self.running != before:
                    books.add_running(self._row, self.running - before)


def _placeholder(limit: int | None, now_s: float) -> Bucket | None:
    return None if limit is None else Bucket(limit, now_s)
