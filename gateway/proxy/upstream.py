"""Connections to the workers: one pool each, so that a slow or dead worker ties up only its own."""

from __future__ import annotations

import asyncio

from gateway.http1.upstream import RawUpstream
from gateway.proxy.aio_upstream import AioUpstream
from gateway.proxy.peer import PoolSettings, Upstream

_KINDS = {"fast": RawUpstream, "aiohttp": AioUpstream}


def new_upstream(url: str, settings: PoolSettings, server_name: str | None = None) -> Upstream:
    return _KINDS[settings.http](url, settings, server_name)


class UpstreamPool:
    """All workers' connections, by worker name."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._upstreams: dict[str, Upstream] = {}
        self._retiring: set[Upstream] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def request_timeout_s(self) -> float:
        return self._settings.request_timeout_s

    def set(self, worker: str, url: str, server_name: str | None = None) -> Upstream:
        """The worker's connections; new ones if its URL or its name changed."""
        known = self._upstreams.get(worker)
        if known is not None and (known.base_url, known.server_name) == (url.rstrip("/"), server_name):
            return known
        self.remove(worker)
        upstream = self._upstreams[worker] = new_upstream(url, self._settings, server_name)
        return upstream

    def get(self, worker: str) -> Upstream | None:
        return self._upstreams.get(worker)

    def remove(self, worker: str) -> None:
        """Give up a worker's connections; requests that still run there may end."""
        upstream = self._upstreams.pop(worker, None)
        if upstream is not None:
            self._retiring.add(upstream)
            if upstream.retire():
                self._close_soon(upstream)

    def release(self, upstream: Upstream) -> None:
        """An exchange with `upstream` is over."""
        if upstream.release():
            self._close_soon(upstream)

    async def close(self) -> None:
        """Cut whatever still runs."""
        for worker in list(self._upstreams):
            self.remove(worker)
        await asyncio.gather(*self._closing, *(upstream.close() for upstream in self._retiring))

    def _close_soon(self, upstream: Upstream) -> None:
        self._retiring.discard(upstream)
        task = asyncio.get_running_loop().create_task(upstream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
