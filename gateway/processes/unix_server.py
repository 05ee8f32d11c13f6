"""Pages on a Unix socket in the gateway's private folder, whoever can open which may ask."""

from __future__ import annotations

import os
from contextlib import suppress

from aiohttp import web

from gateway.proxy.connection import ConnectionFactory
from gateway.proxy.server import Handler, HttpServer


class UnixServer(HttpServer):
    def __init__(self, handler: Handler, path: str) -> None:
        super().__init__(handler, "", 0)
        self._path = path
        self._pages: web.ServerRunner | None = None

    async def start(self) -> None:
        """Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._pages = web.ServerRunner(ConnectionFactory(self._handler), shutdown_timeout=0.5)
        await self._pages.setup()
        await web.UnixSite(self._pages, self._path).start()

    @property
    def url(self) -> str:
        return f"unix:{self._path}"

    async def stop_accepting(self) -> None:
        """Until the end it is asked how it is."""

    async def close(self) -> None:
        if self._pages is not None:
            await self._pages.cleanup()
            self._pages = None
