"""A listening socket that several processes accept from.

One connection is taken at a time, and by who has fewest where there is a choice: a process that took all that wait,
as servers do by themselves, would have most of the clients and with them most of the work.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_log = logging.getLogger(__name__)
_GIVE_WAY_S = 0.001
_MOST_WAYS = 5
"""One waits at most 31 ms for those who have fewer connections,"""
_HURRY_S = 1.0
"""and who had to be waited for so long is not waited for again so soon."""
_TRY_AGAIN_S = 0.1


class Turn(Protocol):
    def has_many(self, n_open: int) -> bool:
        """Here are so many connections: whether others have fewer, who then go first."""
        ...

    def leaves(self) -> None:
        """None are accepted here any more."""
        ...


class SharedSocket:
    """`sock` listens. In a running event loop: `listen`, later `close`, after which others go on."""

    def __init__(self, sock: socket.socket, turn: Turn) -> None:
        self._sock = sock
        self._turn = turn
        self._factory: Callable[[], asyncio.BaseProtocol] | None = None
        self._tls: ssl.SSLContext | None = None
        self._waits: asyncio.TimerHandle | None = None
        self._ways_given = 0
        self._hurry_until_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        port: int = self._sock.getsockname()[1]
        return port

    @property
    def is_connecting(self) -> bool:
        """Whether a connection was taken and is not there yet: its handshake, if nothing else."""
        return bool(self._tasks)

    def listen(
        self, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext | None, n_open: Callable[[], int]
    ) -> None:
        """`n_open`: how many connections it has."""
        self._loop = asyncio.get_running_loop()
        self._factory, self._tls, self._n_open = factory, tls, n_open
        self._sock.setblocking(False)
        self._turn.has_many(n_open())  # So that others know of us.
        self._loop.add_reader(self._sock.fileno(), self._ready)

    def adopt(self, sock: socket.socket) -> None:
        """A connection that another process had."""
        self._begin(sock, None)

    def close(self) -> None:
        if self._factory is not None:
            self._factory = None
            self._turn.leaves()
            self._loop.remove_reader(self._sock.fileno())
            if self._waits is not None:
                self._waits.cancel()
            self._sock.close()  # Ours: were it the last, the port would be taken while what runs here ends.

    def _ready(self) -> None:
        if self._loop.time() >= self._hurry_until_s and self._others_first():
            self._ways_given = 0
            self._pause(_GIVE_WAY_S)
        elif self._accept() is None:
            self._pause(_TRY_AGAIN_S)

    def _others_first(self) -> bool:
        return self._turn.has_many(self._n_open() + len(self._tasks))

    def _pause(self, delay_s: float) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._waits = self._loop.call_later(delay_s, self._go_on)

    def _go_on(self) -> None:
        """Nobody waits for long, whatever others have: they may be stuck."""
        self._ways_given += 1
        if self._ways_given < _MOST_WAYS and self._others_first():
            self._waits = self._loop.call_later(_GIVE_WAY_S * 2**self._ways_given, self._go_on)
            return
        self._waits = None
        taken = self._accept()
        if taken is None:
            self._waits = self._loop.call_later(_TRY_AGAIN_S, self._go_on)
            return
        if taken and self._ways_given >= _MOST_WAYS:
            self._hurry_until_s = self._loop.time() + _HURRY_S
        self._loop.add_reader(self._sock.fileno(), self._ready)

    def _accept(self) -> bool | None:
        """Whether there was one; None: there may be, and it cannot be taken now."""
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as exc:  # No more files, or no memory.
            _log.error("no connection can be accepted now: %s", exc.strerror)
            return None
        self._begin(sock, self._tls)
        return True

    def _begin(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        factory = self._factory
        if factory is None:
            sock.close()
            return
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(factory, sock, tls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(
        self, factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        try:
            await self._loop.connect_accepted_socket(factory, sock, ssl=tls)
        except (OSError, TimeoutError) as exc:  # A handshake that came to nothing.
            _log.debug("a connection ended before it began: %s", exc)
            sock.close()
