"""Listeners and what stands at the door: which path goes where, how many at once, and how to leave.

Drain: stop accepting, let running requests end, then cut what is left.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from gateway.http1.listener import Listener
from gateway.proxy import errors
from gateway.proxy.access import Record
from gateway.proxy.aio_incoming import AioIncoming
from gateway.proxy.connection import ConnectionFactory
from gateway.proxy.errors import ApiError
from gateway.proxy.handler import Exchange, Holder
from gateway.proxy.incoming import Incoming, Reply
from gateway.proxy.parts import Parts
from gateway.proxy.peer import Http
from gateway.proxy.places import Places
from gateway.proxy.routes import ROUTES, Route
from gateway.proxy.shared_socket import SharedSocket

_log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Page = Callable[[web.BaseRequest], Awaitable[web.StreamResponse] | web.StreamResponse]

_BACKLOG = 4096
_CUT_S = 0.5
_BODIES_PER_PLACE = 4
"""So many more requests than may be served can be sending their bodies; these take memory as they come."""
_MOST_PREFLIGHTS = 64
"""At once. They need no key, and take nobody's place but each other's."""


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard one (two per request); returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as exc:
            _log.warning("the limit on open files stays at %d: %s", soft, exc)
            return soft
    return hard


def target_of(request: web.BaseRequest) -> str:
    """Path and query as sent; of an absolute-form target, those of its URL."""
    target = request.raw_path
    return target if target.startswith("/") else request.rel_url.raw_path_qs


class HttpServer:
    """One listening address in front of one handler; with `tls` it speaks TLS. `shared`: sockets that listen already,
    in place of `host` and `port`.
    """

    def __init__(
        self,
        handler: Handler,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        shared: Sequence[SharedSocket] = (),
    ) -> None:
        self._handler = handler
        self.host = host
        self.port = port
        self._tls = tls
        self._shared = shared
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None

    async def start(self) -> None:
        """Raises OSError when the address is taken."""
        self._runner = web.ServerRunner(ConnectionFactory(self._handler), shutdown_timeout=_CUT_S)
        await self._runner.setup()
        if self._shared:
            for each in self._shared:
                each.listen(self._protocol, self._tls, self._n_open)
            self.port = self._shared[0].port
            return
        self._site = web.TCPSite(self._runner, self.host, self.port, backlog=_BACKLOG, ssl_context=self._tls)
        try:
            await self._site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._runner.addresses[0][1]

    def _protocol(self) -> asyncio.BaseProtocol:
        return self._server_of_runner()()

    def _n_open(self) -> int:
        return len(self._server_of_runner().connections)

    def _server_of_runner(self) -> web.Server:
        runner = self._runner
        server = None if runner is None else runner.server
        assert server is not None  # noqa: S101 - it was set up by `start`
        return server

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    async def stop_accepting(self) -> None:
        """No new connections. Those there are may each bring one more request, whose answer closes them."""
        for each in self._shared:
            each.close()
        if self._site is not None:
            await self._site.stop()
            self._site = None

    def give_away(self, give: Callable[[socket.socket], None]) -> None:
        """Nothing: aiohttp's connections cannot be taken from it."""

    @property
    def n_heads(self) -> int:
        """0: aiohttp does not say."""
        return 0

    def refuse_heads(self) -> None:
        """Nothing: aiohttp closes them."""

    @property
    def keeps_some(self) -> bool:
        """Whether there are connections that cannot be given away."""
        if self._runner is None:  # It was never started.
            return False
        return self._n_open() > 0 or any(each.is_connecting for each in self._shared)

    async def close(self) -> None:
        """Cut what still runs."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class DataPlane:
    """The main port: inference by `ROUTES`, and `pages` (path -> handler) beside it.

    `prefixes` are pages for everything below a path, `fallback` one for all other paths.
    """

    def __init__(self, parts: Parts, *, max_concurrency: int, places: Places | None = None) -> None:
        """`places`: where several processes have `max_concurrency` together."""
        self.pages: dict[str, Page] = {}
        self.prefixes: dict[str, Page] = {}
        self.fallback: Page | None = None
        self.draining = False
        self.cutting = False
        self.in_flight = 0
        """Those that still send their bodies included."""
        self.places = places or Places()
        self._preflights = 0
        self.parts = parts
        self.max_concurrency = max_concurrency
        self._idle = asyncio.Event()
        self._idle.set()

    def listener(
        self,
        http: Http,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        shared: Sequence[SharedSocket] = (),
    ) -> Listener | HttpServer:
        """One of its addresses, to be started; those of `shared`, if there are any."""
        if http == "aiohttp":
            return HttpServer(self.handle, host, port, tls, shared)
        return Listener(self.serve, ConnectionFactory(self.handle), host, port, tls, shared)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """What aiohttp received."""
        target = target_of(request)
        path = target.partition("?")[0]
        route = ROUTES.get(path)
        incoming = AioIncoming(request)
        if route is None:
            return await self._page(request, incoming, path)
        return incoming.response(await self.serve(incoming, route, target))

    async def exchange(
        self, request: web.BaseRequest, route: Route, target: str, holder: Holder | None = None
    ) -> web.StreamResponse:
        """What aiohttp received, by an engine: by the one that `holder` names, if it is given."""
        incoming = AioIncoming(request)
        return incoming.response(await self.serve(incoming, route, target, holder))

    async def serve(self, request: Incoming, route: Route, target: str, holder: Holder | None = None) -> Reply | None:
        """One request for an engine. An answer of our own; None: a worker's was sent, or broken off."""
        if request.method not in route.methods:
            path = target.partition("?")[0]
            return self._refuse(request, path, errors.method_not_allowed(request.method, path, route.methods))
        is_preflight = request.method == "OPTIONS"
        if is_preflight:
            most, is_full = _MOST_PREFLIGHTS, self._preflights >= _MOST_PREFLIGHTS
        else:
            places, most = self.places, self.max_concurrency
            is_full = places.served >= most or places.bodies >= _BODIES_PER_PLACE * most
        if is_full:
            self.parts.metrics.rejected("over_concurrency")
            return self._refuse(request, target.partition("?")[0], errors.too_many_requests(most))
        with self.busy(takes_place=not is_preflight):
            self._preflights += is_preflight
            try:
                return await Exchange(self.parts, self, request, route, target, holder).serve()
            finally:
                self._preflights -= is_preflight

    @contextmanager
    def busy(self, *, takes_place: bool = True) -> Iterator[None]:
        """Something is served that a drain waits for."""
        self.in_flight += 1
        self.places.begin_body(takes_place)
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.places.end_body(takes_place)
            if not self.in_flight:
                self._idle.set()

    def admit(self) -> None:
        if not self.places.take(self.max_concurrency):
            self.parts.metrics.rejected("over_concurrency")
            raise errors.too_many_requests(self.max_concurrency)

    def leave(self) -> None:
        self.places.give_back()

    async def _page(self, request: web.BaseRequest, incoming: AioIncoming, path: str) -> web.StreamResponse:
        page = self.pages.get(path)
        if page is None:
            below = (page for prefix, page in self.prefixes.items() if path.startswith(prefix))
            page = next(below, self.fallback)
        if page is None:
            self.parts.metrics.rejected("unknown_path")
            return incoming.response(self._refuse(incoming, path, errors.unknown_url(request.method, path)))
        return await run_page(page, request)

    def _refuse(self, request: Incoming, path: str, error: ApiError) -> Reply:
        self.parts.metrics.request(None, error.status, 0.0)
        self.parts.access.write(
            Record(
                request_id=request.headers.get("X-Request-Id", "")[:256],
                method=request.method,
                path=path,
                status=error.status,
                client=request.remote,
                error=error.code,
            )
        )
        reply = Reply.of(error, path)
        reply.close = self.draining
        return reply

    async def drain(self, timeout_s: float) -> int:
        """Wait for running requests; returns how many are left after `timeout_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.in_flight:  # Another may have begun since it was told that none is left.
                    await self._idle.wait()
        except TimeoutError:
            self.cutting = True
            _log.warning("%d requests did not end within %.1f s and are cut", self.in_flight, timeout_s)
        return self.in_flight


async def run_page(page: Page, request: web.BaseRequest) -> web.StreamResponse:
    """A page's answer; its ApiError as a response."""
    try:
        answer = page(request)
        return answer if isinstance(answer, web.StreamResponse) else await answer
    except ApiError as exc:
        return exc.response()
