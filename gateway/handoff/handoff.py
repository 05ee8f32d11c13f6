"""One prompt computed by a prefill worker, and what the decode worker needs to fetch its KV.

Prefill first, decode after (NIXL pull). Each attempt ends in an `Offer` for the decode leg, in the next prefill worker,
or in none: then the decode worker computes the prompt itself. An offer is for one decode request, written before its
deadline: engines read whatever is in the named blocks by then, and answer 200 with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Protocol

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from gateway.debug.handoffs import HandoffMetrics
from gateway.debug.hits import HitBook
from gateway.engine.health import End, Health
from gateway.handoff.answer import BadAnswer, BadParams, PrefillAnswer, read_answer
from gateway.handoff.bodies import Body
from gateway.handoff.clock import AnswerClock
from gateway.handoff.connector import Connector, Legs
from gateway.handoff.engine_ids import EngineIds
from gateway.handoff.hosts import Hosts
from gateway.handoff.releases import Releases
from gateway.handoff.settings import HandoffSettings
from gateway.proxy import errors
from gateway.proxy.errors import ApiError
from gateway.proxy.flight import Flight
from gateway.proxy.headers import RawHeaders, response_headers
from gateway.proxy.upstream import Upstream, UpstreamPool
from scorer.planner import Planner
from scorer.types import Outcome, OutcomeKind, PdReason

_log = logging.getLogger(__name__)
RANK_HEADER = "X-data-parallel-rank"
_LONGEST_ANSWER_BYTES = 64 << 20
_LINGER_S = 0.5
"""When a client leaves during its prefill, so long is still waited for the answer: closing a connection stops an
engine, but not one that has finished and is just saying so, and what that holds only its answer can give back.
"""
_PREFILL_DONE = Outcome(kind=OutcomeKind.PREFILL_DONE)
_PAIR_FAILED = Outcome(kind=OutcomeKind.PAIR_FAILED)


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What all handoffs work with. `nixl_of` names a worker's configured side channel."""

    settings: HandoffSettings
    connector: Connector
    planner: Planner
    upstreams: UpstreamPool
    health: Health
    hits: HitBook
    metrics: HandoffMetrics
    releases: Releases
    engine_ids: EngineIds
    hosts: Hosts
    clock: AnswerClock
    available: Callable[[], Collection[str]]
    nixl_of: Callable[[str], str | None]
    rng: random.Random


