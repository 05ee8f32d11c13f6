"""The hub: it follows the engines' KV events for all data planes, and holds the board they tell each other by."""

from __future__ import annotations

import ssl

from aiohttp import web

from gateway.config import Config
from gateway.indexservice.run import Indexer
from gateway.processes import families
from gateway.processes.assignment import BOARD_SOCKET, Assignment
from gateway.processes.board_server import BoardServer
from gateway.processes.derived import has_board, redis_of_board
from gateway.processes.internal import METRICS, NOTICE
from gateway.processes.unix_server import UnixServer
from gateway.proxy.errors import json_response
from gateway.proxy.server import HttpServer
from gateway.replicas.schema import Keys


def board_of(given: Config, it: Assignment) -> BoardServer | None:
    """None: Redis has its place."""
    if not has_board(given):
        return None
    told = redis_of_board(given)
    return BoardServer(it.own(BOARD_SOCKET), Keys(told.prefix, told.fleet))


class HubProcess(Indexer):
    """`config` as `derived.of_hub` has it, `given` as it was given."""

    changes_workers = True

    def __init__(self, config: Config, given: Config, it: Assignment) -> None:
        """Raises UserError."""
        self._it = it
        super().__init__(config)
        self.listeners.clear()  # Its metrics are told with those of the others.
        self._board = board_of(given, it)
        self.admin.open()
        self.admin.pages[METRICS] = self._metrics
        self.admin.pages[NOTICE] = self._notice

    @property
    def face_name(self) -> str:
        return "indexer"

    @property
    def shown_name(self) -> str:
        return "gateway, hub"

    def admin_server(self, host: str, port: int, tls: ssl.SSLContext | None) -> HttpServer:
        return UnixServer(self.admin.handle, self._it.admin_path)

    def tell_start(self) -> None:
        pass

    @property
    def is_ready(self) -> bool:
        return self.server.is_serving()

    async def start(self) -> None:
        if self._board is not None:
            await self._board.start()  # It knows nothing that it would have to learn first.
        await super().start()

    async def close(self) -> None:
        if self._board is not None:
            await self._board.close()
        await super().close()

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=await self.faces.metrics_as(families.read))

    async def last_metrics(self) -> bytes:
        return await self.faces.metrics_as(families.read)

    async def _notice(self, request: web.BaseRequest) -> web.Response:
        return json_response(b"{}")  # The process that was asked has told it already.
