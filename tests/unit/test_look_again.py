"""One reading for many questions, and not too often."""

import asyncio

from gateway.engine.look_again import LookAgain


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_all_who_ask_at_a_time_share_one_reading() -> None:
    readings = 0

    async def read() -> None:
        nonlocal readings
        readings += 1
        await asyncio.sleep(0)

    clock = Clock()
    look = LookAgain(read, 1.0, clock)
    await asyncio.gather(*(look() for _ in range(20)))
    await look()
    assert readings == 1
    clock.now_s += 1.0
    await look()
    assert readings == 2


async def test_a_slow_reading_is_not_waited_for_and_a_failed_one_hurts_nobody() -> None:
    never = asyncio.Event()

    async def hangs() -> None:
        await never.wait()

    async def fails() -> None:
        raise OSError

    slow = LookAgain(hangs, 1.0)
    async with asyncio.timeout(5):
        await slow()
        await slow()
    await slow.close()
    failing = LookAgain(fails, 0.0)
    await failing()
    await failing()
