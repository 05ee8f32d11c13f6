"""`/v1/models` of the whole fleet: the workers' own model cards, each id once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from gateway.auth.door import Door, Visit
from gateway.bad_request import BadRequest
from gateway.proxy import errors
from gateway.proxy.errors import ApiError, json_response, model_not_found
from gateway.proxy.headers import request_headers
from gateway.proxy.peer import Upstream, UpstreamError
from gateway.proxy.server import target_of
from gateway.proxy.upstream import UpstreamPool

_log = logging.getLogger(__name__)

PATH = "/v1/models"
_TIMEOUT_S = 2.0
_FRESH_S = 1.0
_MOST_KEYS = 64
_MOST_ASKING = 16
_LARGEST_ANSWER_BYTES = 4 << 20
_INDIFFERENT = frozenset(
    {"accept", "accept-encoding", "accept-language", "user-agent", "x-request-id", "traceparent", "tracestate"}
)
"""Headers that no worker can tell its clients apart by; by any other it may answer each client differently."""
_OURS = ("Authorization",)
"""All that workers are shown where clients have keys: the engines' own."""

Card = dict[str, Any]


class _List(msgspec.Struct):
    data: list[Card]


_decoder = msgspec.json.Decoder(_List)


class _Refusal(NamedTuple):
    """A worker's answer that is not a list of cards."""

    status: int
    body: bytes


_Union = dict[str, Card] | _Refusal


class ModelList:
    """Asks every worker, on behalf of the client (with its Authorization), and remembers the union for a second; where
    clients have keys, one for all of them.

    Where two workers serve one id, the first worker by name speaks. A worker that does not answer leaves a gap; when
    none gives cards, the first refusal is passed on.
    """

    def __init__(self, upstreams: UpstreamPool, workers: Callable[[], list[str]], door: Door | None = None) -> None:
        self._door = door
        self._upstreams = upstreams
        self._workers = workers
        self._known: dict[bytes, tuple[float, asyncio.Task[_Union]]] = {}
        self._asking: set[asyncio.Task[_Union]] = set()

    async def page(self, request: web.BaseRequest) -> web.Response:
        """GET /v1/models and GET /v1/models/{id}."""
        headers = request_headers(request.raw_headers)
        visit = self._visit(headers)
        try:
            response = await self._page(request, headers, visit)
        except ApiError as exc:
            response = exc.response()
        if visit is not None:
            response.headers.update(visit.headers())
        return response

    def _visit(self, headers: CIMultiDict[str]) -> Visit | None:
        if self._door is None:
            return None
        try:
            return self._door.identify(headers)
        except BadRequest as exc:
            raise ApiError(400, str(exc), code=exc.code) from None

    async def _page(self, request: web.BaseRequest, headers: CIMultiDict[str], visit: Visit | None) -> web.Response:
        path = target_of(request).partition("?")[0]
        if request.method != "GET":
            raise errors.method_not_allowed(request.method, path, frozenset({"GET"}))
        if visit is not None:
            # Lists count as nothing: a header more may not ask the whole fleet again.
            headers = CIMultiDict((name, headers[name]) for name in _OURS if name in headers)
        cards = await asyncio.shield(self._union(headers))
        if visit is not None and not isinstance(cards, _Refusal):
            cards = {name: card for name, card in cards.items() if visit.key.may_ask_for(name)}
            if not cards and path == PATH:
                return json_response(b'{"object":"list","data":[]}')
        if isinstance(cards, _Refusal):
            return json_response(cards.body, cards.status)
        if not cards:
            raise errors.no_worker("none says what it serves")
        if path == PATH:
            return json_response(msgspec.json.encode({"object": "list", "data": list(cards.values())}))
        name = unquote(path.removeprefix(PATH + "/"))
        if name not in cards:
            raise model_not_found(name)
        return json_response(msgspec.json.encode(cards[name]))

    def _union(self, headers: CIMultiDict[str]) -> asyncio.Task[_Union]:
        key = _key(headers)
        now_s = time.monotonic()
        asked_s, task = self._known.get(key, (0.0, None))
        if task is None or now_s - asked_s > _FRESH_S:
            if len(self._known) >= _MOST_KEYS:
                self._known.clear()
            if len(self._asking) >= _MOST_ASKING:
                raise errors.too_many_requests(_MOST_ASKING)
            task = asyncio.get_running_loop().create_task(self._ask_all(headers))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            self._known[key] = now_s, task
        return task

    async def _ask_all(self, headers: CIMultiDict[str]) -> _Union:
        workers = sorted(self._workers())
        upstreams = [upstream for name in workers if (upstream := self._upstreams.get(name)) is not None]
        answers = await asyncio.gather(*(self._ask(upstream, headers) for upstream in upstreams))
        out: dict[str, Card] = {}
        refused: _Refusal | None = None
        for answer in answers:
            if isinstance(answer, _Refusal):
                refused = refused or answer
                continue
            for card in answer or ():
                out.setdefault(str(card.get("id")), card)
        return out if out or refused is None else refused

    async def _ask(self, upstream: Upstream, headers: CIMultiDict[str]) -> list[Card] | _Refusal | None:
        upstream.acquire()
        try:
            async with asyncio.timeout(_TIMEOUT_S), await upstream.send("GET", PATH, headers, b"") as response:
                body = await response.read(_LARGEST_ANSWER_BYTES)
                if body is None:
                    _log.warning("a list of models of more than %d bytes is left out", _LARGEST_ANSWER_BYTES)
                    return None
                if response.status != 200:
                    return _Refusal(response.status, body)
                return _decoder.decode(body).data
        except (UpstreamError, OSError, msgspec.MsgspecError, RecursionError):
            return None
        finally:
            self._upstreams.release(upstream)


def _key(headers: CIMultiDict[str]) -> bytes:
    """Whom a worker sees, as a digest: credentials are not kept."""
    rows = sorted((name.lower(), value) for name, value in headers.items() if name.lower() not in _INDIFFERENT)
    return hashlib.sha256(repr(rows).encode("utf-8", "surrogateescape")).digest()
