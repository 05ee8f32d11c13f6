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
import time

import aiohttp
import msgspec
from aiohttp import web

from gateway.auth.door import Visit
from gateway.proxy import errors, steps
from gateway.proxy.access import Record
from gateway.proxy.aio_incoming import AioIncoming
from gateway.proxy.errors import ApiError
from gateway.proxy.headers import request_headers
from gateway.proxy.parts import Parts
from gateway.proxy.realtime.dialer import UPGRADE_TIMEOUT_S, Dialer
from gateway.proxy.realtime.ending import (
    CLOSE_TIMEOUT_S,
    FAILED,
    GOING_AWAY,
    POLICY,
    RESTART,
    TOO_BIG,
    TRY_LATER,
    ClientSocket,
    Close,
    Ended,
    ServerSocket,
    close_side,
    ending,
)
from gateway.proxy.realtime.naming import error_event, model_of, models_in
from gateway.proxy.realtime.pump import pump, send
from gateway.proxy.realtime.upstream import Upstream
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
_PING_S = 30.0
_LOOK_S = 1.0
_LEAVING_S = 10.0
"""A worker that is being drained is left so soon after that was seen."""
_CHOOSING_S = 30.0
"""Longest wait for the `session.update` that names a model."""
_MOST_HELD_BYTES = 4 << 20
"""Of what the client sends before it."""


