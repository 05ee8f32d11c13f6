"""Does an address refuse connections? ZeroMQ tells that connecting failed, but not why.

Refused means that no process listens there: the engine is gone, and with it its cache. A timeout or an unreachable
host says nothing about the engine.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable

from gateway.engine.turns import Turns

_TIMEOUT_S = 2.0


def address_of(endpoint: str) -> tuple[socket.AddressFamily, str | tuple[str, int]] | None:
    """What to connect a plain socket to; None for an endpoint with a host name (resolving could block)."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        return socket.AF_UNIX, "\0" + path[1:] if path.startswith("@") else path
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError:
        return None
    return (socket.AF_INET6 if address.version == 6 else socket.AF_INET), (str(address), number)


class RefusalProbe:
    """One attempt to connect. Calls `refused` if, and only if, the address refuses."""

    def __init__(self, turns: Turns, endpoint: str, refused: Callable[[], None]) -> None:
        self._turns = turns
        self._refused = refused
        self._socket: socket.socket | None = None
        where = address_of(endpoint)
        if where is None:
            return
        try:
            plain = socket.socket(where[0], socket.SOCK_STREAM)
        except OSError:
            return
        plain.setblocking(False)
        self._socket = plain
        try:
            plain.connect(where[1])
        except (ConnectionRefusedError, FileNotFoundError):
            self._end(refused=True)
        except BlockingIOError:
            turns.watch_writable(plain, self._writable)
            turns.after(_TIMEOUT_S, self.close)
        except OSError:
            self._end(refused=False)
        else:
            self._end(refused=False)

    @property
    def is_over(self) -> bool:
        return self._socket is None

    def close(self) -> None:
        if self._socket is not None:
            self._turns.unwatch(self._socket)
            self._socket.close()
            self._socket = None

    def _writable(self) -> None:
        if self._socket is None:
            return
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.close()
        if error == errno.ECONNREFUSED:
            self._refused()

    def _end(self, *, refused: bool) -> None:
        assert self._socket is not None  # noqa: S101 - the caller has just opened it
        self._socket.close()
        self._socket = None
        if refused:
            self._refused()