class RefusedByPrefill(Exception):
    """The prefill worker answered with a 4xx: the request is not right, and this is the client's answer."""

    def __init__(self, status: int, headers: RawHeaders, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self._headers = headers
        self._body = body

    def response(self) -> web.Response:
        headers = response_headers(self._headers)
        headers.popall("Content-Length", None)
        return web.Response(status=self.status, headers=headers, body=self._body)


class Offer:
    """What a prefill worker holds ready for one decode request. `take` it once, or give it back."""

    def __init__(
        self, legs: Legs, answer: PrefillAnswer, decode_body: bytes, *, deadline_s: float, lease_ends_s: float
    ) -> None:
        self.legs = legs
        self.answer = answer
        self.deadline_s = deadline_s
        self.lease_ends_s = lease_ends_s
        self._decode_body: bytes | None = decode_body
        self.written = False
        """A decode worker has it: by its end, that request gives the blocks back."""

    def take(self) -> bytes:
        """The decode leg's body."""
        body, self._decode_body = self._decode_body, None
        if body is None:
            raise RuntimeError("an offer was taken twice")
        return body


class _LegFailed(Exception):
    """No offer came of it. `everywhere`: nor would one from another prefill worker; `pair`: the two do not fit."""

    def __init__(self, why: PdReason, detail: str, *, everywhere: bool = False, pair: bool = False) -> None:
        super().__init__(detail)
        self.why = why
        self.everywhere = everywhere
        self.pair = pair


class _Sending(Protocol):
    """The request as the proxy has it."""

    @property
    def method(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def headers(self) -> CIMultiDict[str]: ...
    @property
    def raw(self) -> bytes: ...


class Handoff:
    """The prefill side of one request."""

    def __init__(self, shared: Shared, flight: Flight, sending: _Sending) -> None:
        self._shared = shared
        self._flight = flight
        self._sending = sending
        self._kind = sending.kind or ""
        self._body = Body(sending.raw, self._kind)
        self.prefill_s: float | None = None
        self.prefiller: str | None = None
        """Who was asked last."""

    async def prefill(self) -> Offer | None:
        """None: the plan has become a local one. Raises RefusedByPrefill, or ApiError when the settings say that a
        failed prefill is the request's end.
        """
        flight, tries = self._flight, 0
        while flight.plan.remote:
            tries += 1
            try:
                return await self._leg()
            except _LegFailed as failure:
                self._next(failure, tries)
        return None

    def _next(self, failure: _LegFailed, tries: int) -> None:
        """The next prefill worker, or none."""
        shared, flight = self._shared, self._flight
        settings = shared.settings
        names = self._names()
        shared.metrics.handoff(*names, failure.why.value)
        shared.metrics.stage(remote=True, stage="prefill", outcome=failure.why.value)
        _log.log(
            logging.DEBUG if failure.everywhere else logging.WARNING,
            "prefill on %s for %s: %s (%s)",
            *names,
            failure.why.value,
            failure,
        )
        now_s = time.monotonic()
        request_id = flight.facts.request_id
        if failure.pair:
            shared.planner.observe(request_id, _PAIR_FAILED, now_s)
        stop = failure.everywhere or not settings.try_next or tries >= settings.max_tries
        plan = shared.planner.next_prefill(request_id, failure.why, shared.available(), now_s, shared.rng, local=stop)
        if plan is None:
            raise ConnectionResetError("the request has ended")
        if not plan.remote and not settings.then_local and not failure.everywhere:
            raise ApiError(
                504 if failure.why is PdReason.PREFILL_TIMEOUT else 502,
                f"No prefill worker computed the prompt ({failure.why.value}).",
                type_=errors.UPSTREAM,
                code="prefill_failed",
                retry_after_s=1,
            )
        shared.metrics.retried("prefill", failure.why.value)
        flight.plan = plan

    async def _leg(self) -> Offer:
        """Have the planned prefill worker compute the prompt."""
        shared, flight = self._shared, self._flight
        name, rank = flight.plan.chosen.prefill or ("", 0)
        worker, upstream = shared.planner.fleet.workers.get(name), shared.upstreams.get(name)
        self.prefiller = name
        if worker is None or upstream is None or worker.url is None:
            raise _LegFailed(PdReason.PREFILL_FAILED, "the worker has just been removed")
        hosts, port = await shared.hosts.side_channel(worker.url, shared.nixl_of(name))
        decode = shared.planner.fleet.workers.get(flight.worker)
        block_size = worker.block_size() or (None if decode is None else decode.block_size())
        if block_size is None:
            raise _LegFailed(PdReason.UNKNOWN_BLOCK_SIZE, "neither engine says its block size", everywhere=True)
        ports = None if port is None else range(port, port + len(worker.loads))
        legs = Legs.new(
            request_id=self._sending.headers["X-Request-Id"],
            prefill_worker=name,
            decode_worker=flight.worker,
            prefill_hosts=hosts,
            prefill_ports=ports,
            block_size=block_size,
            prompt_tokens=flight.facts.prompt_tokens if flight.facts.tokens is not None else None,
        )
        shared.hits.predicted(name, flight.facts.prompt_tokens, flight.plan.chosen.prefill_cached_tokens)
        headers = self._sending.headers.copy()
        for name_here in (RANK_HEADER, "Accept-Encoding"):  # We are to read the answer.
            headers.popall(name_here, None)
        if len(worker.loads) > 1:
            headers[RANK_HEADER] = str(rank)
        body = self._body.prefill(shared.connector.prefill_params(legs))
        began_s = time.monotonic()
        asked = asyncio.get_running_loop().create_task(self._answer(name, upstream, headers, body))
        try:
            answered_s, data = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(partial(self._nobody_waits, legs))
            asyncio.get_running_loop().call_later(_LINGER_S, asked.cancel)
            raise
        self._note_prefill(name, began_s)
        return self._offer(legs, data, answered_s)

    def _nobody_waits(self, legs: Legs, asked: asyncio.Task[tuple[float, bytes]]) -> None:
        """The client left, and the prefill worker has answered all the same."""
        if asked.cancelled() or asked.exception() is not None:
            return
        answered_s, data = asked.result()
        with suppress(_LegFailed):
            self.give_back(self._offer(legs, data, answered_s))

    def give_back(self, offer: Offer) -> None:
        """Let the prefill worker know that nobody will come for what it holds."""
        facts = self._flight.facts
        self._shared.releases.release(
            offer.answer.raw_params or {},
            model=facts.model,
            prefill=offer.legs.prefill_worker,
            decode=offer.legs.decode_worker,
            n_tokens=offer.answer.prompt_tokens or facts.prompt_tokens,
            lease_ends_s=offer.lease_ends_s,
            authorization=self._sending.headers.get("Authorization"),
        )

    async def _answer(
        self, name: str, upstream: Upstream, headers: CIMultiDict[str], body: bytes
    ) -> tuple[float, bytes]:
        """(when it began to answer, the answer) of a prefill worker. Raises _LegFailed or RefusedByPrefill."""
        health = self._shared.health
        ticket = health.request_started(name, time.monotonic(), self._flight.plan.chosen.price.ttft_s)
        end = End.CANCELLED
        try:
            async with asyncio.timeout(self._shared.settings.prefill_timeout_s):
                status, raw_headers, answered_s, data = await self._post(upstream, headers, body)
            end = End.OK if status < 400 else End.SERVER_ERROR if status >= 500 else End.CLIENT_ERROR
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            end = End.CONNECT
            raise _LegFailed(PdReason.PREFILL_FAILED, "it cannot be reached") from exc
        except TimeoutError as exc:
            end = End.TIMEOUT
            raise _LegFailed(PdReason.PREFILL_TIMEOUT, "it did not answer in time") from exc
        except (aiohttp.ClientError, OSError) as exc:
            end = End.RESET
            raise _LegFailed(PdReason.PREFILL_FAILED, "its answer broke off") from exc
        finally:
            health.request_ended(ticket, end, time.monotonic())
        if 400 <= status < 500:
            self._shared.metrics.handoff(*self._names(), "refused")
            self._shared.metrics.stage(remote=True, stage="prefill", outcome="refused")
            raise RefusedByPrefill(status, raw_headers, data)
        if not 200 <= status < 300:
            raise _LegFailed(PdReason.PREFILL_FAILED, f"it answered with status {status}")
        return answered_s, data

    async def _post(
        self, upstream: Upstream, headers: CIMultiDict[str], body: bytes
    ) -> tuple[int, RawHeaders, float, bytes]:
        """Once more on a new connection if a pooled one was closed under it: nothing is lost by computing twice."""
        try:
            return await self._once(upstream, headers, body, fresh=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            return await self._once(upstream, headers, body, fresh=True)

    async def _once(
        self, upstream: Upstream, headers: CIMultiDict[str], body: bytes, *, fresh: bool
    ) -> tuple[int, RawHeaders, float, bytes]:
        began_s = time.monotonic()
        upstream.acquire()
        try:
            response = await upstream.send(self._sending.method, self._sending.target, headers, body, fresh=fresh)
            answered_s = time.monotonic()
            delay_s = self._shared.clock.delay_s(self.prefiller or "", response.headers.get("Date"), time.time())
            answered_s = max(began_s, answered_s - delay_s)
            try:
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > _LONGEST_ANSWER_BYTES:
                        raise aiohttp.ClientPayloadError("the prefill answer is too long")
                return response.status, response.raw_headers, answered_s, bytes(data)
            except (aiohttp.ClientError, OSError):
                if response.status < 300:
                    self._strand(answered_s)
                raise
            finally:
                response.close()  # Nothing, when it was read to the end.
        finally:
            self._shared.upstreams.release(upstream)

    def _strand(self, answered_s: float) -> None:
        """It has done its work, and what it holds only an answer that could be read would have told."""
        until_s = answered_s + self._shared.settings.lease_s
        self._shared.releases.stranded.add(self.prefiller or "", self._flight.facts.prompt_tokens, until_s)

    def _note_prefill(self, name: str, began_s: float) -> None:
        shared, request_id = self._shared, self._flight.facts.request_id
        now_s = time.monotonic()
        self.prefill_s = now_s - began_s
        wait_s = shared.planner.prefill_wait_s(request_id, now_s)
        shared.planner.observe(request_id, _PREFILL_DONE, now_s)
        if wait_s is not None:
            wait_s = min(wait_s, self.prefill_s)
            shared.metrics.prefilled(name, wait_s, self.prefill_s - wait_s)

    def _offer(self, legs: Legs, data: bytes, answered_s: float) -> Offer:
        shared = self._shared
        lease_ends_s = answered_s + shared.settings.lease_s
        try:
            answer = read_answer(data, self._kind)
        except BadAnswer as exc:
            self._strand(answered_s)
            raise _LegFailed(PdReason.PREFILL_FAILED, str(exc)) from exc
        self._note_cached(legs.prefill_worker, answer)
        if not answer.params:
            raise self._nothing_held(legs, answer)
        held = answer.prompt_tokens or self._flight.facts.prompt_tokens
        try:
            params = shared.connector.decode_params(legs, answer)
            engine_id, request_id = (str(answer.params.get(name)) for name in ("remote_engine_id", "remote_request_id"))
            stale = shared.engine_ids.accept(legs.prefill_worker, engine_id, request_id, time.monotonic())
            if stale is not None:
                raise BadParams(stale)
        except BadParams as exc:
            # No engine may see them, so nobody can give the blocks back before the lease is over.
            shared.releases.stranded.add(legs.prefill_worker, held, lease_ends_s)
            raise _LegFailed(PdReason.BAD_PARAMS, str(exc), pair=True) from exc
        shared.metrics.stage(remote=True, stage="prefill", outcome="ok")
        return Offer(
            legs,
            answer,
            self._body.decode(params, answer.prompt_token_ids),
            deadline_s=lease_ends_s - shared.settings.margin_s,
            lease_ends_s=lease_ends_s,
        )

    def _note_cached(self, name: str, answer: PrefillAnswer) -> None:
        if answer.prompt_tokens is not None and answer.cached_tokens is not None:
            predicted = self._flight.plan.chosen.prefill_cached_tokens
            self._shared.hits.reported(name, answer.prompt_tokens, predicted, answer.cached_tokens)

    def _nothing_held(self, legs: Legs, answer: PrefillAnswer) -> _LegFailed:
        """A prompt shorter than a block, or an answer that stopped by itself, leaves nothing to fetch anywhere; a
        server without connector never does.
        """
        short = answer.prompt_tokens is not None and answer.prompt_tokens < legs.block_size
        by_itself = short or answer.stopped
        return _LegFailed(PdReason.NO_PARAMS, "it holds nothing for others", everywhere=by_itself, pair=not by_itself)

    def _names(self) -> tuple[str, str]:
        return self.prefiller or "", self._flight.worker
