"""The pages by path: what the main port shows to everybody, and what only the admin port does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.auth.admin import AdminToken, is_loopback, refused
from gateway.core import Core
from gateway.debug import page
from gateway.debug.cache import cache, digests
from gateway.debug.decisions import KEPT, detailed, tried_again
from gateway.debug.explain import Rewritten, explain
from gateway.debug.gauges import FleetGauges
from gateway.debug.health import degradations, health, is_usable
from gateway.debug.learned import learned
from gateway.debug.queue import queue_page
from gateway.debug.saved import MOST_BLOCKS, save
from gateway.debug.state import Snapshots
from gateway.debug.stream import PATH as STREAM
from gateway.debug.stream import Stream, encoded
from gateway.proxy import errors
from gateway.proxy.access import AccessLog
from gateway.proxy.body import read_body
from gateway.proxy.errors import SERVER_NAME, ApiError, json_response
from gateway.proxy.server import Page, run_page, target_of
from gateway.record.recorder import PATH as RECORD
from gateway.sidecar.hints import HintReader

_SECRET_KEY = re.compile(r"(^|_)(api_key|password|secret|token)$")
_PORT = re.compile(r":[0-9]*$")
_MASK = "********"
_LONGEST_NUMBER = 18
_GET = frozenset({"GET", "HEAD"})
_ELSEWHERE = frozenset({"cross-site", "same-site"})
"""As `Sec-Fetch-Site` says; of the same site is another port of this host."""
_PROBES = frozenset({"/livez", "/readyz"})
"""They tell nothing but whether it serves, as long as they are not asked for more (`?verbose`)."""


class Faces:
    """`draining` tells whether the gateway is going down, which readiness must show first; `in_flight` how many
    requests are being served; `name` what kind of face it is; `hints` reads hint headers where they are obeyed.
    """

    def __init__(
        self,
        core: Core,
        access: AccessLog,
        *,
        draining: Callable[[], bool],
        in_flight: Callable[[], int],
        name: str = "gateway",
        hints: HintReader | None = None,
    ) -> None:
        self._core = core
        self._draining = draining
        self._hints = hints
        self.rewritten: Rewritten | None = None
        """The body that is sent in place of a request's, for a face that puts another model in."""
        self.metrics_of_all: Callable[[], Awaitable[bytes]] | None = None
        """Where this process is one of several: what /metrics has. Raises ApiError."""
        self._gauges = FleetGauges(core, access, in_flight)
        core.metrics.registry.register(self._gauges)
        self.stream = Stream(Snapshots(core, name, draining=draining, in_flight=in_flight).take)

    def public(self) -> dict[str, Page]:
        return {
            "/health": _read_only(self._health),
            "/ping": _read_only(self._health),
            "/livez": _read_only(self._livez),
            "/readyz": _read_only(self._readyz),
            "/metrics": _read_only(self._metrics),
        }

    def exposed(self, token: AdminToken | None) -> dict[str, Page]:
        """As `public`, for a port where clients need keys: to others than who has the admin token only whether it
        serves.
        """

        def with_token(page: Page) -> Page:
            def checked(request: web.BaseRequest) -> Awaitable[web.StreamResponse] | web.StreamResponse:
                if token is None or not token.is_in(request.headers):
                    raise refused()
                return page(request)

            return checked

        def readyz(request: web.BaseRequest) -> web.Response:
            if request.query_string and (token is None or not token.is_in(request.headers)):
                raise refused()
            return self._readyz(request)

        def brief(request: web.BaseRequest) -> web.Response:
            body = health(self._core)
            if token is None or not token.is_in(request.headers):
                body = {"status": body["status"]}
            return json_response(_indented(body), 200 if body["status"] == "ok" else 503)

        return {
            **self.public(),
            "/health": _read_only(brief),
            "/ping": _read_only(brief),
            "/readyz": _read_only(readyz),
            "/metrics": _read_only(with_token(self._metrics)),
        }

    def private(self) -> dict[str, Page]:
        return {
            **self.public(),
            page.PATH: _read_only(page.page),
            page.PATH + "/": _read_only(page.moved),
            "/debug/cache": _read_only(self._cache),
            "/debug/config": _read_only(self._config),
            "/debug/decisions": _read_only(self._decisions),
            "/debug/explain": self._explain,
            "/debug/fleet": _read_only(self._fleet),
            "/debug/learned": _read_only(self._learned),
            "/debug/queue": _read_only(self._queue),
            "/debug/state": _read_only(self._state),
            STREAM: self.stream.page,
            RECORD: self._core.recorder.page,
        }

    def _health(self, request: web.BaseRequest) -> web.Response:
        body = health(self._core)
        return json_response(_indented(body), 200 if body["usable"] else 503)

    def _livez(self, request: web.BaseRequest) -> web.Response:
        return json_response(b'{"status":"ok"}')

    def _readyz(self, request: web.BaseRequest) -> web.Response:
        """503 while nothing can be served or we are going down; `?verbose` names every degradation."""
        core, draining = self._core, self._draining()
        usable = sum(is_usable(core, worker) for worker in core.fleet.workers.values())
        ready = bool(usable) and not draining
        body: dict[str, Any] = {"ready": ready, "draining": draining, "usable_workers": usable}
        if "verbose" in request.rel_url.query:
            found = degradations(core)
            body["degraded"] = [msgspec.to_builtins(each) for each in found]
        return json_response(_indented(body), 200 if ready else 503)

    async def metrics_as(self, encoded: Callable[[CollectorRegistry], bytes]) -> bytes:
        """All metrics as they are now, in a form."""
        self._gauges.refresh()
        return await asyncio.to_thread(encoded, self._core.metrics.registry)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        if self.metrics_of_all is not None:
            text = await self.metrics_of_all()
        else:
            text = await self.metrics_as(generate_latest)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST, "Server": SERVER_NAME})

    async def _cache(self, request: web.BaseRequest) -> web.Response:
        """With `?digests` those too, which take a look at every block."""
        page = cache(self._core)
        if "digests" in request.rel_url.query:
            page["digests"] = await asyncio.to_thread(digests, self._core)
        return json_response(_indented(page))

    def _config(self, request: web.BaseRequest) -> web.Response:
        return json_response(_indented(masked(msgspec.to_builtins(self._core.config))))

    def _state(self, request: web.BaseRequest) -> web.Response:
        return json_response(encoded(self.stream.snapshot()))

    async def _fleet(self, request: web.BaseRequest) -> web.Response:
        """To be saved, with `?blocks=` of them at most."""
        most = request.rel_url.query.get("blocks")
        return json_response(
            await save(
                self._core, MOST_BLOCKS if most is None else _whole(most, "blocks"), hints=self._hints is not None
            )
        )

    def _decisions(self, request: web.BaseRequest) -> web.Response:
        """The last `?n=` of them, or the one of a `?number=`, with all they considered."""
        query, decisions = request.rel_url.query, self._core.decisions
        kept = decisions.last(KEPT)
        if "number" in query:
            number = _whole(query["number"], "number")
            wanted = [each for each in kept if each.number == number]
            if not wanted:
                message = f"Decision {number} is not known: the last {KEPT} are kept, since the start."
                raise ApiError(404, message, code="decision_not_found", param="number")
        else:
            wanted = kept[: _whole(query.get("n", "20"), "n")]
        again = tried_again(kept)
        shown = [detailed(each, tried_again=each.number in again) for each in wanted]
        return json_response(encoded({"made": decisions.made, "decisions": shown}))

    def _learned(self, request: web.BaseRequest) -> web.Response:
        return json_response(_indented(learned(self._core)))

    def _queue(self, request: web.BaseRequest) -> web.Response:
        return json_response(_indented(queue_page(self._core.queue, self._core.fleet)))

    async def _explain(self, request: web.BaseRequest) -> web.Response:
        if request.method != "POST":
            raise errors.method_not_allowed(request.method, "/debug/explain", frozenset({"POST"}))
        body = await read_body(request, self._core.config.gateway.max_body_bytes)
        answer = await explain(
            self._core, body, request.headers, request.rel_url.query.get("kind"), self._hints, self.rewritten
        )
        return json_response(_indented(answer))


