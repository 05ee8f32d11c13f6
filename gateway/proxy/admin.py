"""Engine controls (`routes.CONTROLS`) sent on to all workers, or to those named by `?worker=`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from gateway.proxy import errors
from gateway.proxy.body import read_body
from gateway.proxy.errors import json_response
from gateway.proxy.headers import request_headers
from gateway.proxy.peer import Upstream, UpstreamError
from gateway.proxy.routes import CONTROLS, Control
from gateway.proxy.server import target_of
from gateway.proxy.upstream import UpstreamPool

_TIMEOUT_S = 120.0
"""Waking an engine up reloads its weights."""
_LONGEST_BODY_BYTES = 1 << 20


class EngineControls:
    """`cleared(worker)` is called when a worker's prefix cache is gone, `changed(worker)` when its models may have
    changed, before the answer goes out.
    """

    def __init__(
        self,
        upstreams: UpstreamPool,
        workers: Callable[[], list[str]],
        *,
        cleared: Callable[[str], None],
        changed: Callable[[str], Awaitable[None]],
    ) -> None:
        self._upstreams = upstreams
        self._workers = workers
        self._cleared = cleared
        self._changed = changed

    async def page(self, request: web.BaseRequest) -> web.Response:
        """`{"results": {worker: {"status", "body"}}}`; 200 if every worker said yes, their status if all said the same
        no, else 502.
        """
        url, path = request.rel_url, target_of(request).partition("?")[0]
        control = CONTROLS[path]
        if request.method != control.method:
            raise errors.method_not_allowed(request.method, path, frozenset({control.method}))
        workers = self._named(url)
        body = await read_body(request, _LONGEST_BODY_BYTES)
        target = URL.build(path=control.path, query=[(k, v) for k, v in url.query.items() if k != "worker"])
        headers = request_headers(request.raw_headers)
        answers = await asyncio.gather(
            *(self.ask(worker, control, target.raw_path_qs, headers, body) for worker in workers)
        )
        done = [each for each, said in zip(workers, answers, strict=True) if said["status"] and said["status"] < 400]
        if control.clears_cache(url.query):
            for worker in done:
                self._cleared(worker)
        if control.models:
            await asyncio.gather(*map(self._changed, done))
        results = dict(zip(workers, answers, strict=True))
        return json_response(msgspec.json.encode({"results": results}), _overall({a["status"] for a in answers}))

    def _named(self, url: URL) -> list[str]:
        known = self._workers()
        named = url.query.getall("worker", [])
        unknown = sorted(set(named) - set(known))
        if unknown:
            raise errors.unknown_worker(unknown, known)
        if not known:
            raise errors.no_worker("none is known")
        return list(dict.fromkeys(named)) or known

    async def ask(
        self, worker: str, control: Control, target: str, headers: CIMultiDict[str], body: bytes
    ) -> dict[str, Any]:
        """`{"status", "body"}` of one worker's answer; the status is None if there was none."""
        upstream = self._upstreams.get(worker)
        if upstream is None:
            return {"status": None, "body": "the worker has just been removed"}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._exchange(upstream, control, target, headers, body)
        except (UpstreamError, OSError) as exc:
            return {"status": None, "body": f"no answer: {str(exc) or type(exc).__name__}"}

    async def _exchange(
        self, upstream: Upstream, control: Control, target: str, headers: CIMultiDict[str], body: bytes
    ) -> dict[str, Any]:
        upstream.acquire()
        try:
            async with await upstream.send(control.method, target, headers, body, fresh=True) as response:
                raw = await response.read() or b""
        finally:
            self._upstreams.release(upstream)
        try:
            said: Any = msgspec.json.decode(raw) if raw else None
        except (msgspec.MsgspecError, RecursionError):
            said = raw.decode("utf-8", "replace")
        return {"status": response.status, "body": said}


def _overall(statuses: set[int | None]) -> int:
    if all(status is not None and status < 400 for status in statuses):
        return 200
    return next(iter(statuses)) or 502 if len(statuses) == 1 else 502
