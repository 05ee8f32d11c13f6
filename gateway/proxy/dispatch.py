"""From a request's facts to the first piece of a worker's answer.

plan, booked at once -> prefill leg, if the plan has one -> decode leg -> wait for the first byte. Until that byte is
here nothing was sent to the client, so things may be tried again: the next prefill worker, the decode worker by itself,
another decode worker. Once it is here, nothing is.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import NoReturn

import msgspec
from multidict import CIMultiDict

from gateway.engine.health import End
from gateway.handoff.fetch import Fetch
from gateway.handoff.handoff import Handoff, Offer
from gateway.handoff.prefill_leg import RefusedByPrefill
from gateway.proxy import errors, steps
from gateway.proxy.access import Record
from gateway.proxy.attempt import AttemptFailed, BehindSidecar, LeaseOver, LoadFailed, Rejected
from gateway.proxy.errors import ApiError
from gateway.proxy.flight import Flight
from gateway.proxy.headers import RANK_HEADER
from gateway.proxy.incoming import Incoming
from gateway.proxy.parts import Parts
from gateway.proxy.peer import Broken, Disconnected, NoConnection, Upstream, UpstreamError
from gateway.proxy.relay import Answer
from gateway.proxy.timed import TimedBody
from gateway.tracing.types import Leg, RequestTrace
from scorer.planner import ModelNotFound, NoWorker
from scorer.types import PdReason, RequestFacts

_RETRY_STATUSES = frozenset({502, 503})
"""An engine that is going down or full says so before it computes anything; another one may do it."""
_log = logging.getLogger(__name__)


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """The request as it goes on. `kind` None: it has no prompt that could be handed over."""

    method: str
    target: str
    kind: str | None
    headers: CIMultiDict[str]
    raw: bytes


class Dispatch:
    """One request on its way to an answer. Leave it by `close`, however it went."""

    def __init__(
        self, parts: Parts, request: Incoming, record: Record, sending: Sending, trace: RequestTrace | None = None
    ) -> None:
        self._trace = trace
        self.leg: Leg | None = None
        """Of the worker that is to answer, with tracing."""
        self._parts = parts
        self._request = request
        self._record = record
        self._sending = sending
        self.flight: Flight | None = None
        self.answer: Answer | None = None
        self.handoff: Handoff | None = None
        self._offer: Offer | None = None
        self._upstream: Upstream | None = None

    @property
    def raw(self) -> bytes:
        """The request's body."""
        return self._sending.raw

    # ---- placed by its prompt ----------------------------------------------------------------------------------------

    def plan(self, facts: RequestFacts) -> None:
        self.flight = steps.planned(self._parts, self._record, facts)
        if self._trace is not None:
            self._trace.decided(self.flight)

    async def run(self) -> Answer:
        """The answer of the planned worker, or of a second one if the first gave none."""
        flight = self.flight
        assert flight is not None  # noqa: S101 - planned before
        facts = flight.facts
        try:
            answer = await self._serve(flight, fresh=False)
        except AttemptFailed as failure:
            flight.failed(failure.end, failure.reason)
            reason = failure.reason
            second = self._second_plan(facts, flight, same_worker=failure.end is End.RESET)
            if second is None:
                self._give_up(failure, flight)
        else:
            reason = f"status_{answer.status}"
            second = None
            if answer.status in _RETRY_STATUSES:
                second = self._second_plan(facts, flight, same_worker=False)
            if second is None:
                return answer
            flight.refused(answer.status)
        self.drop_answer()
        self._record.retries += 1
        self._parts.metrics.retried(reason)
        if self._trace is not None:
            self._trace.event("retry", reason)
        steps.note_plan(self._parts, self._record, second)
        self._note_choice(second)
        try:
            return await self._serve(second, fresh=True)
        except AttemptFailed as failure:
            second.failed(failure.end, failure.reason)
            self._give_up(failure, second)

    async def _serve(self, flight: Flight, *, fresh: bool) -> Answer:
        """Carry out a plan. Raises AttemptFailed, RefusedByPrefill or ApiError."""
        offer = None
        if flight.plan.remote:
            self.handoff = Handoff(self._parts.handoffs, flight, self._sending, self._trace)
            try:
                offer = self._offer = await self.handoff.prefill()
            except (RefusedByPrefill, ApiError):
                flight.cancel()  # It has been counted as what it was.
                raise
            finally:
                self._note_choice(flight)
            if offer is None:
                steps.note_local(self._parts, flight)
        if offer is None:
            return await self._attempt(flight, self._sending.raw, fresh=fresh)
        try:
            return await self._fetch(flight, offer, fresh=fresh)
        except AttemptFailed as failure:
            self._handoff_failed(flight, offer, PdReason.DECODE_FAILED, failure.reason)
            offer.written = False  # Who has it is not going to use it.
            raise
        except BehindSidecar as exc:
            self._unused(offer)
            self._behind_sidecar(offer)
            return exc.answer
        except LeaseOver:
            self._handoff_failed(flight, offer, PdReason.LEASE_OVER, "no whole request before the deadline")
            self._give_back()
            return await self._alone(flight, PdReason.LEASE_OVER)
        except LoadFailed as failure:
            self._handoff_failed(flight, offer, PdReason.KV_LOAD_FAILED, str(failure))
            self._unused(offer)
            pair = offer.legs.prefill_worker, offer.legs.decode_worker
            answer = await self._alone(flight, PdReason.KV_LOAD_FAILED)
            if answer.status < 500:  # Else it is not the handoff that the worker cannot do.
                self._parts.planner.pairs.broke(pair, time.monotonic(), str(failure))
            return answer
        except Rejected as exc:
            # Perhaps because of what we added (a longer body, Expect): without that it is the client's answer.
            self._handoff_failed(flight, offer, PdReason.DECODE_FAILED, f"status {exc.status}")
            self._unused(offer)
            return await self._alone(flight, PdReason.DECODE_FAILED)

    def _behind_sidecar(self, offer: Offer) -> None:
        names = offer.legs.prefill_worker, offer.legs.decode_worker
        why = f"{names[1]} is a warmroute face itself, which lets no params through; name its engine instead"
        self._parts.planner.pairs.set_incompatible(names, why)
        self._parts.handoffs.metrics.handoff(*names, PdReason.PAIR_INCOMPATIBLE.value)
        _log.warning("nothing is handed over by %s any more: %s", names[0], why)

    async def _fetch(self, flight: Flight, offer: Offer, *, fresh: bool) -> Answer:
        upstream = self._parts.upstreams.get(flight.worker)
        if upstream is None:
            raise AttemptFailed(End.CONNECT)  # The worker has just been removed.
        fetch = Fetch(
            upstream,
            self._sending.kind or "",
            partial(self._attempt, flight),
            self._parts.handoffs.metrics,
            heard_since=partial(self._parts.heard_since, flight.worker),
            replaceable=any(name != flight.worker for name in self._parts.available.decoders()),
        )
        missing_tokens = max(0, flight.facts.prompt_tokens - flight.plan.chosen.cached_tokens)
        answer = await fetch.run(offer, missing_tokens, fresh=fresh)
        offer.fetched = True
        return answer

    async def _alone(self, flight: Flight, why: PdReason) -> Answer:
        """The decode worker computes the prompt after all."""
        parts = self._parts
        self.drop_answer()
        plan = parts.planner.next_prefill(
            flight.facts.request_id, why, parts.available.names(), time.monotonic(), parts.rng, local=True
        )
        if plan is None:
            raise ConnectionResetError("the request has ended")
        flight.plan = plan
        self._note_choice(flight)
        steps.note_local(self._parts, flight)
        return await self._attempt(flight, self._sending.raw, fresh=False)

    def _handoff_failed(self, flight: Flight, offer: Offer, why: PdReason, detail: str) -> None:
        legs = offer.legs
        _log.warning("handoff from %s to %s: %s (%s)", legs.prefill_worker, legs.decode_worker, why.value, detail)
        if self._trace is not None:
            self._trace.event("handoff_failed", why.value)
            if self.leg is not None:
                self.leg.failed(why.value)
        metrics = self._parts.handoffs.metrics
        metrics.handoff(legs.prefill_worker, legs.decode_worker, why.value)
        metrics.stage(flight.plan.choice, stage="decode", outcome=why.value)
        metrics.retried("decode", why.value)

    def _note_choice(self, flight: Flight) -> None:
        record, plan = self._record, flight.plan
        record.choice = plan.choice
        record.pd_reason = plan.pd_reason.value
        if self.handoff is not None:
            record.prefill = self.handoff.prefiller
            record.prefill_ms = None if self.handoff.prefill_s is None else round(self.handoff.prefill_s * 1000, 3)

    def _second_plan(self, facts: RequestFacts, failed: Flight, *, same_worker: bool) -> Flight | None:
        """Book elsewhere if anybody else serves the model; else, if that makes sense, there once more."""
        parts = self._parts
        self._give_back()
        retry = msgspec.structs.replace(
            facts, request_id=facts.request_id + "/2", excluded=facts.excluded | {failed.worker}
        )
        choices = [(retry, parts.available.names())]
        if same_worker:
            keep_local = PdReason.DECODE_FAILED if failed.plan.remote else facts.keep_local
            again = msgspec.structs.replace(retry, excluded=facts.excluded, keep_local=keep_local)
            choices.append((again, [failed.worker, *parts.available.prefills()]))
        for asked, available in choices:
            try:
                plan = parts.plan(asked, available)
            except (ModelNotFound, NoWorker):
                continue
            flight = self.flight = steps.taken_off(parts, asked, plan)
            return flight
        return None

    def _give_up(self, failure: AttemptFailed, flight: Flight) -> NoReturn:
        status = {End.CONNECT: self._parts.unreachable_status, End.TIMEOUT: 504}.get(failure.end, 502)
        raise ApiError(
            status,
            f"Worker {flight.worker} gave no answer ({failure.reason}).",
            type_=errors.UPSTREAM,
            code="upstream_unreachable",
            retry_after_s=1,
        ) from failure

    async def _attempt(self, flight: Flight, body: bytes | TimedBody, *, fresh: bool, ask: bool = False) -> Answer:
        """Send to the planned worker and wait for the first piece of its answer's body. Raises AttemptFailed."""
        upstream = self._parts.upstreams.get(flight.worker)
        if upstream is None:
            raise AttemptFailed(End.CONNECT)  # The worker has just been removed.
        headers = self._sending.headers
        worker = self._parts.planner.fleet.workers.get(flight.worker)
        if worker is not None and len(worker.loads) > 1:
            headers = headers.copy()
            headers[RANK_HEADER] = str(flight.holder[1])
        flight.sent()
        try:
            return await self._exchange(upstream, headers, body, fresh=fresh, ask=ask)
        except NoConnection as exc:
            raise AttemptFailed(End.CONNECT) from exc
        except TimeoutError as exc:
            flight.failed(End.TIMEOUT, "timeout")
            raise ApiError(
                504, f"Worker {flight.worker} did not answer in time.", type_=errors.TIMEOUT, code="upstream_timeout"
            ) from exc
        except (UpstreamError, OSError) as exc:
            if self._request.gone:
                raise ConnectionResetError("the client is gone") from exc
            raise AttemptFailed(End.RESET) from exc

    async def _exchange(
        self, upstream: Upstream, headers: CIMultiDict[str], body: bytes | TimedBody, *, fresh: bool, ask: bool = False
    ) -> Answer:
        self._use(upstream)
        if self._trace is not None:
            headers = self._new_leg(self._trace, upstream, headers).headers
        sending = self._sending
        try:
            response = await upstream.send(sending.method, sending.target, headers, body, fresh=fresh, ask=ask)
            answer = self.answer = Answer(response, b"")
            if not 200 <= response.status <= 599:
                raise Broken("not a status of a final answer")  # 101 would make us a tunnel.
            if self.leg is not None:
                self.leg.answered(response.status)
            answer.first = await response.readany()
        except BaseException as exc:
            if self.leg is not None:
                self.leg.failed(_word(exc))
            raise
        return answer

    def _new_leg(self, trace: RequestTrace, upstream: Upstream, headers: CIMultiDict[str]) -> Leg:
        flight = self.flight
        if flight is None:
            self.leg = trace.leg("forward", self._record.worker or "", None, upstream.base_url, headers)
        else:
            self.leg = trace.leg("decode", *flight.holder, upstream.base_url, headers)
        return self.leg

    # ---- placed by load alone ----------------------------------------------------------------------------------------

    async def anywhere(self) -> Answer:
        """A request without a prompt (CORS preflight, /version): to the least busy worker, with nothing booked."""
        return await self.at(steps.least_busy(self._parts))

    async def at(self, name: str) -> Answer:
        """The answer of that worker, with nothing booked."""
        upstream = self._parts.upstreams.get(name)
        self._record.worker = name
        if upstream is None:
            raise errors.no_worker(f"{name} has left")
        for fresh in (False, True):
            try:
                return await self._exchange(upstream, self._sending.headers, self._sending.raw, fresh=fresh)
            except (UpstreamError, OSError) as exc:
                if self._request.gone:
                    raise ConnectionResetError("the client is gone") from exc
                if not fresh and isinstance(exc, Broken | Disconnected):
                    continue  # Perhaps it was about to be closed as idle.
                timed_out = isinstance(exc, TimeoutError)
                raise ApiError(
                    504 if timed_out else self._parts.unreachable_status,
                    f"Worker {name} gave no answer.",
                    type_=errors.UPSTREAM,
                    code="upstream_timeout" if timed_out else "upstream_unreachable",
                ) from exc
        raise AssertionError

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def _use(self, upstream: Upstream) -> None:
        self.drop_answer()
        if self._upstream is not None:
            self._parts.upstreams.release(self._upstream)
        upstream.acquire()
        self._upstream = upstream

    def drop_answer(self) -> None:
        answer, self.answer = self.answer, None
        if self.leg is not None:
            self.leg.end()
        if answer is not None:
            self._record.sent_bytes += answer.sent_bytes
            answer.close()

    def _unused(self, offer: Offer) -> None:
        """Who was sent it is not going to fetch it."""
        offer.written = False
        self._give_back()

    def _give_back(self) -> None:
        offer, self._offer = self._offer, None
        if offer is not None and not offer.written and self.handoff is not None:
            self.handoff.give_back(offer)

    def close(self) -> None:
        """Give everything back."""
        try:
            flight, offer = self.flight, self._offer
            if flight is not None and not flight.ended:
                metrics = self._parts.handoffs.metrics
                stage = "prefill" if flight.plan.remote and offer is None else "decode"
                metrics.stage(flight.plan.choice, stage=stage, outcome="cancelled")
                if offer is not None and not offer.fetched:
                    metrics.handoff(offer.legs.prefill_worker, offer.legs.decode_worker, "cancelled")
                flight.cancel()
            self._give_back()
            self.drop_answer()
        finally:
            if self._upstream is not None:
                self._parts.upstreams.release(self._upstream)
                self._upstream = None


def _word(exc: BaseException) -> str:
    """What an attempt came to, in a word. Not the exception's text, which may quote a request."""
    if isinstance(exc, NoConnection):
        return "connect"
    if isinstance(exc, TimeoutError):
        return "timeout"
    return "disconnected" if isinstance(exc, UpstreamError | OSError) else "cancelled"
