"""GET /v1/realtime: a WebSocket, passed through to a worker that serves its model.

The model is that of the query (`?model=`), or the only one served. Else it is in the client's first `session.update`,
which clients of vLLM send when they have been greeted: then the greeting (`session.created`) is ours, and the worker's
own is left out. Before the 101 whatever is wrong is an HTTP error; afterwards it is an `error` event of vLLM's.

A session is placed by load and booked for its life. Its silence says nothing about a worker. Pings are each hop's own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import WSMsgType, web
from multidict import CIMultiDict
from yarl import URL

from gateway.addresses import resolver
from gateway.auth.door import Visit
from gateway.engine.health import End, State
from gateway.proxy import errors, steps
from gateway.proxy.access import Record
from gateway.proxy.aio_incoming import AioIncoming
from gateway.proxy.errors import ApiError
from gateway.proxy.headers import RANK_HEADER, request_headers
from gateway.proxy.parts import Parts
from gateway.proxy.server import DataPlane, target_of
from gateway.request import BadRequest
from gateway.sidecar.hints import NO_HINTS
from gateway.tracing.types import TRACE_ID_HEADER
from scorer.types import Outcome, OutcomeKind, RequestFacts

_log = logging.getLogger(__name__)
# It writes down subprotocols that do not match, in which browsers send API keys.
logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)

PATH = "/v1/realtime"
_LONGEST_REQUEST_ID = 256
_VERSION = "13"
_LARGEST_MESSAGE_BYTES = 16 << 20
"""uvicorn's limit, and so vLLM's."""
_UPGRADE_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 1.0
_PING_S = 30.0
_LOOK_S = 1.0
_LEAVING_S = 10.0
"""A worker that is being drained is left so soon after that was seen."""
_CHOOSING_S = 30.0
"""Longest wait for the `session.update` that names a model."""
_MOST_HELD_BYTES = 4 << 20
"""Of what the client sends before it."""
_LONGEST_EVENT_BYTES = 64 << 10
_LONGEST_REASON_BYTES = 120
_NO_CLOSE_FRAME = 1006
_SENDABLE = range(1000, 5000)
_NEVER_SENT = frozenset({0, 1005, _NO_CLOSE_FRAME, 1015})

_NORMAL = 1000
_GOING_AWAY = 1001
_POLICY = 1008
_TOO_BIG = 1009
_FAILED = 1011
_RESTART = 1012
_TRY_LATER = 1013

_ServerSocket = web.WebSocketResponse
_ClientSocket = aiohttp.ClientWebSocketResponse
_Socket = _ServerSocket | _ClientSocket


class _Close(NamedTuple):
    """Why a session ends: what both sides are told, and what the log says (None: it ended as it should)."""

    code: int
    reason: str = ""
    cut: str | None = None
    worker_broke: bool = False


class _Ended(Exception):
    """The session is over before a worker has taken it."""

    def __init__(self, close: _Close) -> None:
        super().__init__(close.reason)
        self.close = close


class Realtime:
    """The page. `longest_s` bounds one session."""

    def __init__(
        self,
        parts: Parts,
        plane: DataPlane,
        *,
        tls: ssl.SSLContext | bool,
        connect_timeout_s: float,
        longest_s: float,
        link_local: bool = False,
    ) -> None:
        self.parts = parts
        self.plane = plane
        self.longest_s = longest_s
        self.largest_bytes = min(parts.max_body_bytes, _LARGEST_MESSAGE_BYTES)
        self._tls = tls
        self._link_local = link_local
        self._connect_timeout_s = connect_timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "GET":
            raise errors.method_not_allowed(request.method, PATH, frozenset({"GET"}))
        with self.plane.busy():
            return await _Session(self, request).serve()

    @property
    def http(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, force_close=True, ssl=self._tls, resolver=resolver(self._link_local)
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                trace_configs=[_not_elsewhere()],
            )
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class _Session:
    def __init__(self, face: Realtime, request: web.BaseRequest) -> None:
        self._face = face
        self._parts = face.parts
        self._request = request
        self._headers = request_headers(request.raw_headers)
        request_id = self._headers.get("X-Request-Id", "")
        if not request_id or len(request_id) > _LONGEST_REQUEST_ID:
            request_id = self._headers["X-Request-Id"] = secrets.token_hex(16)
        self._record = Record(
            request_id=request_id, method=request.method, path=PATH, status=499, client=request.remote
        )
        tracing = self._parts.tracing
        self._trace = None if tracing is None else tracing.request(self._record, self._headers, None)
        self._tenant: str | None = None
        self._visit: Visit | None = None
        self._plan_id: str | None = None
        """Of what is booked."""
        self._client: _ServerSocket | None = None
        self._worker: _ClientSocket | None = None
        self._place: tuple[str, int] | None = None
        """The worker's name and generation."""
        self._over = False
        """Both sides are being told; that the client then hangs up is no news."""

    async def serve(self) -> web.StreamResponse:
        began_s = time.monotonic()
        admitted = False
        try:
            self._check_upgrade()
            authenticated: str | None = None
            if self._parts.tenancy.by_certificate:
                authenticated = AioIncoming(self._request).certificate_name()
            visit = self._visit = steps.at_door(self._parts, self._headers)
            if visit is not None:
                authenticated = self._record.tenant = visit.tenant
                steps.entered(self._parts, visit)
            self._tenant = steps.identified_session(self._parts, self._headers, authenticated)
            self._face.plane.admit()
            admitted = True
            return await self._serve()
        except ApiError as exc:
            self._record.status, self._record.error = exc.status, exc.code
            response = exc.response()
            response.headers["X-Request-Id"] = self._record.request_id
            if self._visit is not None:
                response.headers.update(self._visit.headers())
            if self._record.trace_id is not None:
                response.headers[TRACE_ID_HEADER] = self._record.trace_id
            if exc.status == 426:
                response.headers.update({"Upgrade": "websocket", "Sec-WebSocket-Version": _VERSION})
            return response
        except asyncio.CancelledError:
            if not self._over:
                self._cut("drained" if self._face.plane.cutting else "client_left")
            raise
        except ConnectionError:
            self._cut("client_left")
            return web.Response() if self._client is None else self._client
        except Exception as exc:
            errors.log_unexpected(_log, "unexpected; the session is given up", exc)
            if self._client is None:
                self._record.status = 500
                return ApiError(500, "The gateway failed.", type_=errors.INTERNAL, code="internal").response()
            await _close(self._client, _Close(_FAILED))
            return self._client
        finally:
            self._give_back(Outcome(kind=OutcomeKind.CANCELLED))
            if admitted:
                self._face.plane.leave()
            if self._visit is not None:
                self._visit.leave()
            self._record.duration_ms = round((time.monotonic() - began_s) * 1000, 3)
            self._parts.metrics.request(self._record.worker, self._record.status, None)
            self._parts.access.write(self._record)
            if self._trace is not None:
                self._trace.finish(None, None)
            if self._worker is not None:
                await _close(self._worker, _Close(_GOING_AWAY))  # It is still open if the client vanished.

    # ---- before the 101 ----------------------------------------------------------------------------------------------

    def _check_upgrade(self) -> None:
        request = self._request
        wants = request.headers.get("Upgrade", "").lower() == "websocket"
        # aiohttp takes the versions of drafts, too, whose frames nobody else understands the same way.
        known = request.headers.get("Sec-WebSocket-Version", "").strip() == _VERSION
        if not wants or not known or not web.WebSocketResponse().can_prepare(request):
            text = f"{PATH} is a WebSocket: ask for an upgrade to it (version 13)."
            raise ApiError(426, text, code="upgrade_required")
        if self._face.plane.draining:
            raise errors.no_worker("the gateway is going down")

    async def _serve(self) -> web.StreamResponse:
        try:
            facts = await self._facts(self._request.rel_url.query.get("model"))
        except BadRequest as exc:
            if "model" in self._request.rel_url.query:
                raise steps.bad_request(self._parts, exc) from None
            return await self._choose_late()
        worker = await self._connect(facts)
        return await self._pass_through(await self._accept(worker.protocol), worker)

    async def _facts(self, model: str | None) -> RequestFacts:
        """Raises BadRequest when several models are served and none is named."""
        booked = f"{self._record.request_id}/{id(self):x}"
        facts = await self._parts.reader.session(booked, model, self._headers)
        if self._visit is not None:
            self._visit.check_model(facts.lora or facts.model)
        if self._tenant is not None:
            facts = msgspec.structs.replace(facts, tenant=self._tenant)
        hints = self._parts.hints(AioIncoming(self._request))
        return facts if hints is NO_HINTS else msgspec.structs.replace(facts, subset=hints.decode, rank=hints.rank)

    async def _accept(self, protocol: str | None) -> _ServerSocket:
        """Send the 101."""
        client = _ServerSocket(
            timeout=_CLOSE_TIMEOUT_S,
            autoclose=False,
            heartbeat=_PING_S,
            protocols=[] if protocol is None else [protocol],
            compress=False,
            max_msg_size=self._face.largest_bytes,
        )
        client.headers["X-Request-Id"] = self._record.request_id
        if self._parts.response_headers and self._record.worker is not None:
            client.headers["x-warmroute-worker"] = self._record.worker
        await client.prepare(self._request)
        self._client = client
        self._record.status = 101
        return client

    # ---- a worker ----------------------------------------------------------------------------------------------------

    async def _connect(self, facts: RequestFacts) -> _ClientSocket:
        """Book a worker and open its WebSocket; another one's, if that cannot be had. Raises ApiError."""
        try:
            return await self._try(facts)
        except ApiError as failed:
            excluded = frozenset() if self._record.worker is None else frozenset({self._record.worker})
            if failed.type_ != errors.UPSTREAM or failed.status not in (502, 503, 504) or not excluded:
                raise
            again = msgspec.structs.replace(facts, request_id=facts.request_id + "/2", excluded=excluded)
            try:
                worker = await self._try(again)
            except ApiError as second:
                raise failed if second.code == "no_worker" else second from None
            self._record.retries += 1
            self._parts.metrics.retried("connect")
            return worker

    async def _try(self, facts: RequestFacts) -> _ClientSocket:
        parts = self._parts
        plan = steps.booked(parts, facts)
        self._plan_id = facts.request_id
        parts.metrics.decided(plan.choice, facts.token_source)
        name, rank = plan.chosen.decode
        known = parts.planner.fleet.workers[name]
        self._place = name, known.generation
        record = self._record
        record.worker, record.rank, record.model, record.policy = name, rank, facts.model, plan.policy
        headers = self._headers.copy()
        if len(known.loads) > 1:
            headers[RANK_HEADER] = str(rank)
        ticket = parts.health.request_started(name, time.monotonic(), _UPGRADE_TIMEOUT_S)
        end = End.CANCELLED
        leg = None if self._trace is None else self._trace.leg("forward", name, rank, known.url or "", headers)
        if leg is not None:
            headers = leg.headers
        try:
            worker = self._worker = await self._open(known.url or "", headers)
        except aiohttp.WSServerHandshakeError as exc:
            failed = exc.status >= 500 and exc.status != 501
            end = End.SERVER_ERROR if failed else End.CLIENT_ERROR
            self._give_back(Outcome(kind=OutcomeKind.ERROR, status=exc.status, worker_failed=failed))
            status = exc.status if 400 <= exc.status <= 599 else 502
            text = f"Worker {name} refused the WebSocket (status {exc.status})."
            raise ApiError(status, text, type_=errors.UPSTREAM, code="upstream_refused") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            end = End.CONNECT
            raise self._unreachable(name, parts.unreachable_status) from None
        except TimeoutError:
            end = End.TIMEOUT
            raise self._unreachable(name, 504) from None
        except (aiohttp.ClientError, OSError, ValueError):
            end = End.RESET
            raise self._unreachable(name, parts.unreachable_status) from None
        finally:
            # That its HTTP server says 101 does not show that its engine works.
            parts.health.request_ended(ticket, end, time.monotonic())
            if leg is not None and self._worker is None:
                leg.failed(end.name.lower())
        if leg is not None:
            leg.answered(101)
            leg.end()
        parts.planner.observe(self._plan_id, Outcome(kind=OutcomeKind.FIRST_TOKEN), time.monotonic())
        return worker

    async def _open(self, url: str, headers: CIMultiDict[str]) -> _ClientSocket:
        offered = [
            each.strip() for row in headers.popall("Sec-WebSocket-Protocol", []) for each in row.split(",") if each
        ]
        for name in ("Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Extensions"):
            headers.popall(name, None)
        async with asyncio.timeout(_UPGRADE_TIMEOUT_S):
            return await self._face.http.ws_connect(
                URL(url.rstrip("/") + target_of(self._request), encoded=True),
                protocols=offered,
                headers=headers,
                autoclose=False,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_TIMEOUT_S),
                max_msg_size=self._face.largest_bytes,
            )

    def _unreachable(self, name: str, status: int) -> ApiError:
        self._give_back(Outcome(kind=OutcomeKind.ERROR, worker_failed=True))
        text = f"Worker {name} could not be reached."
        return ApiError(status, text, type_=errors.UPSTREAM, code="upstream_unreachable", retry_after_s=1)

    def _give_back(self, outcome: Outcome) -> None:
        plan_id, self._plan_id = self._plan_id, None
        if plan_id is not None:
            self._parts.planner.observe(plan_id, outcome, time.monotonic())

    # ---- a model that is named later ---------------------------------------------------------------------------------

    async def _choose_late(self) -> web.StreamResponse:
        client = await self._accept(None)
        created = {"type": "session.created", "id": f"sess-{secrets.token_hex(16)}", "created": int(time.time())}
        await client.send_str(msgspec.json.encode(created).decode())
        try:
            async with asyncio.timeout(_CHOOSING_S):
                worker, held = await self._chosen(client)
            await self._greeting_of(worker)
        except _Ended as exc:
            return await self._finish(client, exc.close)
        except TimeoutError:
            return await self._finish(client, _Close(_POLICY, "no model was named in time", "timeout"))
        for message in held:
            await _send(worker, message)
        return await self._pass_through(client, worker)

    async def _chosen(self, client: _ServerSocket) -> tuple[_ClientSocket, list[aiohttp.WSMessage]]:
        """The worker for the first model that is served, and what the client has sent so far. Raises _Ended."""
        held: list[aiohttp.WSMessage] = []
        held_bytes = 0
        while True:
            if self._face.plane.draining:
                raise _Ended(_Close(_GOING_AWAY, "the gateway is going down", "drained"))
            try:
                message = await client.receive(timeout=_LOOK_S)
            except TimeoutError:
                continue
            if (close := _ending(message, client)) is not None:
                raise _Ended(close)
            held_bytes += len(message.data)
            if held_bytes > _MOST_HELD_BYTES:
                raise _Ended(_Close(_TOO_BIG, "name the model (session.update) before the audio", "too_large"))
            model = _model_of(message)
            if model is None:
                held.append(message)
                continue
            try:
                worker = await self._connect(await self._facts(model))
            except ApiError as exc:
                await client.send_str(_error_event(exc.message, exc.code))
                if exc.code != "model_not_found":
                    raise _Ended(_Close(_TRY_LATER, "no worker takes the session", "upstream_broke")) from None
            else:
                return worker, [*held, message]

    async def _greeting_of(self, worker: _ClientSocket) -> None:
        message = await worker.receive(timeout=_UPGRADE_TIMEOUT_S)
        if (close := _ending(message, worker)) is not None:
            raise _Ended(close)

    # ---- both ways ---------------------------------------------------------------------------------------------------

    async def _pass_through(self, client: _ServerSocket, worker: _ClientSocket) -> web.StreamResponse:
        self._parts.metrics.realtime.inc()
        forbids = None if self._visit is None or self._visit.key.models is None else self._forbids
        up = asyncio.ensure_future(_pump(client, worker, forbids=forbids))
        down = asyncio.ensure_future(_pump(worker, client, self._record))
        ways = (up, down)
        try:
            close = await self._watched(ways)
        except asyncio.CancelledError:
            said = client.exception()
            if isinstance(said, aiohttp.WebSocketError) and said.code == _TOO_BIG:
                self._cut("too_large")  # aiohttp has told the client and closed the connection.
            raise
        finally:
            self._parts.metrics.realtime.dec()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        return await self._finish(client, close)

    def _forbids(self, message: aiohttp.WSMessage) -> _Close | None:
        """A session may be given another model later; nobody's key covers what it does not name."""
        models = _models_in(message)
        if self._visit is not None and models is not None and all(map(self._visit.key.may_ask_for, models)):
            return None
        return _Close(_POLICY, "your API key may not use this model")

    async def _watched(self, ways: tuple[asyncio.Future[_Close], ...]) -> _Close:
        """Until one side ends the session, or there is a reason to."""
        now = time.monotonic
        until_s = now() + self._face.longest_s
        leave_s: float | None = None
        while True:
            done, _ = await asyncio.wait(ways, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                return way.result()
            if self._face.plane.draining:
                return _Close(_GOING_AWAY, "the gateway is going down", "drained")
            if now() >= until_s:
                return _Close(_GOING_AWAY, "the longest life of a session is over", "timeout")
            gone, leaving = self._state_of_worker()
            if gone:
                return _Close(_RESTART, "the worker is out of service; connect again", "upstream_broke")
            if not leaving:
                leave_s = None
            elif leave_s is None:
                leave_s = now() + _LEAVING_S
            elif now() >= leave_s:
                return _Close(_RESTART, "the worker is leaving; connect again", "drained")

    def _state_of_worker(self) -> tuple[bool, bool]:
        """Whether it is gone (left, restarted under its name, ejected), and whether it is being drained."""
        assert self._place is not None  # noqa: S101 - connected before
        name, generation = self._place
        known = self._parts.planner.fleet.workers.get(name)
        if known is None or known.generation != generation:
            return True, False
        try:
            return self._parts.health.state(name).state is State.EJECTED, known.draining
        except KeyError:
            return True, False

    async def _finish(self, client: _ServerSocket, close: _Close) -> web.StreamResponse:
        self._over = True
        if close.cut is not None:
            self._cut(close.cut)
        if close.worker_broke and self._place is not None:
            health, now_s = self._parts.health, time.monotonic()
            health.request_ended(health.request_started(self._place[0], now_s), End.RESET, now_s)
            self._give_back(Outcome(kind=OutcomeKind.ERROR, worker_failed=True))
        self._give_back(Outcome(kind=OutcomeKind.END))
        await asyncio.gather(*(_close(side, close) for side in (client, self._worker) if side is not None))
        self._worker = None
        return client

    def _cut(self, reason: str) -> None:
        if self._record.cut is None:
            self._record.cut = reason
            self._parts.metrics.cut(reason)


class _NamesModel(msgspec.Struct):
    """`model` is vLLM's place for it, `session.model` OpenAI's."""

    type: str
    model: str | None = None
    session: dict[str, Any] | None = None


_names_model = msgspec.json.Decoder(_NamesModel)


def _models_in(message: aiohttp.WSMessage) -> list[str] | None:
    """Whatever an engine could take for a model in it; None: it cannot be read."""
    if message.type is not WSMsgType.TEXT:
        return []
    try:
        event = _names_model.decode(message.data)
    except msgspec.MsgspecError:
        return None
    inner = (event.session or {}).get("model")
    return [model for model in (event.model, inner) if isinstance(model, str) and model]


def _model_of(message: aiohttp.WSMessage) -> str | None:
    """The model that a `session.update` names."""
    if message.type is not WSMsgType.TEXT or len(message.data) > _LONGEST_EVENT_BYTES:
        return None
    try:
        event = _names_model.decode(message.data)
    except msgspec.MsgspecError:
        return None
    model = event.model or (event.session or {}).get("model")
    return model if event.type == "session.update" and isinstance(model, str) and model else None


def _error_event(text: str, code: str | None) -> str:
    text = text.encode("utf-8", "replace").decode()
    return msgspec.json.encode({"type": "error", "error": text, "code": code}).decode()


def _not_elsewhere() -> aiohttp.TraceConfig:
    """`ws_connect` follows redirects: a worker could have us ask anybody."""

    async def refuse(_: object, __: object, redirect: aiohttp.TraceRequestRedirectParams) -> None:
        answer = redirect.response
        raise aiohttp.WSServerHandshakeError(answer.request_info, (), status=answer.status, message="a redirect")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return trace


async def _pump(
    source: _Socket,
    sink: _Socket,
    record: Record | None = None,
    forbids: Callable[[aiohttp.WSMessage], _Close | None] | None = None,
) -> _Close:
    """Pass messages on, each when the one before it was taken, until one side ends. `record` counts their bytes; what
    `forbids` says ends the session.
    """
    while True:
        message = await source.receive()
        if (close := _ending(message, source)) is not None:
            return close
        if forbids is not None and (close := forbids(message)) is not None:
            return close
        try:
            await _send(sink, message)
        except (ConnectionError, aiohttp.ClientError):
            return _broke(sink)
        if record is not None:
            record.sent_bytes += len(message.data)


async def _send(sink: _Socket, message: aiohttp.WSMessage) -> None:
    if message.type is WSMsgType.TEXT:
        await sink.send_str(message.data)
    else:
        await sink.send_bytes(message.data)


def _ending(message: aiohttp.WSMessage, source: _Socket) -> _Close | None:
    """What `message` means for the session if it is no content."""
    if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
        return None
    if message.type is WSMsgType.CLOSE:
        return _Close(message.data or 0, message.extra or "")
    if message.type is WSMsgType.ERROR and isinstance(message.data, aiohttp.WebSocketError):
        lost = "client_left" if isinstance(source, web.WebSocketResponse) else "upstream_broke"
        return _Close(int(message.data.code), "", "too_large" if message.data.code == _TOO_BIG else lost)
    return _broke(source)


def _broke(side: _Socket) -> _Close:
    """It is gone without a word."""
    if isinstance(side, web.WebSocketResponse):
        return _Close(_GOING_AWAY, "", "client_left")
    return _Close(_RESTART, "the worker's connection broke; connect again", "upstream_broke", worker_broke=True)


async def _close(side: _Socket, close: _Close) -> None:
    code, reason = _as_sent(close)
    with suppress(ConnectionError, aiohttp.ClientError, RuntimeError, TimeoutError):
        await side.close(code=code, message=reason)


def _as_sent(close: _Close) -> tuple[int, bytes]:
    """What a close frame may say: the other side may have been told a code that is none, or a longer reason, which is
    not cut within a character.
    """
    code = close.code if close.code in _SENDABLE and close.code not in _NEVER_SENT else _NORMAL
    reason = close.reason.encode("utf-8", "replace")[:_LONGEST_REASON_BYTES]
    return code, reason.decode("utf-8", "ignore").encode()
