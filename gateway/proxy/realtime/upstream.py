"""The worker of one session: booked, connected, watched, given back."""

from __future__ import annotations

import time

import aiohttp
import msgspec
from multidict import CIMultiDict

from gateway.engine.health import End, State
from gateway.proxy import errors, steps
from gateway.proxy.access import Record
from gateway.proxy.errors import ApiError
from gateway.proxy.headers import RANK_HEADER
from gateway.proxy.parts import Parts
from gateway.proxy.realtime.dialer import UPGRADE_TIMEOUT_S, Dialer
from gateway.proxy.realtime.ending import ClientSocket
from gateway.tracing.types import RequestTrace
from scorer.types import Outcome, OutcomeKind, RequestFacts


class Upstream:
    """`target` is what a worker is asked for, with `headers`; `record` is told which one it was."""

    def __init__(
        self,
        parts: Parts,
        dialer: Dialer,
        target: str,
        headers: CIMultiDict[str],
        record: Record,
        trace: RequestTrace | None,
    ) -> None:
        self.socket: ClientSocket | None = None
        self._parts = parts
        self._dialer = dialer
        self._target = target
        self._headers = headers
        self._record = record
        self._trace = trace
        self._plan_id: str | None = None
        """Of what is booked."""
        self._place: tuple[str, int] | None = None
        """The worker's name and generation."""

    async def connect(self, facts: RequestFacts) -> ClientSocket:
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

    async def _try(self, facts: RequestFacts) -> ClientSocket:
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
        ticket = parts.health.request_started(name, time.monotonic(), UPGRADE_TIMEOUT_S)
        end = End.CANCELLED
        leg = None if self._trace is None else self._trace.leg("forward", name, rank, known.url or "", headers)
        if leg is not None:
            headers = leg.headers
        try:
            worker = self.socket = await self._dialer.open(known.url or "", self._target, headers)
        except aiohttp.WSServerHandshakeError as exc:
            failed = exc.status >= 500 and exc.status != 501
            end = End.SERVER_ERROR if failed else End.CLIENT_ERROR
            self.give_back(Outcome(kind=OutcomeKind.ERROR, status=exc.status, worker_failed=failed))
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
            if leg is not None and self.socket is None:
                leg.failed(end.name.lower())
        if leg is not None:
            leg.answered(101)
            leg.end()
        parts.planner.observe(self._plan_id, Outcome(kind=OutcomeKind.FIRST_TOKEN), time.monotonic())
        return worker

    def _unreachable(self, name: str, status: int) -> ApiError:
        self.give_back(Outcome(kind=OutcomeKind.ERROR, worker_failed=True))
        text = f"Worker {name} could not be reached."
        return ApiError(status, text, type_=errors.UPSTREAM, code="upstream_unreachable", retry_after_s=1)

    def give_back(self, outcome: Outcome) -> None:
        plan_id, self._plan_id = self._plan_id, None
        if plan_id is not None:
            self._parts.planner.observe(plan_id, outcome, time.monotonic())

    def state(self) -> tuple[bool, bool]:
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

    def broke(self) -> None:
        """It ended the session in a way no worker should."""
        if self._place is not None:
            health, now_s = self._parts.health, time.monotonic()
            health.request_ended(health.request_started(self._place[0], now_s), End.RESET, now_s)
            self.give_back(Outcome(kind=OutcomeKind.ERROR, worker_failed=True))
