"""Memory that all processes of a gateway see, for what has to hold for the whole: who is there, how many requests are
served, what API keys have used.

Each process writes numbers of its own seat alone and reads the sums, so that nothing is waited for, and what a killed
process had is gone when its seat is cleared. Its layout has a version: processes of another one do not share it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Final

from gateway.proxy.places import Places

VERSION: Final = 1
N_SEATS: Final = 160
"""Twice the most processes, as a successor sits beside whom it succeeds, and some more."""
_HEAD_BYTES: Final = 64
_MAGIC: Final = 0x77_61_72_6D
_CONNECTIONS, _SERVED, _BODIES, _TAKEN = range(4)
_N_COLUMNS: Final = 4
COLUMNS_BYTES: Final = 4 * N_SEATS * _N_COLUMNS
FIRST_BOOK: Final = _HEAD_BYTES + COLUMNS_BYTES


class OtherLayoutError(Exception):
    """Made by another version."""


class Table:
    """`fd` of a file in memory of `n_bytes`. `create` makes one, which lasts as long as somebody has it open."""

    def __init__(self, fd: int) -> None:
        """Raises OtherLayoutError."""
        self.fd = fd
        self.map = mmap.mmap(fd, 0)
        head = memoryview(self.map)[:_HEAD_BYTES].cast("I")
        if (head[0], head[1]) != (_MAGIC, VERSION):
            raise OtherLayoutError
        self._head = head
        columns = memoryview(self.map)[_HEAD_BYTES:FIRST_BOOK].cast("I")
        self._columns = [columns[i * N_SEATS : (i + 1) * N_SEATS] for i in range(_N_COLUMNS)]

    @classmethod
    def create(cls, book_bytes: int) -> Table:
        fd = os.memfd_create("warmroute", os.MFD_CLOEXEC)
        os.ftruncate(fd, FIRST_BOOK + book_bytes)
        head = memoryview(mmap.mmap(fd, _HEAD_BYTES)).cast("I")
        head[0], head[1] = _MAGIC, VERSION
        return cls(fd)

    @property
    def n_used(self) -> int:
        """No seat from here on was ever taken."""
        return self._head[2]

    def take_seat(self) -> int:
        """For a process that is about to start; the supervisor's alone. Raises RuntimeError where none is free."""
        for seat in range(N_SEATS):
            if not self._columns[_TAKEN][seat]:
                self._columns[_TAKEN][seat] = 1
                self._head[2] = max(self._head[2], seat + 1)
                return seat
        raise RuntimeError("no seat is free")

    def clear_seat(self, seat: int) -> None:
        """Its process is gone."""
        for column in self._columns:
            column[seat] = 0

    def seat(self, number: int) -> Seat:
        return Seat(self, number)

    def column(self, which: int) -> memoryview:
        return self._columns[which]


class Seat(Places):
    """One process's numbers."""

    def __init__(self, table: Table, number: int) -> None:
        self.number = number
        self._table = table
        self._connections = table.column(_CONNECTIONS)
        self._served_column = table.column(_SERVED)
        self._body_column = table.column(_BODIES)

    # ---- requests, by all processes together -------------------------------------------------------------------------

    @property
    def served(self) -> int:
        return sum(self._served_column[: self._table.n_used])

    @property
    def bodies(self) -> int:
        return sum(self._body_column[: self._table.n_used])

    def take(self, most: int) -> bool:
        self._served_column[self.number] += 1
        if self.served <= most:  # Looked at after it is said, so that two at once are never too many.
            return True
        self._served_column[self.number] -= 1
        return False

    def give_back(self) -> None:
        self._served_column[self.number] -= 1

    def begin_body(self, takes_place: bool = True) -> None:
        self._body_column[self.number] += takes_place

    def end_body(self, takes_place: bool = True) -> None:
        self._body_column[self.number] -= takes_place

    # ---- connections -------------------------------------------------------------------------------------------------

    def has_many(self, n_open: int) -> bool:
        # Each says so whenever a connection waits, which wakes them all: the others' numbers are of just now.
        self._connections[self.number] = 1 + n_open
        fewest = min(self._accepting(), default=0)
        return n_open > fewest + fewest // 8

    def leaves(self) -> None:
        self._connections[self.number] = 0

    def _accepting(self) -> Iterator[int]:
        """The connections of each that takes any."""
        for n in self._connections[: self._table.n_used]:
            if n:
                yield n - 1
