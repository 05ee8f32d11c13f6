"""How late the event loop is while KV events come in: real ZMQ from a publisher in a process of its own, the ingest
thread that serves, requests planned on the loop beside it.

A callback is due every millisecond; how late it runs is what every other callback, and so every request and every chunk
of an answer, waits. Wall-clock time, so what else the machine does shows in it: the processes are scheduled ahead of
others where that is allowed (`scheduled`), and of several windows the median counts.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import uvloop

from gateway.engine.subscriber import EventIngest
from gateway.measure.front import Front, body, tokenizing

WORKERS = 8
BLOCKS_PER_S = 100_000
"""Stored, and as many removed."""
REQUESTS_PER_S = 50
PROMPT_TOKENS = 8_192
_TICK_S = 0.001
_UP_S = 30.0
_SETTLE_S = 0.5


def measure_stall(windows: int, window_s: float, model: str) -> dict[str, float]:
    return uvloop.run(_measure(windows, window_s, model))


async def _measure(windows: int, window_s: float, model: str) -> dict[str, float]:
    from bench.kv_publisher import STORED_PER_FRAME

    async with tokenizing(model) as service:
        front = await Front.of_size(service, PROMPT_TOKENS)
        bodies = [body(front.next_turn()) for _ in range(64)]
        out: dict[str, float] = {}
        ticks = _Ticks()
        for name, planning in (("_no_events_no_requests", False), ("_no_events", True)):
            p99s = [(await _window(front, bodies if planning else [], ticks, window_s))[0] for _ in range(windows)]
            out[f"loop_p99{name}_ms"] = statistics.median(p99s) * 1e3
        ingest = EventIngest(front.planner.index, right_of_way=front.right_of_way)
        publisher = await _start_publisher()
        ingest.start()
        try:
            for worker, endpoint in enumerate(publisher.endpoints):
                ingest.add(f"d{worker}", 0, endpoint, None)
            await _until(lambda: _frames(ingest) > 0)
            await asyncio.sleep(_SETTLE_S)
            rows = []
            for _ in range(windows):
                frames, began_s = _frames(ingest), time.monotonic()
                p99_s, longest_s, plan_s = await _window(front, bodies, ticks, window_s)
                rate = (_frames(ingest) - frames) * STORED_PER_FRAME / (time.monotonic() - began_s)
                rows.append((p99_s, longest_s, plan_s, rate))
            columns = [statistics.median(column) for column in zip(*rows, strict=True)]
            out["loop_p99_stall_ms"], out["loop_longest_stall_ms"], out["plan_beside_events_p99_ms"] = (
                value * 1e3 for value in columns[:3]
            )
            out["loop_events_stored_blocks_per_s"] = columns[3]
        finally:
            publisher.stop()
            ingest.stop()
        return out


async def _window(front: Front, bodies: list[bytes], ticks: _Ticks, window_s: float) -> tuple[float, float, float]:
    """(p99 and longest lateness of the loop, p99 from a body to its plan), seconds."""
    ticks.start()
    took: list[float] = [0.0]
    ends_s = time.perf_counter() + window_s
    due_s = time.perf_counter()
    i = 0
    while (now_s := time.perf_counter()) < ends_s:
        if bodies and now_s >= due_s:
            due_s += 1 / REQUESTS_PER_S
            began_s = time.perf_counter()
            facts = await front.plan(bodies[i % len(bodies)])
            took.append(time.perf_counter() - began_s)
            front.end(facts)
            i += 1
        await asyncio.sleep(min(ends_s, due_s if bodies else ends_s) - time.perf_counter())
    late = ticks.stop()
    return _p99(late), max(late), _p99(took)


class _Ticks:
    """Calls itself every millisecond and notes how late it was called."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._late_s = []
        self._again()

    def stop(self) -> list[float]:
        if self._handle is not None:
            self._handle.cancel()
        return self._late_s

    def _again(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = time.perf_counter() + _TICK_S
        self._handle = loop.call_later(_TICK_S, self._ticked)

    def _ticked(self) -> None:
        self._late_s.append(max(0.0, time.perf_counter() - self._due_s))
        self._again()


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def _frames(ingest: EventIngest) -> int:
    return sum(status.batches for status in ingest.status().values())


async def _until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(_UP_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class _Publisher:
    def __init__(self, process: asyncio.subprocess.Process, endpoints: list[str]) -> None:
        self._process = process
        self.endpoints = endpoints

    def stop(self) -> None:
        self._process.kill()


async def _start_publisher() -> _Publisher:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.kv_publisher", str(WORKERS), str(BLOCKS_PER_S)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None  # noqa: S101 - it was asked for
    line = await asyncio.wait_for(process.stdout.readline(), _UP_S)
    return _Publisher(process, json.loads(line))
