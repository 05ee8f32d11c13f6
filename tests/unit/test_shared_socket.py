"""Connections taken from a socket that several accept from."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from gateway.proxy.shared_socket import SharedSocket


class Turn:
    """As a test says."""

    def __init__(self) -> None:
        self.many = False
        self.asked: list[int] = []
        self.left = False

    def has_many(self, n_open: int) -> bool:
        self.asked.append(n_open)
        return self.many

    def leaves(self) -> None:
        self.left = True


class Echo(asyncio.Protocol):
    def __init__(self, made: list[asyncio.BaseTransport]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not check():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


async def client_of(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def test_who_has_many_gives_way_but_lets_nobody_wait_for_long(listening: socket.socket) -> None:
    turn, made = Turn(), []
    shared = SharedSocket(listening, turn)
    shared.listen(lambda: Echo(made), None, lambda: len(made))
    port = shared.port
    _, first = await client_of(port)
    await until(lambda: len(made) == 1)
    turn.many = True
    asked = len(turn.asked)
    _, second = await client_of(port)
    await until(lambda: len(made) == 2)
    assert len(turn.asked) - asked == 5, "it was looked at so often before it was taken all the same"
    asked = len(turn.asked)
    _, third = await client_of(port)
    await until(lambda: len(made) == 3)
    assert len(turn.asked) == asked, "who is stuck is not waited for each time"
    shared.close()
    assert turn.left
    for writer in (first, second, third):
        writer.close()
    for transport in made:
        transport.close()


async def test_after_its_end_others_take_what_comes(listening: socket.socket) -> None:
    made, mine, theirs = [], Turn(), Turn()
    first = SharedSocket(listening.dup(), mine)
    second = SharedSocket(listening.dup(), theirs)
    first.listen(lambda: Echo(made), None, lambda: 0)
    second.listen(lambda: Echo(made), None, lambda: 0)
    port = second.port
    first.close()
    _, writer = await client_of(port)
    await until(lambda: len(made) == 1)
    assert theirs.asked[1:], "it asked"
    assert mine.asked == [0]
    writer.close()
    made[0].close()
    second.close()


async def test_a_connection_of_another_process_goes_on_here(listening: socket.socket) -> None:
    made: list[asyncio.BaseTransport] = []
    shared = SharedSocket(listening, Turn())
    shared.listen(lambda: Echo(made), None, lambda: 0)
    ours, theirs = socket.socketpair()
    shared.adopt(theirs)
    await until(lambda: len(made) == 1)
    shared.close()
    late, other = socket.socketpair()
    shared.adopt(other)  # Nobody is there for it any more.
    with suppress(OSError):
        assert late.recv(1) == b""
    made[0].close()
    ours.close()
    late.close()
