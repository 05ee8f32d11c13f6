"""One inference request, from its body to its last byte.

read the body -> facts (token ids made off the loop) -> dispatch: plan, book, send, first byte -> relay. Leaving this
code in any way gives the booking back and closes the worker's connection if its answer was not read to the end, which
is what stops the engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import count
from typing import Any
from urllib.parse import quote

import msgspec
from multidict import CIMultiDict

from gateway.auth.door import Visit
from gateway.engine.health import End
from gateway.handoff.prefill_leg import RefusedByPrefill
from gateway.proxy import errors, steps
from gateway.proxy.access import Record
from gateway.proxy.background import Running
from gateway.proxy.dispatch import Dispatch, Sending
from gateway.proxy.errors import ApiError
from gateway.proxy.evictable import Sent
from gateway.proxy.flight import Flight
from gateway.proxy.headers import OUTCOME_HEADER, response_headers
from gateway.proxy.incoming import Incoming, Reply
from gateway.proxy.parts import Draining, Parts
from gateway.proxy.relay import Answer, ClientStalled, UpstreamBroke
from gateway.proxy.routes import Route
from gateway.proxy.steps import CLIENT_LEFT
from gateway.proxy.usage import Usage, UsageTail
from gateway.request import members_of
from gateway.stored import ResponseHead
from gateway.tracing.types import TRACE_ID_HEADER
from scorer.types import PdReason, RequestFacts

_log = logging.getLogger(__name__)

_LONGEST_REQUEST_ID = 256
_ID_PREFIX = secrets.token_hex(10)
_ids = count(1)
_PREFLIGHT_S = 10.0
"""Longest wait for an engine's answer to one."""
_BODY_REASONS = {408: "body_timeout", 413: "body_too_large"}
_SAFE_IN_OUTCOME = "!#$&'()*+,/:<>?@[]^_`{|}~-."


Holder = Callable[[CIMultiDict[str], str | None], Awaitable[str]]
"""(headers that go on, tenant) -> the worker"""