class AdminPort:
    """Pages by exact path, else by what it begins with; nothing is forwarded but what a page forwards. `host`: where it
    listens. On loopback it answers to addresses and `localhost` alone: a page on this host's browser may be of a site
    whose name leads here too. With a `token` only probes are answered without it; pages, some of which ask engines on
    behalf of whoever asks them, see `engine_headers` in its place.
    """

    def __init__(
        self,
        pages: dict[str, Page],
        host: str = "",
        token: AdminToken | None = None,
        engine_headers: Mapping[str, str] | None = None,
    ) -> None:
        self.pages = pages
        self._token = token
        self._engine_headers = engine_headers or {}
        self.prefixes: dict[str, Page] = {}
        self._is_local = is_loopback(host)

    def open(self) -> None:
        """Whoever reaches it has been let in: it is on a socket in a private folder."""
        self._token, self._is_local = None, False

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = target_of(request).partition("?")[0]
        if self._is_local and not _is_by_address(request.headers.get("Host", "")):
            text = "This port is this machine's own: ask for it as localhost or by its address."
            return ApiError(403, text, code="unknown_host").response()
        if _is_of_another_site(request):
            text = "Nothing is changed, and nothing read, from another site's page."
            return ApiError(403, text, code="cross_origin").response()
        if self._token is not None and not (path in _PROBES and path == request.raw_path):
            try:
                self._token.check(request.headers)
            except ApiError as exc:
                return exc.response()
            headers = CIMultiDict(request.headers)
            headers.popall("Authorization", None)
            headers.update(self._engine_headers)
            request = request.clone(headers=headers)
        page = self.pages.get(path)
        if page is None:
            page = next((page for prefix, page in self.prefixes.items() if path.startswith(prefix)), None)
        if page is None:
            return errors.unknown_url(request.method, path).response()
        return await run_page(page, request)


