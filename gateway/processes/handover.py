"""Idle connections of clients, given by a process that leaves to one that goes on with them: their clients notice
nothing, and no request is lost that is sent on one just then.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

_log = logging.getLogger(__name__)
_AGAIN_S = 0.01
_FULL = (BlockingIOError, InterruptedError)


class Giving:
    """Into `sock`, a descriptor at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._waiting: list[socket.socket] = []
        self._timer: asyncio.TimerHandle | None = None
        self.n_given = 0

    def give(self, connection: socket.socket) -> None:
        self._waiting.append(connection)
        self._send()

    @property
    def is_done(self) -> bool:
        return not self._waiting

    def _send(self) -> None:
        self._timer = None
        while self._waiting:
            try:
                socket.send_fds(self._sock, [b"c"], [self._waiting[-1].fileno()])
            except _FULL:
                self._timer = asyncio.get_running_loop().call_later(_AGAIN_S, self._send)
                return
            except OSError as exc:
                _log.warning("a connection could not be given to another process and is closed: %s", exc.strerror)
            else:
                self.n_given += 1
            self._waiting.pop().close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for each in self._waiting:
            each.close()
        self._waiting = []


class Taking:
    """From `sock`, one at a time, so that all who take get some."""

    def __init__(self, sock: socket.socket, adopt: Callable[[socket.socket], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._adopt = adopt
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._take)
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock.fileno())

    def _take(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        except _FULL:
            return  # Another was quicker.
        if not data:
            self.close()
        for fd in fds:
            self._adopt(socket.socket(fileno=fd))