class Exchange:
    """The state of one request while it is served."""

    __slots__ = (
        "_admitted",
        "_dispatch",
        "_holder",
        "_parts",
        "_plan_id",
        "_relaying",
        "_running",
        "_runs_on",
        "_server",
        "_trace",
        "_usage",
        "_visit",
        "_wait_s",
        "began_s",
        "headers",
        "record",
        "request",
        "route",
        "status",
        "target",
    )

    def __init__(
        self,
        parts: Parts,
        server: Draining,
        request: Incoming,
        route: Route,
        target: str,
        holder: Holder | None = None,
    ) -> None:
        """`holder` names the one worker that can answer; else it is chosen."""
        self._holder = holder
        self._parts = parts
        self._server = server
        self.request = request
        self.route = route
        self.target = target
        self.headers = request.passing()
        request_id = self.headers.get("X-Request-Id", "")
        if not request_id or len(request_id) > _LONGEST_REQUEST_ID:
            request_id = f"{_ID_PREFIX}{next(_ids):012x}"
            self.headers["X-Request-Id"] = request_id
        self.record = Record(
            request_id=request_id,
            method=request.method,
            path=target.partition("?")[0],
            status=CLIENT_LEFT,
            client=request.remote,
        )
        tracing = parts.tracing
        self._trace = None if tracing is None else tracing.request(self.record, self.headers, route.tokens)
        self.began_s = time.monotonic()
        self._dispatch: Dispatch | None = None
        self._plan_id: str | None = None
        self._usage: Usage | None = None
        self._visit: Visit | None = None
        self._wait_s: float | None = None
        self._admitted = False
        self._relaying = False
        self._running: Running | None = None
        """The response, where there are keys."""
        self._runs_on = False
        """It may outlast its answer."""

    @property
    def _flight(self) -> Flight | None:
        return None if self._dispatch is None else self._dispatch.flight

    async def serve(self) -> Reply | None:
        """An answer of our own; None: a worker's was sent, or broken off."""
        try:
            return await self._serve()
        except ApiError as exc:
            return self._own_answer(exc)
        except UpstreamBroke as exc:
            self._cut("timeout" if isinstance(exc.__cause__, TimeoutError) else "upstream_broke")
            return None
        except ClientStalled:
            self._cut("client_stalled")
            self.request.abort()  # To close it would wait for the client.
            return None
        except ConnectionError:
            self._cut("client_left")
            return None
        except asyncio.CancelledError:
            self._cut("drained" if self._server.cutting else "client_left")
            raise
        except Exception as exc:
            errors.log_unexpected(_log, "unexpected; the request is given up", exc)
            if self._relaying:
                self.request.close()
                return None
            return self._own_answer(ApiError(500, "The gateway failed.", type_=errors.INTERNAL, code="internal"))
        finally:
            self._finish()

    # ---- the way there -----------------------------------------------------------------------------------------------

    async def _serve(self) -> Reply | None:
        parts, is_preflight = self._parts, self.request.method == "OPTIONS"
        tenant: str | None = None
        if parts.tenancy.by_certificate:
            tenant = self.request.certificate_name()
        if parts.door is not None:
            visit = self._visit = steps.at_door(parts, self.headers, anonymous=is_preflight)
            if visit is not None:  # Before its body is read, which takes time and memory.
                tenant = self.record.tenant = visit.tenant
                # A stored response must be to be had while others take all places, itself one of them perhaps.
                steps.entered(parts, visit, works=self._holder is None)
        trace = self._trace
        if trace is not None:
            trace.stage("read_body")
        body = b"" if is_preflight else await self._body()
        if trace is not None:
            trace.stage("tokenise")
        began_s = time.monotonic()
        tenant, body = steps.identified(
            self._parts,
            self.headers,
            body,
            salted=self.route.queued,
            takes_salt=self.route.takes_salt,
            anonymous=is_preflight,  # Browsers send preflights without the request's headers.
            authenticated=tenant,
        )
        if not is_preflight:  # Those need no key, and have places of their own.
            self._server.admit()
            self._admitted = True
        is_placed = self._holder is None and not is_preflight and bool(body)
        members = members_of(body) if is_placed else None
        dispatch = self._dispatch = Dispatch(
            self._parts,
            self.request,
            self.record,
            Sending(
                method=self.request.method,
                target=self.target,
                kind=self.route.tokens,
                headers=self.headers,
                raw=steps.cleaned(self._parts, body, members),
            ),
            trace,
        )
        if self._holder is not None and not is_preflight:
            await self._relay(await dispatch.at(await self._holder(self.headers, tenant)), self.began_s)
            return None
        if not is_placed:
            await self._relay(await (_in_time(dispatch) if is_preflight else dispatch.anywhere()), self.began_s)
            return None
        hints = self._parts.hints(self.request)
        facts = steps.hinted(await self._facts(body, members, tenant), hints)
        if tenant is not None:
            facts = msgspec.structs.replace(facts, tenant=tenant)
        if self._visit is not None:
            facts = steps.within_key(parts, self._visit, facts, self.headers, body, self.route)
            self._runs_on = self.route.tokens == "responses" and steps.may_run_on(members)
        if facts.keep_local is None and self.request.is_leg:
            facts = msgspec.structs.replace(facts, keep_local=PdReason.PLAN)
        queue = self._parts.queue
        if queue is not None and self.route.queued:
            if trace is not None:
                trace.stage("queue")
            self._wait_s = await queue.enter(facts, self.headers, self.record)
        if trace is not None:
            trace.stage("decide")
        dispatch.plan(facts)  # With nothing awaited in between: until it is booked no other is let go.
        self._plan_id = hints.plan_id
        overhead_s = time.monotonic() - began_s - (self.record.queued_ms or 0.0) / 1000
        self._parts.metrics.overhead.observe(overhead_s)
        self.record.overhead_ms = round(overhead_s * 1000, 3)
        try:
            answer = await self._answer(dispatch, facts)
        except RefusedByPrefill as exc:
            return self._refused(exc)
        await self._relay(answer, began_s)
        return None

    async def _body(self) -> bytes:
        parts = self._parts
        try:
            return await self.request.body(parts.max_body_bytes, parts.min_body_bytes_per_s)
        except ApiError as exc:
            parts.metrics.rejected(_BODY_REASONS.get(exc.status, "bad_request"))
            raise

    async def _answer(self, dispatch: Dispatch, facts: RequestFacts) -> Answer:
        queue = self._parts.queue
        # Who asks for a prompt to be computed would only compute it there instead.
        if queue is None or not self.route.queued or self.request.is_leg:
            return await dispatch.run()
        async with Sent(queue, facts, self.record, lambda: dispatch.flight):
            return await dispatch.run()

    async def _facts(self, body: bytes, members: dict[str, Any] | None, tenant: str | None) -> RequestFacts:
        # Clients may repeat an id; bookings are kept under one of ours.
        booking_id = f"{self.record.request_id}/{id(self):x}"
        return await steps.read_facts(self._parts, booking_id, self.route.tokens, body, self.headers, members, tenant)

    def _refused(self, refusal: RefusedByPrefill) -> Reply:
        """The prefill worker has said what is wrong with the request."""
        self.record.status = refusal.status
        reply = refusal.reply()
        self._say_limits(reply.headers)
        self._name_choice(reply.headers)
        reply.headers.setdefault("X-Request-Id", self.record.request_id)
        if self.record.trace_id is not None:
            reply.headers[TRACE_ID_HEADER] = self.record.trace_id
        reply.close = self._server.draining
        return reply

    # ---- the way back ------------------------------------------------------------------------------------------------

    async def _relay(self, answer: Answer, began_s: float) -> None:
        flight, record = self._flight, self.record
        self._relaying = True
        record.status = answer.status
        good = answer.status < 400
        headers = response_headers(answer.upstream.raw_headers)
        headers.setdefault("X-Request-Id", record.request_id)
        self._say_limits(headers)
        if not good and record.trace_id is not None:
            headers[TRACE_ID_HEADER] = record.trace_id
        if flight is None:
            await self._send(answer, headers, None, None)
            return
        if self._parts.response_headers:
            headers["x-warmroute-worker"] = flight.worker
            headers["x-warmroute-cached-tokens"] = str(flight.plan.chosen.cached_tokens)
            headers["x-warmroute-overhead-ms"] = f"{record.overhead_ms:.3f}"
            if flight.plan.session is not None:
                headers["x-warmroute-session"] = flight.plan.session.value
        self._name_choice(headers)
        tail = UsageTail(self._response_head(flight), answer.upstream.header("Content-Type"))
        if good:
            flight.first_byte()
            if answer.is_stream:
                now_s = time.monotonic()
                ttft_s = now_s - began_s
                record.ttft_ms = round(ttft_s * 1000, 3)
                self._parts.metrics.ttft.observe(ttft_s)
                self._parts.decisions.pace.ttft.add(ttft_s, now_s)
                if self._dispatch is not None and self._dispatch.leg is not None:
                    self._dispatch.leg.first_token()
        await self._send(answer, headers, flight, tail)
        if good:
            usage = self._usage = tail.read()
            if usage is not None:
                steps.note_usage(self._parts, record, flight, usage)
            flight.end(None if self._usage is None else self._usage.output_tokens)
        else:
            flight.refused(answer.status)
        self._parts.handoffs.metrics.stage(flight.plan.choice, stage="decode", outcome="ok" if good else "refused")

    def _response_head(self, flight: Flight) -> ResponseHead | None:
        """None: the worker keeps no response."""
        raw = b"" if self._dispatch is None else self._dispatch.raw
        keeps = steps.keeps_response(self.route.tokens, raw)
        background = self._parts.background
        if self._visit is None or background is None or self.route.tokens != "responses":
            return steps.response_head(self._parts, flight) if keeps else None
        remember = steps.response_noted(self._parts, flight)

        def found(response_id: str) -> None:
            self._running = background.begun(response_id)
            remember(response_id)

        return ResponseHead(found)

    def _say_limits(self, headers: MutableMapping[str, str]) -> None:
        """Those of its key, and what is left of them. An answer that is no good one costs no tokens."""
        if self._visit is not None:
            if self.record.status >= 400:
                self._visit.unused()
            headers.update(self._visit.headers())

    def _name_choice(self, headers: MutableMapping[str, str]) -> None:
        """`x-warmroute-outcome`, for whoever has planned the request in front of us, and for whoever wonders."""
        record = self.record
        if not self._parts.response_headers or record.choice is None:
            return
        shown_id = self._plan_id or record.request_id
        if not shown_id.isalnum() or not shown_id.isascii():
            shown_id = quote(shown_id, safe=_SAFE_IN_OUTCOME, errors="surrogateescape")
        parts = [f"id={shown_id}", f"choice={record.choice}", f"reason={record.pd_reason}"]
        if record.prefill is not None:
            parts.append(f"prefiller={record.prefill}")
        if record.prefill_ms is not None:
            parts.append(f"prefill_ms={record.prefill_ms}")
        headers[OUTCOME_HEADER] = ";".join(parts)

    async def _send(
        self, answer: Answer, headers: CIMultiDict[str], flight: Flight | None, tail: UsageTail | None
    ) -> None:
        deadline_s = asyncio.get_running_loop().time() + max(
            0.0, self.began_s + self._parts.upstreams.request_timeout_s - time.monotonic()
        )
        await answer.relay(self.request, headers, flight, tail, close=self._closes, deadline_s=deadline_s)

    def _own_answer(self, error: ApiError) -> Reply:
        self.record.status, self.record.error = error.status, error.code
        reply = Reply.of(error, self.record.path)
        reply.headers["X-Request-Id"] = self.record.request_id
        self._say_limits(reply.headers)
        if self.record.trace_id is not None:
            reply.headers[TRACE_ID_HEADER] = self.record.trace_id
        self._name_choice(reply.headers)
        reply.close = self._closes or error.status in _BODY_REASONS
        return reply

    @property
    def _closes(self) -> bool:
        """Whether the connection ends with the answer: what was not read of a request is not waited for."""
        return self._server.draining or not self.request.is_read

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def _cut(self, reason: str) -> None:
        self.record.cut = reason
        self._parts.metrics.cut(reason)
        if self._dispatch is not None and self._dispatch.leg is not None:
            self._dispatch.leg.failed(reason)
        if self._flight is not None and reason in ("upstream_broke", "timeout"):
            self._flight.failed(End.TIMEOUT if reason == "timeout" else End.RESET, reason)

    def _finish(self) -> None:
        """Every way out leads through here, and no step keeps the next from being taken."""
        parts, record = self._parts, self.record
        try:
            if self._dispatch is not None:
                self._dispatch.close()
        except Exception as exc:
            errors.log_unexpected(_log, "unexpected while cleaning up; going on", exc)
        finally:
            if self._admitted:
                self._server.leave()
            if self._visit is not None:
                self._settle(self._visit)
            steps.note_over(parts, record, self.began_s, self._flight, self._wait_s)
            if self._trace is not None:
                self._trace.finish(self._flight, self._usage)
            if parts.recorder.active and self._flight is not None and self._was_answered():
                steps.note_recorded(parts, self._flight, self.began_s, self._usage)

    def _settle(self, visit: Visit) -> None:
        """Count against its key what it took: what its answer says, else what went by, else what was reserved. Of one
        that no worker has answered well, nothing. One that goes on in the background is at work until it is over.
        """
        flight, usage, record = self._flight, self._usage, self.record
        running, background = self._running, self._parts.background
        if flight is not None and (record.status < 400 if self._relaying else record.cut == "client_left"):
            if usage is not None:
                visit.used(usage.prompt_tokens, usage.output_tokens or 0)
            elif self._runs_on and running is not None and background is not None:
                background.follow(running, visit, flight.worker, self.headers)
                return
            else:
                visit.used(None, flight.streamed_tokens if flight.facts.streaming else None)
        if running is not None and background is not None:
            background.over(running)
        visit.leave()

    def _was_answered(self) -> bool:
        """Whether a prompt was, or began to be."""
        return self._relaying and self.record.status < 400 and self.route.tokens is not None


async def _in_time(dispatch: Dispatch) -> Answer:
    """An engine's answer to a preflight. Raises ApiError."""
    try:
        async with asyncio.timeout(_PREFLIGHT_S):
            return await dispatch.anywhere()
    except TimeoutError:
        text = f"No worker answered within {_PREFLIGHT_S:g} s."
        raise ApiError(504, text, type_=errors.UPSTREAM, code="upstream_timeout") from None
