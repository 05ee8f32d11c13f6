"""One fault: load, the fault, healing, and what must hold then.

1. Every answer is right, or a clear error in OpenAI's shape; of those that no broken connection excuses
   (`load.Tally`), `SUCCESS` are right.
2. At rest no gateway has anything booked, in flight or waiting; each hears the others through Redis and follows the
   indexer, and the data planes of the one that has a hub do so through that.
3. The indexer's index and every gateway's copy are what the engines' caches really hold: equal digests, at the latest
   `INDEX_S` after the first moment of rest. Time that the fleet has stood in line for a CPU is taken off: what else a
   machine does is no fault of ours.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import grpc
import msgspec

from tests.faults.fleet import Digests, Fleet
from tests.faults.load import Door, Load, Tally
from tests.faults.process import until

SUCCESS = 0.999
INDEX_S = 5.0
_PATIENCE_S = 60.0
_BEFORE, _AFTER = 8, 12
"""Requests that must have come to an end before the fault, and after it is healed."""
_LOOK_S = 0.1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`index_s`: from rest until all indexes were true; `rest_s`: until nothing was booked either and all is heard."""

    name: str
    seconds: float
    counts: dict[str, int]
    success: float
    index_s: float
    rest_s: float


class Trials:
    def __init__(self, fleet: Fleet, load: Load) -> None:
        self.fleet = fleet
        self.load = load
        self.rows: list[Row] = []

    @asynccontextmanager
    async def __call__(self, name: str, doors: Sequence[Door] | None = None) -> AsyncIterator[None]:
        """Around a fault and its healing, with load on `doors`: the gateways that share, where none are said."""
        tally = self.load.tally = Tally()
        began_s = time.monotonic()
        self.load.run(self.fleet.sharing if doors is None else doors)
        try:
            await self.asked(_BEFORE)
            yield
            await self.asked(_AFTER)
            await self.load.rest()
            index_s, waited_s, rest_s = await self._settled()
        except BaseException:
            await self.load.stop()
            await self.fleet.heal()
            raise
        row = Row(
            name=name,
            seconds=time.monotonic() - began_s,
            counts=dict(tally.counts),
            success=tally.success(),
            index_s=index_s,
            rest_s=rest_s,
        )
        self.rows.append(row)
        assert not tally.counts["wrong"], tally.notes
        assert row.success >= SUCCESS, tally.notes
        waited = f"of which {waited_s:.1f} s in line for a CPU"
        assert index_s - waited_s <= INDEX_S, f"the indexes were true after {index_s:.1f} s, {waited}"

    async def asked(self, n: int) -> None:
        """Until so many more requests have come to an end."""
        least = self.load.tally.asked + n

        async def there() -> bool:
            return self.load.tally.asked >= least

        await until(there, f"{n} requests more", _PATIENCE_S)

    async def _settled(self) -> tuple[float, float, float]:
        """(`Row.index_s`, seconds of these in line for a CPU, `Row.rest_s`)"""
        fleet = self.fleet
        began_s, waited_before_s = time.monotonic(), _waited_s(fleet)
        index_s = waited_s = None
        while True:
            differing = await self._differing()
            if index_s is None and not differing:
                index_s, waited_s = time.monotonic() - began_s, _waited_s(fleet) - waited_before_s
            left = [f"{it.name}: {each}" for it in fleet.gateways for each in await it.unsettled()]
            if not differing and not left:
                assert index_s is not None
                assert waited_s is not None
                return index_s, waited_s, time.monotonic() - began_s
            if time.monotonic() - began_s > _PATIENCE_S:
                feeds = await fleet.indexer.troubles()
                raise AssertionError(f"not settled after {_PATIENCE_S:g} s: {[*differing, *left]}, feeds: {feeds}")
            await asyncio.sleep(_LOOK_S)

    async def _differing(self) -> list[str]:
        fleet = self.fleet
        truth = await fleet.true_digests()
        if truth is None:
            return ["an engine still computes"]
        found = []
        for it in (fleet.indexer, *fleet.gateways):
            try:
                told: list[Digests] = await it.digests()
            except (grpc.aio.AioRpcError, aiohttp.ClientError, OSError) as exc:
                found.append(f"{it.name} does not tell: {type(exc).__name__}")
                continue
            found += [
                f"{it.name}: {name} holds {truth.get(name)}, not {copy.get(name)}"
                for copy in told
                for name in sorted({*truth, *copy})
                if truth.get(name) != copy.get(name)
            ]
        return found


def _waited_s(fleet: Fleet) -> float:
    """So long all threads of the fleet, and of this process, have stood in line for a CPU that others had."""
    total_ns = 0
    for pid in (os.getpid(), *(pid for process in fleet.processes for pid in process.pids)):
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # A thread that has just ended.
                total_ns += int(file.read_text(encoding="ascii").split()[1])
    return total_ns / 1e9


_COLUMNS = ("right", "left", "retried", "excused", "failed")


def table(rows: list[Row]) -> list[str]:
    """For people."""
    lines = [f"{'fault':<51} {'s':>5}" + "".join(f"{name:>8}" for name in _COLUMNS) + "  success  index s  rest s"]
    for it in rows:
        counts = "".join(f"{it.counts.get(name, 0):>8}" for name in _COLUMNS)
        figures = f"{it.success:>9.2%} {it.index_s:>8.1f} {it.rest_s:>7.1f}"
        lines.append(f"{it.name:<51} {it.seconds:>5.1f}{counts}{figures}")
    total: Counter[str] = sum((Counter(it.counts) for it in rows), Counter())
    counts = "".join(f"{total[name]:>8}" for name in _COLUMNS)
    share = total["right"] / max(1, total["right"] + total["failed"])
    lines.append(f"{'all':<51} {sum(it.seconds for it in rows):>5.0f}{counts}{share:>9.2%}")
    return lines
