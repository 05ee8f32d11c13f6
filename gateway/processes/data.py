"""A data plane: a gateway that accepts from sockets others accept from too, and decides by what all of them know."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from functools import partial

import aiohttp
import msgspec
from aiohttp import web

from gateway.config import Config
from gateway.processes import families
from gateway.processes.assignment import BOARD_SOCKET, Assignment
from gateway.processes.board_client import BoardClient
from gateway.processes.books import Books
from gateway.processes.derived import has_board
from gateway.processes.handover import Giving, Taking
from gateway.processes.internal import FRONT_SOCKET, METRICS, NOTICE, RECORD, Notice
from gateway.processes.recording import Rows
from gateway.processes.seats import Table
from gateway.processes.unix_server import UnixServer
from gateway.proxy.body import read_body
from gateway.proxy.errors import ApiError, json_response
from gateway.proxy.server import HttpServer
from gateway.proxy.shared_socket import SharedSocket
from gateway.run import Gateway
from gateway.siblings import Siblings

_LAST_REQUESTS_S = 2.0
"""Connections that cannot be given away may bring one more request, whose answer says that they close."""
_LOOK_S = 0.05
_NOBODY_S = 5.0
"""Where no worker is known by then, there is none."""
_LONGEST_S = 30.0
"""What is not known by then is not to be had: it serves all the same."""
_FRONT_TIMEOUT_S = 10.0
_LONGEST_NOTICE_BYTES = 1 << 20


class DataPlaneProcess(Gateway):
    """`start`, and `accept` when its turn has come. `config`: as `derived.of_data` has it; `given`: as it was given."""

    def __init__(self, config: Config, given: Config, it: Assignment, table: Table) -> None:
        """Raises UserError."""
        self._it = it
        self._seat = table.seat(it.seat)
        self._began_s = time.monotonic()
        board = it.shared(BOARD_SOCKET)
        siblings = Siblings(
            hub=partial(BoardClient, board) if has_board(given) else None,
            account=Books(table, it.seat).account,
            places=self._seat,
            keeps_learned=it.number == 0,
        )
        self._sockets = [socket.socket(fileno=fd) for fd in it.listen_fds]
        self._shared: list[SharedSocket] = []
        super().__init__(config, siblings)
        self._entrance = self.listeners.pop()
        self._giving = Giving(socket.socket(fileno=it.give_fd))
        self._taken = socket.socket(fileno=it.take_fd)
        self._taking: Taking | None = None
        self.faces.metrics_of_all = self._metrics_of_all
        self.admin.open()
        self.admin.pages[METRICS] = self._metrics
        self.admin.pages[NOTICE] = self._notice
        self.admin.pages[RECORD] = Rows(self.core.recorder).page

    @property
    def face_name(self) -> str:
        return "gateway"

    @property
    def shown_name(self) -> str:
        return f"gateway, process {self._it.number} of {self._it.of}"

    def admin_server(self, host: str, port: int, tls: ssl.SSLContext | None) -> HttpServer:
        return UnixServer(self.admin.handle, self._it.admin_path)

    def listen(self, host: str, port: int) -> None:
        self._shared = [SharedSocket(each, self._seat) for each in self._sockets]
        tls = None if self.certificate is None else self.certificate.context
        self.listeners.append(self.plane.listener(self.config.gateway.http, host, port, tls, self._shared))

    def tell_start(self) -> None:
        pass  # Whoever is to hear of it is told by the supervisor.

    async def accept(self) -> None:
        """Take connections, also those of who leaves."""
        if self.listeners or self.plane.draining:
            return
        self.listeners.append(self._entrance)
        await self._entrance.start()
        # Also where it could give none itself: a restart may change how clients are spoken to.
        self._taking = Taking(self._taken, self._shared[0].adopt if self.certificate is None else _close)

    async def settled(self) -> None:
        """Until it knows what there is to know: all workers were asked, and the index is there."""
        while not self._is_settled():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(_LOOK_S)

    def _is_settled(self) -> bool:
        core, age_s = self.core, time.monotonic() - self._began_s
        link, workers = core.link, core.fleet.workers
        if age_s > _LONGEST_S:
            return True
        if (not workers and age_s < _NOBODY_S) or (link is not None and not link.is_live):
            return False
        if core.replicas is not None and not core.replicas.is_shared:
            return False
        return all(name in core.capabilities or core.scraper.reachable(name) is False for name in workers)

    async def leave(self, timeout_s: float) -> int:
        """Drain, with idle connections given to the processes that stay. How many requests are left."""
        if self._taking is not None:
            self._taking.close()
            self._entrance.give_away(self._giving.give)
        until_s = time.monotonic() + timeout_s
        await self.drain(timeout_s)
        last_s = min(until_s, time.monotonic() + _LAST_REQUESTS_S)
        while self._entrance.keeps_some and time.monotonic() < last_s:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(_LOOK_S)
        left = await self.drain(max(0.0, until_s - time.monotonic()))
        while not self._giving.is_done:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(_LOOK_S)
        return left

    async def drain(self, timeout_s: float) -> int:
        if self._taking is not None:
            self._taking.close()
        return await super().drain(timeout_s)

    async def close(self) -> None:
        if self._taking is not None:
            self._taking.close()
        await super().close()
        self._giving.close()

    # ---- for the supervisor ------------------------------------------------------------------------------------------

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=await self.faces.metrics_as(families.read))

    async def last_metrics(self) -> bytes:
        return await self.faces.metrics_as(families.read)

    async def _notice(self, request: web.BaseRequest) -> web.Response:
        """What another process was told to do to engines."""
        notice = msgspec.json.decode(await read_body(request, _LONGEST_NOTICE_BYTES), type=Notice)
        workers = self.core.fleet.workers
        for name in notice.cleared:
            if name in workers:
                self.core.planner.forget_blocks(name)
        if not set(workers) - set(notice.cleared):
            self.core.prefixes.clear()
        if notice.models:
            await self.core.scraper.read_models(list(workers))
        return json_response(b"{}")

    async def _metrics_of_all(self) -> bytes:
        try:
            connector = aiohttp.UnixConnector(self._it.shared(FRONT_SOCKET))
            timeout = aiohttp.ClientTimeout(total=_FRONT_TIMEOUT_S)
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get("http://supervisor/metrics") as answer,
            ):
                answer.raise_for_status()
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            message = "The metrics of the other processes cannot be had now. Ask again."
            raise ApiError(503, message, code="processes_unreachable", retry_after_s=1.0) from None


def _close(connection: socket.socket) -> None:
    """One without TLS, which is not spoken here: its client makes another, and is told what is wrong with it."""
    connection.close()
