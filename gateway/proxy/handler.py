"""One inference request, from its body to its last byte.

read the body -> facts (token ids made off the loop) -> plan, booked at once -> send -> wait for the first byte of the
answer -> relay. Until that byte is here nothing was sent to the client, so one more attempt may be made; after it,
none. Leaving this code in any way gives the booking back and closes the worker's connection if its answer was not read
to the end, which is what stops the engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Collection
from itertools import count
from typing import NoReturn

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from gateway.engine.health import End
from gateway.proxy import errors
from gateway.proxy.access import Record
from gateway.proxy.body import read_body
from gateway.proxy.errors import ApiError
from gateway.proxy.flight import Flight
from gateway.proxy.headers import request_headers, response_headers
from gateway.proxy.parts import Draining, Parts
from gateway.proxy.relay import Answer, ClientStalled, UpstreamBroke
from gateway.proxy.routes import Route
from gateway.proxy.upstream import Upstream
from gateway.proxy.usage import UsageTail
from gateway.request import BadRequest
from indexer import Prompt
from scorer.planner import ModelNotFound, NoWorker
from scorer.types import Outcome, OutcomeKind, Plan, RequestFacts, Role

_log = logging.getLogger(__name__)

_LONGEST_REQUEST_ID = 256
_RETRY_STATUSES = frozenset({502, 503})
"""An engine that is going down or full says so before it computes anything; another one may do it."""
_ID_PREFIX = secrets.token_hex(10)
_ids = count(1)
_BODY_REASONS = {408: "body_timeout", 413: "body_too_large"}
CLIENT_LEFT = 499
"""In logs and metrics, the status of an answer nobody waited for (nginx's)."""


class AttemptFailed(Exception):
    """No usable answer came: no connection (CONNECT), or it broke before the first byte (RESET). A broken one may
    have been about to be closed as idle, so a fresh one to the same worker may still do.
    """

    def __init__(self, end: End) -> None:
        super().__init__(end.value)
        self.end = end

    @property
    def reason(self) -> str:
        return "connect" if self.end is End.CONNECT else "disconnected"


class Exchange:
    """The state of one request while it is served."""

    __slots__ = (
        "_admitted",
        "_answer",
        "_flight",
        "_parts",
        "_relaying",
        "_server",
        "_upstream",
        "began_s",
        "body",
        "headers",
        "record",
        "request",
        "route",
        "status",
        "target",
    )

    def __init__(self, parts: Parts, server: Draining, request: web.BaseRequest, route: Route, target: str) -> None:
        self._parts = parts
        self._server = server
        self.request = request
        self.route = route
        self.target = target
        self.headers = request_headers(request.raw_headers)
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
        self.body = b""
        self.began_s = time.monotonic()
        self._flight: Flight | None = None
        self._answer: Answer | None = None
        self._admitted = False
        self._relaying = False
        self._upstream: Upstream | None = None

    async def serve(self) -> web.StreamResponse:
        """The response, already sent if it is a worker's."""
        try:
            return await self._serve()
        except ApiError as exc:
            return self._own_answer(exc)
        except UpstreamBroke as exc:
            self._cut("timeout" if isinstance(exc.__cause__, TimeoutError) else "upstream_broke")
            return _nothing_more()
        except ClientStalled:
            self._cut("client_stalled")
            if self.request.transport is not None:
                self.request.transport.abort()  # To close it would wait for the client.
            return _nothing_more()
        except ConnectionError:
            self._cut("client_left")
            return _nothing_more()
        except asyncio.CancelledError:
            self._cut("drained" if self._server.cutting else "client_left")
            raise
        except Exception as exc:
            errors.log_unexpected(_log, "unexpected; the request is given up", exc)
            if self._relaying:
                if self.request.transport is not None:
                    self.request.transport.close()
                return _nothing_more()
            return self._own_answer(ApiError(500, "The gateway failed.", type_=errors.INTERNAL, code="internal"))
        finally:
            self._finish()

    # ---- the way there -----------------------------------------------------------------------------------------------

    async def _serve(self) -> web.StreamResponse:
        try:
            self.body = await read_body(self.request, self._parts.max_body_bytes)
        except ApiError as exc:
            self._parts.metrics.rejected(_BODY_REASONS.get(exc.status, "bad_request"))
            raise
        self._server.admit()
        self._admitted = True
        if self.request.method == "OPTIONS" or not self.body:
            return await self._relay_anywhere()
        began_s = time.monotonic()
        facts = await self._facts()
        flight = self._plan(facts)
        overhead_s = time.monotonic() - began_s
        self._parts.metrics.overhead.observe(overhead_s)
        self.record.overhead_ms = round(overhead_s * 1000, 3)
        answer = await self._answer_of(flight, facts)
        return await self._relay(answer, began_s)

    async def _facts(self) -> RequestFacts:
        # Clients may repeat an id; bookings are kept under one of ours.
        request_id = f"{self.record.request_id}/{id(self):x}"
        try:
            return await self._parts.reader.read(request_id, self.route.tokens, self.body, self.headers)
        except BadRequest as exc:
            self._parts.metrics.rejected("bad_request")
            raise ApiError(400, str(exc), code=exc.code, param=exc.param) from None

    def _plan(self, facts: RequestFacts) -> Flight:
        parts = self._parts
        now_s = time.monotonic()
        try:
            plan = parts.planner.plan(facts, self._available(), now_s, parts.rng)
        except ModelNotFound as exc:
            parts.metrics.rejected("model_not_found")
            raise errors.model_not_found(exc.model) from None
        except NoWorker as exc:
            parts.metrics.rejected("no_worker")
            raise errors.no_worker(str(exc)) from None
        flight = self._take_off(facts, plan)
        self._note_plan(flight)
        return flight

    def _take_off(self, facts: RequestFacts, plan: Plan) -> Flight:
        """The flight of a plan just booked. If there can be none, the booking is given back."""
        parts = self._parts
        try:
            flight = self._flight = Flight(parts.planner, parts.health, facts, plan)
        except BaseException:
            parts.planner.observe(facts.request_id, Outcome(kind=OutcomeKind.CANCELLED), time.monotonic())
            raise
        return flight

    def _available(self) -> Collection[str]:
        available = self._parts.available
        return [name for name in self._parts.planner.fleet.workers if available(name)]

    def _note_plan(self, flight: Flight) -> None:
        plan, facts, record = flight.plan, flight.facts, self.record
        worker, predicted = flight.worker, plan.chosen.cached_tokens
        self._parts.metrics.decided(remote=plan.remote, source=facts.token_source)
        self._parts.hits.predicted(worker, facts.prompt_tokens, predicted)
        record.worker, record.rank = flight.holder
        record.model = facts.model
        record.policy = plan.policy
        record.tokens = facts.token_source.value
        record.prompt_tokens = facts.prompt_tokens
        record.predicted_cached_tokens = predicted

    async def _answer_of(self, flight: Flight, facts: RequestFacts) -> Answer:
        """The answer of the planned worker, or of a second one if the first gave none."""
        try:
            answer = await self._attempt(flight, fresh=False)
        except AttemptFailed as failure:
            flight.failed(failure.end, failure.reason)
            reason = failure.reason
            if not self._second_plan(facts, flight, same_worker=failure.end is End.RESET):
                self._give_up(failure, flight)
        else:
            reason = f"status_{answer.status}"
            if answer.status not in _RETRY_STATUSES or not self._second_plan(facts, flight, same_worker=False):
                return answer
            flight.refused(answer.status)
        second = self._flight
        assert second is not None  # noqa: S101 - _second_plan has just set it
        self._drop_answer()
        self.record.retries += 1
        self._parts.metrics.retried(reason)
        self._note_plan(second)
        try:
            return await self._attempt(second, fresh=True)
        except AttemptFailed as failure:
            second.failed(failure.end, failure.reason)
            self._give_up(failure, second)

    def _second_plan(self, facts: RequestFacts, failed: Flight, *, same_worker: bool) -> bool:
        """Book elsewhere if anybody else serves the model; else, if that makes sense, there once more."""
        parts = self._parts
        retry = msgspec.structs.replace(
            facts, request_id=facts.request_id + "/2", excluded=facts.excluded | {failed.worker}
        )
        choices = [(retry, self._available())]
        if same_worker:
            choices.append((msgspec.structs.replace(retry, excluded=facts.excluded), [failed.worker]))
        for asked, available in choices:
            try:
                plan = parts.planner.plan(asked, available, time.monotonic(), parts.rng)
            except (ModelNotFound, NoWorker):
                continue
            self._take_off(asked, plan)
            return True
        return False

    def _give_up(self, failure: AttemptFailed, flight: Flight) -> NoReturn:
        raise ApiError(
            502,
            f"Worker {flight.worker} gave no answer ({failure.reason}).",
            type_=errors.UPSTREAM,
            code="upstream_unreachable",
            retry_after_s=1,
        ) from failure

    async def _attempt(self, flight: Flight, *, fresh: bool) -> Answer:
        """Send to the planned worker and wait for the first piece of its answer's body. Raises AttemptFailed."""
        upstream = self._parts.upstreams.get(flight.worker)
        if upstream is None:
            raise AttemptFailed(End.CONNECT)  # The worker has just been removed.
        headers = self.headers
        if len(self._parts.planner.fleet.workers[flight.worker].loads) > 1:
            headers = headers.copy()
            headers["X-data-parallel-rank"] = str(flight.holder[1])
        try:
            return await self._exchange(upstream, headers, fresh=fresh)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise AttemptFailed(End.CONNECT) from exc
        except TimeoutError as exc:
            flight.failed(End.TIMEOUT, "timeout")
            raise ApiError(
                504, f"Worker {flight.worker} did not answer in time.", type_=errors.TIMEOUT, code="upstream_timeout"
            ) from exc
        except (aiohttp.ClientError, OSError) as exc:
            if self.request.transport is None:
                raise ConnectionResetError("the client is gone") from exc
            raise AttemptFailed(End.RESET) from exc

    async def _exchange(self, upstream: Upstream, headers: CIMultiDict[str], *, fresh: bool) -> Answer:
        self._use(upstream)
        response = await upstream.send(self.request.method, self.target, headers, self.body, fresh=fresh)
        answer = self._answer = Answer(response, b"")
        if not 200 <= response.status <= 599:
            raise aiohttp.ClientPayloadError("not a status of a final answer")  # 101 would make us a tunnel.
        answer.first = await response.content.readany()
        return answer

    async def _relay_anywhere(self) -> web.StreamResponse:
        """A request without a prompt (CORS preflight, /version): to the least busy worker, with nothing booked."""
        fleet = self._parts.planner.fleet
        names = [
            name
            for name in self._available()
            if self._parts.upstreams.get(name) is not None
            and not fleet.workers[name].draining
            and fleet.workers[name].role is not Role.PREFILL
        ]
        if not names:
            self._parts.metrics.rejected("no_worker")
            raise errors.no_worker("none is up")
        name = min(names, key=lambda name: sum(load.requests for load in fleet.workers[name].loads.values()))
        upstream = self._parts.upstreams.get(name)
        self.record.worker = name
        if upstream is None:
            raise errors.no_worker("none is up")
        try:
            answer = await self._exchange(upstream, self.headers, fresh=False)
        except (aiohttp.ClientError, OSError) as exc:
            raise ApiError(502, f"Worker {name} gave no answer.", type_=errors.UPSTREAM, code="upstream") from exc
        return await self._relay(answer, self.began_s)

    # ---- the way back ------------------------------------------------------------------------------------------------

    async def _relay(self, answer: Answer, began_s: float) -> web.StreamResponse:
        flight, record = self._flight, self.record
        self._relaying = True
        record.status = answer.status
        good = answer.status < 400
        headers = response_headers(answer.response.raw_headers)
        headers.setdefault("X-Request-Id", record.request_id)
        if flight is None:
            return await self._send(answer, headers, None, None)
        if self._parts.response_headers:
            headers["x-warmroute-worker"] = flight.worker
            headers["x-warmroute-cached-tokens"] = str(flight.plan.chosen.cached_tokens)
            headers["x-warmroute-overhead-ms"] = f"{record.overhead_ms:.3f}"
        tail = UsageTail()
        if good:
            flight.first_byte()
            if answer.is_stream:
                ttft_s = time.monotonic() - began_s
                record.ttft_ms = round(ttft_s * 1000, 3)
                self._parts.metrics.ttft.observe(ttft_s)
        response = await self._send(answer, headers, flight, tail)
        if good:
            self._note_usage(flight, tail)
            flight.end()
        else:
            flight.refused(answer.status)
        return response

    async def _send(
        self, answer: Answer, headers: CIMultiDict[str], flight: Flight | None, tail: UsageTail | None
    ) -> web.StreamResponse:
        deadline_s = asyncio.get_running_loop().time() + max(
            0.0, self.began_s + self._parts.upstreams.request_timeout_s - time.monotonic()
        )
        return await answer.relay(
            self.request, headers, flight, tail, close=self._server.draining, deadline_s=deadline_s
        )

    def _note_usage(self, flight: Flight, tail: UsageTail) -> None:
        usage = tail.read()
        if usage is None:
            return
        self.record.output_tokens = usage.output_tokens
        facts, cached = flight.facts, usage.cached_tokens
        if cached is None or usage.prompt_tokens is None or not 0 <= cached <= usage.prompt_tokens:
            return
        self.record.cached_tokens = cached
        flight.cached(cached)
        worker, predicted = flight.worker, flight.plan.chosen.cached_tokens
        self._parts.hits.reported(worker, usage.prompt_tokens, predicted, cached)
        if cached and facts.tokens is not None:
            known = self._parts.planner.fleet.workers.get(worker)
            block_size = (known and known.block_size()) or 16
            prompt = Prompt(facts.tokens, cache_salt=facts.cache_salt, extra_keys=facts.extra_keys)
            self._parts.prefixes.note(prompt, facts.lora, block_size, cached, time.monotonic())

    def _own_answer(self, error: ApiError) -> web.Response:
        self.record.status, self.record.error = error.status, error.code
        response = error.response()
        response.headers["X-Request-Id"] = self.record.request_id
        if self._server.draining or error.status in _BODY_REASONS:
            response.force_close()
        return response

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def _use(self, upstream: Upstream) -> None:
        self._drop_answer()
        if self._upstream is not None:
            self._parts.upstreams.release(self._upstream)
        upstream.acquire()
        self._upstream = upstream

    def _drop_answer(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self.record.sent_bytes += answer.sent_bytes
            answer.close()

    def _cut(self, reason: str) -> None:
        self.record.cut = reason
        self._parts.metrics.cut(reason)
        if self._flight is not None and reason in ("upstream_broke", "timeout"):
            self._flight.failed(End.TIMEOUT if reason == "timeout" else End.RESET, reason)

    def _finish(self) -> None:
        """Every way out leads through here, and no step keeps the next from being taken."""
        parts, record = self._parts, self.record
        try:
            if self._flight is not None:
                self._flight.cancel()  # Nothing, if it has ended.
            self._drop_answer()
        except Exception as exc:
            errors.log_unexpected(_log, "unexpected while cleaning up; going on", exc)
        finally:
            if self._admitted:
                self._server.leave()
            if self._upstream is not None:
                parts.upstreams.release(self._upstream)
            duration_s = time.monotonic() - self.began_s
            record.duration_ms = round(duration_s * 1000, 3)
            parts.metrics.request(record.worker, record.status, duration_s)
            parts.access.write(record)


def _nothing_more() -> web.Response:
    """Stands for a response that was broken off: aiohttp finds the connection closed and writes nothing."""
    response = web.Response()
    response.force_close()
    return response
