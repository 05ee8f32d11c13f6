"""What becomes of a pick: its booking is given back on every way out, and what the response tells is learned.

A response from the picked endpoint is treated like one the gateway relays. One from another endpoint gives the booking
at the picked one back and is booked where it runs; the times seen then say nothing and teach nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from multidict import CIMultiDict

from gateway.epp.local_reply import LONGEST_TEXT_BYTES, is_local_reply, what_failed
from gateway.epp.outcome import SidecarOutcome, read_outcome
from gateway.epp.parts import EppParts
from gateway.proxy import steps
from gateway.proxy.access import Record
from gateway.proxy.flight import Flight
from gateway.proxy.headers import OUTCOME_HEADER
from gateway.proxy.usage import Usage, UsageTail
from gateway.queue.shed import EVICTED
from gateway.tracing.types import RequestTrace
from scorer.planner import ModelNotFound, NoWorker
from scorer.types import LOCAL, Outcome, OutcomeKind, PdReason

EVICTED_STATUS = 429
UNSEEN = 0
"""In logs and metrics, the status of a response that the proxy does not show."""
_HELD_EVENTS = 16
_SWITCHED = 101
"""A WebSocket begins."""
_PAIR_FAILED = frozenset(
    {
        PdReason.PREFILL_FAILED,
        PdReason.PREFILL_TIMEOUT,
        PdReason.NO_PARAMS,
        PdReason.BAD_PARAMS,
        PdReason.KV_LOAD_FAILED,
        PdReason.PAIR_BROKEN,
        PdReason.PAIR_INCOMPATIBLE,
    }
)


class Watched:
    """One pick. `flight` None: nothing is booked. `kind`: of the prompt; `keeps`: the worker is to keep the response;
    `wait_s` as `Queue.enter` returned it; `began_s` when the request was here. `answered` is called when its response
    begins, or it is over.
    """

    __slots__ = (
        "_answered", "_began_s", "_elsewhere", "_endpoint", "_first", "_flight", "_guessed", "_is_stream", "_keeps",
        "_kind", "_local_text", "_over", "_parts", "_plan_id", "_record", "_shared", "_tail", "_timer", "_trace",
        "_usage", "_wait_s",
    )  # fmt: skip

    def __init__(
        self,
        shared: EppParts,
        record: Record,
        *,
        began_s: float,
        endpoint: str,
        flight: Flight | None = None,
        plan_id: str = "",
        kind: str | None = None,
        keeps: bool = False,
        wait_s: float | None = None,
        trace: RequestTrace | None = None,
        answered: Callable[[], None] | None = None,
    ) -> None:
        self._trace = trace
        self._answered = answered
        self._usage: Usage | None = None
        self._shared = shared
        self._parts = shared.parts
        self._record = record
        self._began_s = began_s
        self._endpoint = endpoint
        self._flight = flight
        self._plan_id = plan_id
        self._kind = kind
        self._keeps = keeps
        self._wait_s = wait_s
        self._tail: UsageTail | None = None
        self._is_stream = False
        self._first = False
        self._guessed = False
        """When the first token came says nothing."""
        self._elsewhere = False
        self._local_text: bytes | None = None
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        shared.began()
        if flight is not None:
            flight.sent()
            if flight.plan.remote and not flight.facts.streaming:
                # Its whole answer comes at once, long after the prefill worker is done.
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(flight.plan.chosen.price.ttft_s, self._think_prefilled)

    # ---- what is heard -----------------------------------------------------------------------------------------------

    def responded(self, status: int, headers: CIMultiDict[str], served: str | None) -> None:
        record, flight = self._record, self._flight
        self._now_answered()
        record.status = status
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        if is_local_reply(status, headers):
            self._local_text = b""
            return
        if served is not None and served != self._endpoint:
            self._book_over(served)
        elif flight is not None:
            self._take_outcome(flight, headers.get(OUTCOME_HEADER))
        if status == _SWITCHED and self._flight is not None:
            self._flight.first_byte(guessed=True)
            self._flight.lost_sight()  # Either side may be silent for as long as it likes.
            self._first = True
        if self._flight is not None:
            head = steps.response_head(self._parts, self._flight) if self._keeps else None
            self._tail = UsageTail(head, headers.get("content-type"))

    def chunk(self, data: bytes) -> None:
        self._record.sent_bytes += len(data)
        if self._local_text is not None:
            self._local_text += data[: LONGEST_TEXT_BYTES - len(self._local_text)]
            return
        flight, tail = self._flight, self._tail
        if flight is None or tail is None or not data:
            return
        if not self._first:
            self._first = True
            # A proxy that is configured to hold responses shows a stream when it is over.
            self._guessed = self._guessed or (self._is_stream and data.count(b"\n\n") >= _HELD_EVENTS)
            if self._record.status < 400:
                self._note_first(flight)
        tail.feed(data)
        if self._is_stream:
            flight.passed(data)

    def ended(self) -> None:
        try:
            flight = self._flight
            if self._local_text is not None:
                self._fail(self._local_text)
            elif flight is not None:
                good = self._record.status < 400
                if good:
                    self._note_good(flight)
                else:
                    flight.refused(self._record.status)
                outcome = "ok" if good else "refused"
                self._parts.handoffs.metrics.stage(flight.plan.choice, stage="decode", outcome=outcome)
        finally:
            self._finish()

    def aborted(self) -> None:
        try:
            if self._local_text is not None:
                self._fail(self._local_text)
            else:
                self._record.cut = "aborted"
                self._parts.metrics.cut("aborted")
        finally:
            self._finish()

    def unseen(self) -> None:
        flight, self._flight = self._flight, None
        self._record.status = UNSEEN
        try:
            if flight is not None:
                self._shared.unseen.take(flight)
        finally:
            self._finish()

    def recalled(self) -> None:
        self._record.status, self._record.error = EVICTED_STATUS, EVICTED
        self._finish()

    def _now_answered(self) -> None:
        if self._answered is not None:
            self._answered()
            self._answered = None

    # ---- what it means -----------------------------------------------------------------------------------------------

    def _note_first(self, flight: Flight) -> None:
        flight.first_byte(guessed=self._guessed)
        if self._is_stream:
            if self._trace is not None:
                self._trace.first_token()
            now_s = time.monotonic()
            ttft_s = now_s - self._began_s
            self._record.ttft_ms = round(ttft_s * 1000, 3)
            self._parts.metrics.ttft.observe(ttft_s)
            self._parts.decisions.pace.ttft.add(ttft_s, now_s)

    def _note_good(self, flight: Flight) -> None:
        usage = self._usage = None if self._tail is None else self._tail.read()
        if usage is not None:
            if self._elsewhere:  # What was predicted there was predicted after the fact.
                steps.note_tokens(self._parts, self._record, usage)
            else:
                steps.note_usage(self._parts, self._record, flight, usage)
        flight.end(None if usage is None else usage.output_tokens)
        if self._parts.recorder.active and self._kind is not None:
            steps.note_recorded(self._parts, flight, self._began_s, usage or Usage())

    def _fail(self, text: bytes) -> None:
        """The proxy could not reach the endpoint."""
        end, what = what_failed(self._record.status, text)
        self._shared.metrics.local_reply(what)
        if self._flight is not None and end is not None:
            self._flight.failed(end, what)

    def _book_over(self, served: str) -> None:
        """Another endpoint has answered than was picked."""
        self._shared.metrics.elsewhere.inc()
        flight, self._flight = self._flight, None
        self._elsewhere = self._guessed = True
        name = self._shared.places.at(served)
        self._record.worker, self._record.rank = name, None
        if flight is None:
            return
        flight.cancel()
        if name is None:
            return
        parts, facts = self._parts, flight.facts
        facts = msgspec.structs.replace(
            facts,
            request_id=facts.request_id + "/2",
            subset=frozenset({name}),
            excluded=frozenset(),
            rank=None,
            keep_local=facts.keep_local or PdReason.PLAN,
        )
        try:
            plan = parts.plan(facts, None)
        except (ModelNotFound, NoWorker):
            return
        self._flight = steps.taken_off(parts, facts, plan)
        self._flight.sent()

    def _take_outcome(self, flight: Flight, said: str | None) -> None:
        """What the sidecar has made of the plan."""
        outcome = None if said is None else read_outcome(said)
        if outcome is None or outcome.plan_id != self._plan_id:
            if said is not None:
                self._shared.metrics.outcome("malformed" if outcome is None else "of_another")
            if flight.plan.remote:
                if said is None and self._record.status < 400:
                    self._shared.metrics.outcome("missing")
                self._think_prefilled()
            return
        record = self._record
        record.choice = outcome.choice
        if outcome.reason is not None:
            record.pd_reason = outcome.reason.value
        if outcome.prefill_s is not None:
            record.prefill_ms = round(outcome.prefill_s * 1000, 3)
        if (outcome.choice == LOCAL) is flight.plan.remote:
            self._shared.metrics.outcome("otherwise")
            self._guessed = True
            if flight.plan.remote:
                self._computed_here(flight, outcome)
            return
        self._shared.metrics.outcome("as_planned")
        if flight.plan.remote and outcome.prefill_s is not None:
            flight.prefilled(flight.plan.decided_at_s + outcome.prefill_s)
        elif flight.plan.remote:
            self._think_prefilled()

    def _computed_here(self, flight: Flight, outcome: SidecarOutcome) -> None:
        """The decode worker has computed the prompt after all."""
        parts, booking, now_s = self._parts, flight.facts.request_id, time.monotonic()
        why = outcome.reason or PdReason.PREFILL_FAILED
        if why in _PAIR_FAILED:
            failed = Outcome(kind=OutcomeKind.PAIR_FAILED, reason=why.value)
            parts.planner.observe(booking, failed, now_s)
        plan = parts.planner.next_prefill(booking, why, None, now_s, parts.rng, local=True)
        if plan is not None:
            flight.plan = plan
            steps.note_local(parts, flight)

    def _think_prefilled(self) -> None:
        if self._flight is not None and not self._flight.ended:
            self._flight.prefilled(guessed=True)

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self._over:
            return
        self._over = True
        self._now_answered()
        try:
            if self._timer is not None:
                self._timer.cancel()
            if self._flight is not None and not self._flight.ended:
                self._flight.cancel()
        finally:
            self._shared.over()
            steps.note_over(self._parts, self._record, self._began_s, self._flight, self._wait_s)
            if self._trace is not None:
                self._trace.finish(self._flight, self._usage)