def _whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > _LONGEST_NUMBER:
        raise ApiError(400, f"{name} is a whole number, such as {name}=20.", code="bad_number", param=name)
    return int(text)


def _is_of_another_site(request: web.BaseRequest) -> bool:
    """A page that somebody looks at on this host could send requests here; browsers tell where it is from. It sees no
    answer to a GET, but how long that takes, and has work made for it; links may lead here.
    """
    headers = request.headers
    fetched = headers.get("Sec-Fetch-Site") in _ELSEWHERE
    if request.method in _GET:
        return fetched and headers.get("Sec-Fetch-Mode") != "navigate"
    origin = headers.get("Origin")
    return fetched or (origin is not None and origin.partition("://")[2] != headers.get("Host"))


def _is_by_address(given: str) -> bool:
    """Of a Host header; without one it was no browser."""
    host = given.rpartition(":")[0] if _PORT.search(given) else given
    if host in ("", "localhost") or host.endswith(".localhost"):
        return True
    try:
        ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _read_only(page: Page) -> Page:
    def checked(request: web.BaseRequest) -> Awaitable[web.StreamResponse] | web.StreamResponse:
        if request.method not in _GET:
            raise errors.method_not_allowed(request.method, request.rel_url.path, _GET)
        return page(request)

    return checked


def masked(value: Any, key: str = "") -> Any:
    """`value` with every secret's text replaced."""
    if isinstance(value, dict):
        return {name: masked(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, key) for item in value]
    return _MASK if isinstance(value, str) and _SECRET_KEY.search(key) else value


def _indented(body: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"
