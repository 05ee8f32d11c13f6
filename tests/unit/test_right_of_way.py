"""Who goes first: the loop, and by how much."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from gateway.right_of_way import RightOfWay

FOREVER_S = 3600.0


class Clock:
    def __init__(self, *readings_s: float) -> None:
        self._left = list(readings_s)

    def __call__(self) -> float:
        return self._left.pop(0)

    @property
    def is_read_up(self) -> bool:
        return not self._left


async def in_thread(call: Callable[[], None]) -> None:
    async with asyncio.timeout(60):
        await asyncio.to_thread(call)


def test_nobody_waits_when_nobody_has_it() -> None:
    RightOfWay(Clock(), patience_s=FOREVER_S).give()


async def test_a_thread_goes_on_when_the_loop_has_come_around() -> None:
    way = RightOfWay(patience_s=FOREVER_S)
    way.take()
    await in_thread(way.give)


async def test_it_lasts_for_what_became_due_meanwhile() -> None:
    loop = asyncio.get_running_loop()
    way = RightOfWay(patience_s=FOREVER_S)
    due: asyncio.Future[bool] = loop.create_future()
    way.take()
    loop.call_later(0.0, lambda: due.set_result(way._lock.locked()))
    async with asyncio.timeout(60):
        assert await due
    await in_thread(way.give)


async def test_it_is_taken_once_however_many_take_it() -> None:
    way = RightOfWay(patience_s=FOREVER_S)
    way.take()
    way.take()
    await in_thread(way.give)
    way.take()
    await in_thread(way.give)


async def test_the_loop_never_waits_for_a_thread_that_is_about_to_go_on() -> None:
    way = RightOfWay(patience_s=FOREVER_S)
    with way._lock:
        way.take()
    await asyncio.sleep(0)
    way.take()
    await in_thread(way.give)


def test_patience_ends() -> None:
    clock = Clock(10.0, 10.5)
    way = RightOfWay(clock, patience_s=0.0)
    with way._lock:
        way.give()
    assert clock.is_read_up


@pytest.mark.parametrize(("at_s", "waits"), [(10.9, False), (11.0, True)])
def test_who_has_waited_works_for_as_long(at_s: float, waits: bool) -> None:
    clock = Clock(10.0, 10.5, at_s, at_s + 1.0)
    way = RightOfWay(clock, patience_s=0.0)
    with way._lock:
        way.give()
        way.give()
    assert clock.is_read_up is waits


async def test_a_thread_waits_while_the_loop_has_it() -> None:
    is_waiting, went_on = threading.Event(), threading.Event()

    def now() -> float:
        is_waiting.set()
        return 0.0

    way = RightOfWay(now, patience_s=FOREVER_S)

    def work() -> None:
        way.give()
        went_on.set()

    way.take()
    thread = threading.Thread(target=work)
    thread.start()
    assert is_waiting.wait(60)  # With the loop in here, its turn goes on.
    assert not went_on.is_set()
    await in_thread(thread.join)
    assert went_on.is_set()
