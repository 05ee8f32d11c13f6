"""The connections to one worker: kept while they are idle, but not for long."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

import aiohappyeyeballs
from multidict import CIMultiDict

from gateway.addresses import usable
from gateway.http1.answer import RawAnswer
from gateway.http1.expiry import Expiry
from gateway.http1.rows import rows
from gateway.http1.wire import Wire
from gateway.proxy.peer import NoConnection, PoolSettings, Upstream
from gateway.proxy.timed import TimedBody

_BREAKS = re.compile(r"[ \r\n]")
_PORTS = {"http": 80, "https": 443}
_NEXT_ADDRESS_AFTER_S = 0.25
_ADDRESSES_KEPT_S = 10.0
_WITH_BODY = frozenset({"PATCH", "POST", "PUT"})


class RawUpstream(Upstream):
    """Every exchange has a connection to itself; the one used last is used next."""

    def __init__(self, url: str, settings: PoolSettings, server_name: str | None = None) -> None:
        super().__init__(url, settings, server_name)
        try:
            parts = urlsplit(self.base_url)
            self._host, self._port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        except (KeyError, ValueError):  # Said by who tries to connect.
            parts = urlsplit("http://")
            self._host, self._port = "", 0
        self._tls = _context(settings.tls) if parts.scheme == "https" else None
        shown = f"[{self._host}]" if ":" in self._host else self._host
        if self._port != _PORTS.get(parts.scheme):
            shown += f":{self._port}"
        self._line_end = f" HTTP/1.1\r\nHost: {shown}\r\n"
        self._prefix = parts.path
        self._addresses: list[Any] = []
        self._addresses_until_s = 0.0
        self._wires: set[Wire] = set()
        self._idle: Expiry[Wire] = Expiry(settings.pool_idle_s, Wire.close)
        self._asking: Expiry[Wire] = Expiry(settings.request_timeout_s, _too_long)

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    async def send(
        self,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | TimedBody,
        *,
        fresh: bool = False,
        ask: bool = False,
    ) -> RawAnswer:
        size = body.size if isinstance(body, TimedBody) else len(body)
        head = self._head(method, target, headers, size or 0, ask)
        wire = None if fresh else self._idle.newest()
        while wire is not None and not wire.usable:
            wire = self._idle.newest()
        if wire is None:
            wire = await self._connect()
        self._asking.add(wire)
        answer = wire.ask(method, head, body, ask=ask)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    async def close(self) -> None:
        self._idle.close()
        self._asking.close()
        for wire in list(self._wires):
            wire.cut()

    def _head(self, method: str, target: str, headers: CIMultiDict[str], size: int, ask: bool) -> bytes:
        if _BREAKS.search(target):
            raise ValueError("a space or a line end in a target")
        length = f"Content-Length: {size}\r\n" if size or method in _WITH_BODY else ""
        expect = "Expect: 100-continue\r\n" if ask else ""
        text = f"{method} {self._prefix}{target}{self._line_end}{rows(headers)}{length}{expect}\r\n"
        return text.encode("utf-8", "surrogateescape")

    # ---- connections -------------------------------------------------------------------------------------------------

    async def _connect(self) -> Wire:
        loop = asyncio.get_running_loop()
        if not self._host:
            raise NoConnection("its URL names no host")
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                peer = await aiohappyeyeballs.start_connection(
                    await self._resolved(loop), happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_S, loop=loop
                )
                try:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    _, wire = await loop.create_connection(
                        lambda: Wire(loop, self._free, self._lost),
                        sock=peer,
                        ssl=self._tls,
                        server_hostname=None if self._tls is None else self.server_name or self._host,
                    )
                except BaseException:
                    peer.close()
                    raise
        except TimeoutError:
            raise NoConnection("no connection in time") from None
        except UnicodeError:
            raise NoConnection("its host is no name that can be looked up") from None
        except OSError as exc:
            self._addresses.clear()  # It may be elsewhere by now.
            raise NoConnection(str(exc), refused=exc.errno == errno.ECONNREFUSED) from exc
        self._wires.add(wire)
        return wire

    async def _resolved(self, loop: asyncio.AbstractEventLoop) -> list[Any]:
        now_s = loop.time()
        if not self._addresses or now_s >= self._addresses_until_s:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = found if self._settings.link_local else usable(found)
            self._addresses_until_s = now_s + _ADDRESSES_KEPT_S
        return list(self._addresses)

    def _free(self, wire: Wire) -> None:
        self._asking.discard(wire)
        if self._retired:
            wire.close()
        else:
            self._idle.add(wire)

    def _lost(self, wire: Wire) -> None:
        self._asking.discard(wire)
        self._idle.discard(wire)
        self._wires.discard(wire)


def _too_long(wire: Wire) -> None:
    wire.give_up(TimeoutError())


def _context(tls: ssl.SSLContext | bool) -> ssl.SSLContext:
    if isinstance(tls, ssl.SSLContext):
        return tls
    context = ssl.create_default_context()
    if not tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
