"""What the fault suite goes by: links that fail as they say, and who is excused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.broken import Broken
from tests.faults.link import DELAY_S, Link
from tests.faults.load import Load, Outcome, _Client
from tests.faults.process import fixed_port

_NEVER_S = 0.3
_SOON_S = 20.0
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo_behind_a_link() -> AsyncIterator[tuple[Link, list[bytes]]]:
    """(link, all that has come through it)"""
    came: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(100):
            came.append(piece)
            writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link("a", fixed_port(), server.sockets[0].getsockname()[1])
    await link.listen()
    try:
        yield link, came
    finally:
        await link.close()
        server.close()


async def said(ends: Ends, text: bytes, within_s: float = _SOON_S) -> bytes:
    ends[1].write(text)
    return await asyncio.wait_for(ends[0].read(100), within_s)


async def connect(link: Link) -> Ends:
    return await asyncio.open_connection("127.0.0.1", link.port)


async def test_a_link_passes_and_delays() -> None:
    async with echo_behind_a_link() as (link, _):
        ends = await connect(link)
        assert await said(ends, b"a") == b"a"
        await link.turn("delay")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await said(ends, b"b") == b"b"
        assert loop.time() - began_s >= 2 * DELAY_S
        ends[1].close()


async def test_a_reset_meets_open_connections_and_new_ones() -> None:
    async with echo_behind_a_link() as (link, _):
        ends = await connect(link)
        assert await said(ends, b"a") == b"a"
        await link.turn("reset")
        with pytest.raises(ConnectionResetError):
            await said(ends, b"b")
        with pytest.raises(ConnectionResetError):
            await said(await connect(link), b"c")
        await link.turn("pass")
        assert await said(await connect(link), b"d") == b"d"


async def test_half_open_says_nothing_and_is_reset_when_it_is_healed() -> None:
    async with echo_behind_a_link() as (link, came):
        before = await connect(link)
        assert await said(before, b"a") == b"a"
        await link.turn("half-open")
        after = await connect(link)
        for ends in (before, after):
            with pytest.raises(TimeoutError):
                await said(ends, b"b", _NEVER_S)
        assert came == [b"a"]
        await link.turn("pass")
        for ends in (before, after):
            with pytest.raises(ConnectionResetError):
                await said(ends, b"c")


async def test_one_way_silence_keeps_answers_back() -> None:
    async with echo_behind_a_link() as (link, came):
        ends = await connect(link)
        await link.turn("one-way")
        with pytest.raises(TimeoutError):
            await said(ends, b"a", _NEVER_S)
        assert came == [b"a"]
        await link.turn("pass")
        assert await asyncio.wait_for(ends[0].read(100), _SOON_S) == b"a"
        ends[1].close()


async def test_a_link_refuses_until_it_listens_again() -> None:
    async with echo_behind_a_link() as (link, _):
        link.refuse()
        with pytest.raises(ConnectionRefusedError):
            await connect(link)
        await link.listen()
        assert await said(await connect(link), b"a") == b"a"


def test_only_what_was_broken_meanwhile_excuses() -> None:
    broken = Broken()
    load = Load(broken, 1, n_clients=0, pause_s=1.0)
    client = _Client(load, random.Random(1), 1.0)
    with broken.cut("engine1"):
        pass
    ((at_s, _),) = broken._spans["engine1"]

    def judged(worker: str | None, began_s: float, **fields: object) -> str:
        load.tally.counts.clear()
        it = Outcome(gateway="gateway0", worker=worker, began_s=began_s, ended_s=began_s + 1, **fields)  # type: ignore[arg-type]
        client._judge("chat", it, "the truth", holder=None)
        (what,) = load.tally.counts
        return what

    during, later = at_s - 0.5, at_s + 5
    assert judged("engine1", later, text="the truth", is_whole=True) == "right"
    assert judged("engine1", during, text="the tr", broke="reset") == "excused"
    assert judged(None, during, error="Worker engine1 gave no answer (reset).") == "excused"
    assert judged("engine1", later, error="Worker engine1 gave no answer (reset).") == "failed"
    assert judged("engine2", during, error="Worker engine2 gave no answer (reset).") == "failed"
    assert judged("engine2", during, text="the tr", broke="reset") == "wrong"
    assert judged("engine1", during, text="the lie", is_whole=True) == "wrong"
    assert judged("engine1", during, text="a lie", broke="reset") == "wrong"
    assert judged("engine1", during, text="the tr", is_whole=True) == "wrong"
    assert judged("engine1", during, unclear="status 500, no JSON") == "wrong"