class Session:
    """`longest_s` bounds its life, `largest_bytes` a message."""

    def __init__(
        self,
        parts: Parts,
        plane: DataPlane,
        dialer: Dialer,
        request: web.BaseRequest,
        *,
        longest_s: float,
        largest_bytes: int,
    ) -> None:
        self._parts = parts
        self._plane = plane
        self._request = request
        self._longest_s = longest_s
        self._largest_bytes = largest_bytes
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
        self._client: ServerSocket | None = None
        self._upstream = Upstream(parts, dialer, target_of(request), self._headers, self._record, self._trace)
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
            self._plane.admit()
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
                self._cut("drained" if self._plane.cutting else "client_left")
            raise
        except ConnectionError:
            self._cut("client_left")
            return web.Response() if self._client is None else self._client
        except Exception as exc:
            errors.log_unexpected(_log, "unexpected; the session is given up", exc)
            if self._client is None:
                self._record.status = 500
                return ApiError(500, "The gateway failed.", type_=errors.INTERNAL, code="internal").response()
            await close_side(self._client, Close(FAILED))
            return self._client
        finally:
            self._upstream.give_back(Outcome(kind=OutcomeKind.CANCELLED))
            if admitted:
                self._plane.leave()
            if self._visit is not None:
                self._visit.leave()
            self._record.duration_ms = round((time.monotonic() - began_s) * 1000, 3)
            self._parts.metrics.request(self._record.worker, self._record.status, None)
            self._parts.access.write(self._record)
            if self._trace is not None:
                self._trace.finish(None, None)
            if self._upstream.socket is not None:
                await close_side(self._upstream.socket, Close(GOING_AWAY))  # It is still open if the client vanished.

    # ---- before the 101 ----------------------------------------------------------------------------------------------

    def _check_upgrade(self) -> None:
        request = self._request
        wants = request.headers.get("Upgrade", "").lower() == "websocket"
        # aiohttp takes the versions of drafts, too, whose frames nobody else understands the same way.
        known = request.headers.get("Sec-WebSocket-Version", "").strip() == _VERSION
        if not wants or not known or not web.WebSocketResponse().can_prepare(request):
            text = f"{PATH} is a WebSocket: ask for an upgrade to it (version 13)."
            raise ApiError(426, text, code="upgrade_required")
        if self._plane.draining:
            raise errors.no_worker("the gateway is going down")

    async def _serve(self) -> web.StreamResponse:
        try:
            facts = await self._facts(self._request.rel_url.query.get("model"))
        except BadRequest as exc:
            if "model" in self._request.rel_url.query:
                raise steps.bad_request(self._parts, exc) from None
            return await self._choose_late()
        worker = await self._upstream.connect(facts)
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

    async def _accept(self, protocol: str | None) -> ServerSocket:
        """Send the 101."""
        client = ServerSocket(
            timeout=CLOSE_TIMEOUT_S,
            autoclose=False,
            heartbeat=_PING_S,
            protocols=[] if protocol is None else [protocol],
            compress=False,
            max_msg_size=self._largest_bytes,
        )
        client.headers["X-Request-Id"] = self._record.request_id
        if self._parts.response_headers and self._record.worker is not None:
            client.headers["x-warmroute-worker"] = self._record.worker
        await client.prepare(self._request)
        self._client = client
        self._record.status = 101
        return client

    # ---- a model that is named later ---------------------------------------------------------------------------------

    async def _choose_late(self) -> web.StreamResponse:
        client = await self._accept(None)
        created = {"type": "session.created", "id": f"sess-{secrets.token_hex(16)}", "created": int(time.time())}
        await client.send_str(msgspec.json.encode(created).decode())
        try:
            async with asyncio.timeout(_CHOOSING_S):
                worker, held = await self._chosen(client)
            await self._greeting_of(worker)
        except Ended as exc:
            return await self._finish(client, exc.close)
        except TimeoutError:
            return await self._finish(client, Close(POLICY, "no model was named in time", "timeout"))
        for message in held:
            await send(worker, message)
        return await self._pass_through(client, worker)

    async def _chosen(self, client: ServerSocket) -> tuple[ClientSocket, list[aiohttp.WSMessage]]:
        """The worker for the first model that is served, and what the client has sent so far. Raises Ended."""
        held: list[aiohttp.WSMessage] = []
        held_bytes = 0
        while True:
            if self._plane.draining:
                raise Ended(Close(GOING_AWAY, "the gateway is going down", "drained"))
            try:
                message = await client.receive(timeout=_LOOK_S)
            except TimeoutError:
                continue
            if (close := ending(message, client)) is not None:
                raise Ended(close)
            held_bytes += len(message.data)
            if held_bytes > _MOST_HELD_BYTES:
                raise Ended(Close(TOO_BIG, "name the model (session.update) before the audio", "too_large"))
            model = model_of(message)
            if model is None:
                held.append(message)
                continue
            try:
                worker = await self._upstream.connect(await self._facts(model))
            except ApiError as exc:
                await client.send_str(error_event(exc.message, exc.code))
                if exc.status in (401, 403):  # Another try would be told the same.
                    raise Ended(Close(POLICY, "the session is not allowed")) from None
                if exc.code != "model_not_found":
                    raise Ended(Close(TRY_LATER, "no worker takes the session", "upstream_broke")) from None
            else:
                return worker, [*held, message]

    async def _greeting_of(self, worker: ClientSocket) -> None:
        message = await worker.receive(timeout=UPGRADE_TIMEOUT_S)
        if (close := ending(message, worker)) is not None:
            raise Ended(close)

    # ---- both ways ---------------------------------------------------------------------------------------------------

    async def _pass_through(self, client: ServerSocket, worker: ClientSocket) -> web.StreamResponse:
        self._parts.metrics.realtime.inc()
        forbids = None if self._visit is None or self._visit.key.models is None else self._forbids
        up = asyncio.ensure_future(pump(client, worker, forbids=forbids))
        down = asyncio.ensure_future(pump(worker, client, self._record))
        ways = (up, down)
        try:
            close = await self._watched(ways)
        except asyncio.CancelledError:
            said = client.exception()
            if isinstance(said, aiohttp.WebSocketError) and said.code == TOO_BIG:
                self._cut("too_large")  # aiohttp has told the client and closed the connection.
            raise
        finally:
            self._parts.metrics.realtime.dec()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        return await self._finish(client, close)

    def _forbids(self, message: aiohttp.WSMessage) -> Close | None:
        """A session may be given another model later; nobody's key covers what it does not name."""
        models = models_in(message)
        if self._visit is not None and models is not None and all(map(self._visit.key.may_ask_for, models)):
            return None
        return Close(POLICY, "your API key may not use this model")

    async def _watched(self, ways: tuple[asyncio.Future[Close], ...]) -> Close:
        """Until one side ends the session, or there is a reason to."""
        now = time.monotonic
        until_s = now() + self._longest_s
        leave_s: float | None = None
        while True:
            done, _ = await asyncio.wait(ways, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                return way.result()
            if self._plane.draining:
                return Close(GOING_AWAY, "the gateway is going down", "drained")
            if now() >= until_s:
                return Close(GOING_AWAY, "the longest life of a session is over", "timeout")
            gone, leaving = self._upstream.state()
            if gone:
                return Close(RESTART, "the worker is out of service; connect again", "upstream_broke")
            if not leaving:
                leave_s = None
            elif leave_s is None:
                leave_s = now() + _LEAVING_S
            elif now() >= leave_s:
                return Close(RESTART, "the worker is leaving; connect again", "drained")

    async def _finish(self, client: ServerSocket, close: Close) -> web.StreamResponse:
        self._over = True
        if close.cut is not None:
            self._cut(close.cut)
        if close.worker_broke:
            self._upstream.broke()
        self._upstream.give_back(Outcome(kind=OutcomeKind.END))
        await asyncio.gather(*(close_side(side, close) for side in (client, self._upstream.socket) if side is not None))
        self._upstream.socket = None
        return client

    def _cut(self, reason: str) -> None:
        if self._record.cut is None:
            self._record.cut = reason
            self._parts.metrics.cut(reason)
