"""The hub: it follows the engines' KV events for all data planes, and holds the board they tell each other by."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
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
from indexer import Holder, SavedRank

_log = logging.getLogger(__name__)


def board_of(given: Config, it: Assignment) -> BoardServer | None:
    """None: Redis has its place."""
    if not has_board(given):
        return None
    told = redis_of_board(given)
    return BoardServer(it.own(BOARD_SOCKET), Keys(told.prefix, told.fleet))


class _Left(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    rank: int
    saved: SavedRank


_left = msgspec.msgpack.Decoder(list[_Left])


class HubProcess(Indexer):
    """`config` as `derived.of_hub` has it, `given` as it was given."""

    changes_workers = True

    def __init__(self, config: Config, given: Config, it: Assignment) -> None:
        """Raises UserError."""
        self._it = it
        super().__init__(config)
        self.listeners.clear()  # Its metrics are told with those of the others.
        self._board = board_of(given, it)
        assert self.core.publishing.own is not None  # noqa: S101 - an indexer follows the engines itself
        self._ingest = self.core.publishing.own
        self._ingest.hold()
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

    # ---- from one hub to the next, where engines connect to it -------------------------------------------------------

    async def hand_over(self) -> None:
        """Listen for engines no more, and leave what is known of those that cannot be asked again."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[dict[Holder, SavedRank]] = loop.create_future()

        def tell(saved: dict[Holder, SavedRank]) -> None:
            loop.call_soon_threadsafe(done.set_result, saved)

        self._ingest.hand_over(tell)
        await asyncio.to_thread(_write, self._it.handover_path, await done)

    async def take_over(self) -> None:
        """Listen for engines, and go on from what was left of those that are the same processes still."""
        left = await asyncio.to_thread(_read, self._it.handover_path)
        saved = {(it.worker, it.rank): it.saved for it in left if self._is_same(it)}
        self._ingest.take_over(saved)

    def _is_same(self, it: _Left) -> bool:
        """Whether the engine that made the events is known to run on; if it ends later, that shows as ever."""
        known = self.core.scraper.status_of(it.worker)
        start_s = None if known is None or known.stats is None else known.stats.process_start_s
        began_s = it.saved.epoch_ts
        return start_s is not None and began_s is not None and start_s <= began_s

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=await self.faces.metrics_as(families.read))

    async def last_metrics(self) -> bytes:
        return await self.faces.metrics_as(families.read)

    async def _notice(self, request: web.BaseRequest) -> web.Response:
        return json_response(b"{}")  # The process that was asked has told it already.


def _write(path: str, saved: Mapping[Holder, SavedRank]) -> None:
    """Whole or not at all. Where there is no room for it, who comes after begins with nothing."""
    left = [_Left(worker, rank, each) for (worker, rank), each in saved.items()]
    if not left:
        return
    try:
        Path(path + ".part").write_bytes(msgspec.msgpack.encode(left))
        os.replace(path + ".part", path)
    except OSError as exc:
        _log.warning("what is known of %d ranks cannot be left to the next hub: %s", len(left), exc.strerror or exc)
        with suppress(OSError):
            os.unlink(path + ".part")


def _read(path: str) -> list[_Left]:
    """What was left, once."""
    try:
        data = Path(path).read_bytes()
        os.unlink(path)
        return _left.decode(data)
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as exc:
        _log.warning("what the hub before left cannot be read: %s", exc)
        return []
