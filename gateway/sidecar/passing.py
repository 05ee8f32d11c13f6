"""Everything that is no inference, to the engine as it is and back: its metrics, models, controls, whatever it has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.bad_request import BadRequest
from gateway.handoff.bodies import clean
from gateway.proxy import errors
from gateway.proxy.aio_incoming import AioIncoming
from gateway.proxy.body import read_body
from gateway.proxy.errors import ApiError, json_response
from gateway.proxy.headers import request_headers, response_headers
from gateway.proxy.peer import Broken, NoConnection, Upstream, UpstreamError
from gateway.proxy.relay import Answer, ClientStalled, UpstreamBroke
from gateway.proxy.routes import CONTROLS
from gateway.proxy.server import Page, run_page, target_of
from gateway.proxy.upstream import UpstreamPool

_HEALTH_TIMEOUT_S = 2.0
_NOT_PASSED = frozenset({"CONNECT", "TRACE"})
_PASSED = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_MOST_AT_ONCE = 256
"""Each may hold a body; the engine's own pages are small and few."""


class Passing:
    """`engine_of` names the engine a request is for; `cleared(engine)` is called when its prefix cache is gone,
    `changed(engine)` when its models may have changed.
    """

    def __init__(
        self,
        upstreams: UpstreamPool,
        engine_of: Callable[[web.BaseRequest], str],
        *,
        cleared: Callable[[str], None],
        changed: Callable[[str], Awaitable[None]],
        draining: Callable[[], bool],
        max_body_bytes: int,
        min_body_bytes_per_s: int,
    ) -> None:
        self._upstreams = upstreams
        self._engine_of = engine_of
        self._cleared = cleared
        self._changed = changed
        self._draining = draining
        self._body_bounds = max_body_bytes, min_body_bytes_per_s
        self._running = 0

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        """The engine's answer, streamed. A connection it refuses is 503, one that breaks 502."""
        return await self._pass(request, None)

    def unless_unknown(self, own: Page) -> Page:
        """The engine's page if it has one at that path, else `own`."""

        async def page(request: web.BaseRequest) -> web.StreamResponse:
            return await self._pass(request, own)

        return page

    async def health(self, request: web.BaseRequest) -> web.Response:
        """200 while the engine says so, else 503."""
        if request.method not in ("GET", "HEAD"):
            raise errors.method_not_allowed(request.method, "/health", frozenset({"GET", "HEAD"}))
        engine = self._engine_of(request)
        reason = await self._illness(engine, request)
        if reason is not None:
            raise ApiError(503, f"The engine {engine} {reason}.", type_=errors.UNAVAILABLE, code="engine_unhealthy")
        return json_response(b'{"status":"ok"}')

    async def _illness(self, engine: str, request: web.BaseRequest) -> str | None:
        upstream = self._upstreams.get(engine)
        if upstream is None:
            return "is not known yet"
        upstream.acquire()
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                headers = request_headers(request.raw_headers)
                async with await upstream.send("GET", "/health", headers, b"", fresh=True) as response:
                    return None if response.status == 200 else f"answers /health with {response.status}"
        except TimeoutError:
            return f"does not answer /health within {_HEALTH_TIMEOUT_S:g} s"
        except (UpstreamError, OSError):
            return "does not answer /health"
        finally:
            self._upstreams.release(upstream)

    async def _pass(self, request: web.BaseRequest, own: Page | None) -> web.StreamResponse:
        if self._running >= _MOST_AT_ONCE:
            raise errors.too_many_requests(_MOST_AT_ONCE)
        self._running += 1
        try:
            return await self._exchange(request, own)
        finally:
            self._running -= 1

    async def _exchange(self, request: web.BaseRequest, own: Page | None) -> web.StreamResponse:
        began_s = time.monotonic()
        target = target_of(request)
        if request.method in _NOT_PASSED or not target.startswith("/"):
            raise errors.method_not_allowed(request.method, target[:200], _PASSED)
        engine = self._engine_of(request)
        upstream = self._upstreams.get(engine)
        if upstream is None:
            raise _unreachable(engine, 503, "is not known yet")
        # Engines obey KV-transfer keys on any path, and some of those kill them.
        try:
            body = clean(await read_body(request, *self._body_bounds))
        except BadRequest as exc:
            raise ApiError(400, str(exc), code=exc.code, param=exc.param) from None
        upstream.acquire()
        answer: Answer | None = None
        try:
            try:
                answer = await self._ask(request, upstream, engine, body)
            except ApiError:
                if own is None:
                    raise
                return await run_page(own, request)
            if own is not None and answer.status == 404:
                return await run_page(own, request)
            await self._note(request, engine, answer.status)
            return await self._relay(request, answer, began_s)
        finally:
            if answer is not None:
                answer.close()
            self._upstreams.release(upstream)

    async def _ask(self, request: web.BaseRequest, upstream: Upstream, engine: str, body: bytes) -> Answer:
        headers = request_headers(request.raw_headers)
        response = None
        try:
            response = await upstream.send(request.method, target_of(request), headers, body)
            if not 200 <= response.status <= 599:
                raise Broken("not a status of a final answer")  # 101 would make us a tunnel.
            return Answer(response, await response.readany())
        except BaseException as exc:
            if response is not None:
                response.close()
            if isinstance(exc, NoConnection) and exc.refused:
                raise _unreachable(engine, 503, "refuses connections") from exc
            if isinstance(exc, UpstreamError | OSError):
                raise _unreachable(engine, 502, "gave no answer") from exc
            raise

    async def _relay(self, request: web.BaseRequest, answer: Answer, began_s: float) -> web.StreamResponse:
        headers = response_headers(answer.upstream.raw_headers)
        left_s = max(0.0, began_s + self._upstreams.request_timeout_s - time.monotonic())
        deadline_s = asyncio.get_running_loop().time() + left_s
        incoming = AioIncoming(request)
        try:
            await answer.relay(incoming, headers, None, None, close=self._draining(), deadline_s=deadline_s)
        except (UpstreamBroke, ClientStalled, ConnectionError):
            incoming.abort()  # Half an answer must not look whole, and a stalled client is not waited for.
        return incoming.response(None)

    async def _note(self, request: web.BaseRequest, engine: str, status: int) -> None:
        """What the engine was just told to do changes what we know of it."""
        url = request.rel_url
        control = CONTROLS.get(url.path)
        if control is None or control.method != request.method or status >= 400:
            return
        if control.clears_cache(url.query):
            self._cleared(engine)
        if control.models:
            await self._changed(engine)


def _unreachable(engine: str, status: int, what: str) -> ApiError:
    type_ = errors.UNAVAILABLE if status == 503 else errors.UPSTREAM
    return ApiError(status, f"The engine {engine} {what}.", type_=type_, code="engine_unreachable", retry_after_s=1)
