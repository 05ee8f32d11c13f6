"""One request: from what the proxy asks to where it goes, or why it does not.

whose it is -> what must not pass, which model -> facts, within the deadline -> the queue -> plan, booked at once -> the
plan as headers. Between the booking and the `Pick`, which answers for it by its watch, nothing is awaited.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
from multidict import CIMultiDict

from gateway import form
from gateway.config.schema import EppConfig
from gateway.epp import carrying
from gateway.epp.control import (
    CHOSEN_BY_TEST,
    PICKED_FOR_TEST,
    REWRITE,
    SERVED_FOR_TEST,
    Control,
    not_for_workers,
    read_control,
)
from gateway.epp.objectives import DEFAULT, Objectives
from gateway.epp.parts import EppParts
from gateway.epp.refusals import refusal
from gateway.epp.rewrites import Rewrites
from gateway.epp.sent import Sent
from gateway.epp.watching import Watched
from gateway.extproc.types import Ask, Pick, Refusal
from gateway.handoff.bodies import is_takeable
from gateway.handoff.fields import NotAnObject, split, with_member
from gateway.proxy import errors, steps
from gateway.proxy.access import Record
from gateway.proxy.errors import ApiError
from gateway.proxy.flight import Flight
from gateway.proxy.headers import OUTCOME_HEADER, is_encoded
from gateway.proxy.holders import PREFIX as RESPONSES
from gateway.proxy.realtime import PATH as REALTIME
from gateway.proxy.routes import ROUTES, Route
from gateway.proxy.steps import CLIENT_LEFT
from gateway.request import BadRequest, members_of
from gateway.stored import Place
from gateway.tracing.types import TRACEPARENT, TRACESTATE, RequestTrace
from scorer.types import RequestFacts

_log = logging.getLogger(__name__)
_LONGEST_REQUEST_ID = 256
_ID_PREFIX = secrets.token_hex(6)
_ids = count(1)
_WITHOUT_PROMPT = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_UNKNOWN = Route(frozenset(), queued=False)
_CANCEL = "/cancel"
_ACCEPTS = "accept-encoding"
_LONGEST_MODEL = 1024

FindHolder = Callable[[str, Mapping[str, str], str | None], Awaitable[Place]]


class PlannedPicker:
    """A `gateway.extproc.types.Picker`. `find_holder` says where a stored response is."""

    def __init__(
        self,
        shared: EppParts,
        settings: EppConfig,
        *,
        objectives: Objectives,
        rewrites: Rewrites,
        find_holder: FindHolder,
    ) -> None:
        self._shared = shared
        self._parts = shared.parts
        self._settings = settings
        self._objectives = objectives
        self._rewrites = rewrites
        self._find_holder = find_holder

    async def pick(self, ask: Ask) -> Pick | Refusal:
        began_s = time.monotonic()
        request_id = ask.headers.get("x-request-id", "")
        number = f"{_ID_PREFIX}{next(_ids):x}"
        if not request_id or len(request_id) > _LONGEST_REQUEST_ID:
            request_id = number
        path = ask.path.partition("?")[0]
        record = Record(request_id=request_id, method=ask.method, path=path, status=CLIENT_LEFT)
        tracing = self._parts.tracing
        kind = route_of(unquote(path)).tokens
        trace = None if tracing is None else tracing.request(record, ask.context or ask.headers, kind)
        try:
            return await _Picking(self, ask, record, began_s, number, trace).pick()
        except ApiError as exc:
            error = exc
        except asyncio.CancelledError:
            record.cut = "client_left"
            self._parts.metrics.cut("client_left")
            self._over(record, began_s, trace)
            raise
        except Exception as exc:
            errors.log_unexpected(_log, "unexpected; the request is refused", exc)
            error = ApiError(500, "The endpoint picker failed.", type_=errors.INTERNAL, code="internal")
        record.status, record.error = error.status, error.code
        self._over(record, began_s, trace)
        return refusal(error, record)

    def _over(self, record: Record, began_s: float, trace: RequestTrace | None) -> None:
        """Nothing was picked."""
        steps.note_over(self._parts, record, began_s, None, None)
        if trace is not None:
            trace.finish(None, None)

    # ---- what requests are looked at with ----------------------------------------------------------------------------

    def subset(self, ask: Ask) -> frozenset[str] | None:
        """The only workers that may be picked, by name. Raises ApiError when none of them is ours."""
        endpoints = ask.subset
        if self._settings.conformance and (named := ask.headers.get(CHOSEN_BY_TEST)):
            endpoints = tuple(part.strip() for part in named.split(","))
        if endpoints is None:
            return None
        names = self._shared.places.among(endpoints)
        if not names:
            self._parts.metrics.rejected("no_worker")
            raise errors.no_worker("none of the endpoints that the proxy allows is one of ours")
        return names

    def priority(self, control: Control) -> int | None:
        """Of its objective; None: it names none."""
        if control.objective is None:
            return None
        priority = self._objectives.priority(control.objective)
        self._shared.metrics.objective(known=priority is not None)
        return DEFAULT if priority is None else priority

    def renamed(self, body: bytes, control: Control, headers: CIMultiDict[str]) -> tuple[bytes, tuple[str, str] | None]:
        """The body that asks for the model that is to serve it, and (that model, what the client calls it). Raises
        ApiError.
        """
        if control.model is None and not self._rewrites:
            return body, None
        if control.model is not None and not _is_text(control.model):
            no_text = BadRequest("The header that names the model is not UTF-8.", param=REWRITE[0])
            raise steps.bad_request(self._parts, no_text)
        if is_encoded(headers):
            return body, None
        content_type = headers.get("content-type", "")
        if content_type[:10].lower() == "multipart/":
            return self._renamed_form(content_type, body, control)
        if not is_takeable(body):
            too_many = BadRequest("The request body has too many members.", code="invalid_json")
            raise steps.bad_request(self._parts, too_many)
        try:
            asked = msgspec.json.decode(split(body).get("model", msgspec.Raw(b"null")))
        except (NotAnObject, msgspec.MsgspecError, UnicodeError):
            return body, None
        target = self._target(asked, control)
        if target is None:
            return body, None
        return with_member(body, "model", msgspec.json.encode(target)), (target, asked)

    def _target(self, asked: object, control: Control) -> str | None:
        """The model that is to serve; None: the one that is asked for. Raises ApiError."""
        if not isinstance(asked, str) or (not asked and control.model is None):
            return None
        target = control.model or self._rewrites.target(asked, self._parts.rng)
        if target == asked:
            return None
        if len(asked) > _LONGEST_MODEL:  # It would come back with every token.
            raise steps.bad_request(self._parts, BadRequest("The model's name is too long.", param="model"))
        return target

    def _renamed_form(self, content_type: str, body: bytes, control: Control) -> tuple[bytes, tuple[str, str] | None]:
        asked = form.fields(content_type, body, frozenset({"model"})).get("model")
        target = self._target(asked, control)
        if asked is None or target is None:
            return body, None
        try:
            return form.with_field(content_type, body, "model", target), (target, asked)
        except ValueError as exc:
            raise steps.bad_request(self._parts, BadRequest(f"The model's name is {exc}.", param="model")) from None


class _Picking:
    """The state of one request until it is picked."""

    __slots__ = (
        "_ask", "_began_s", "_headers", "_number", "_parts", "_path", "_picker", "_record", "_route", "_shared",
        "_trace",
    )  # fmt: skip

    def __init__(
        self,
        picker: PlannedPicker,
        ask: Ask,
        record: Record,
        began_s: float,
        number: str,
        trace: RequestTrace | None,
    ) -> None:
        self._trace = trace
        self._picker = picker
        self._shared = picker._shared
        self._parts = picker._parts
        self._ask = ask
        self._record = record
        self._began_s = began_s
        self._number = number
        self._headers = ask.headers.copy()
        self._path = unquote(record.path)  # As engines read it, whatever is written in percents.
        self._route = route_of(self._path)

    async def pick(self) -> Pick:
        ask, picker, route, trace = self._ask, self._picker, self._route, self._trace
        subset = picker.subset(ask)
        if trace is not None:
            trace.stage("tokenise")
        if ask.method == "GET" and self._path.endswith(REALTIME) and not picker._settings.conformance:
            return await self._realtime(subset)
        stored = self._stored()
        if not ask.body or stored or ask.method in _WITHOUT_PROMPT or picker._settings.conformance:
            tenant, _ = steps.identified(
                self._parts, self._headers, b"", salted=False, anonymous=ask.method == "OPTIONS"
            )
            return self._unbooked(await self._without_prompt(stored, subset, tenant))
        tenant, body = steps.identified(
            self._parts,
            self._headers,
            ask.body,
            salted=route.queued or route is _UNKNOWN,
            takes_salt=route.takes_salt,
            anonymous=ask.method == "OPTIONS",
        )
        control = read_control(self._headers)
        members = members_of(body)
        sent, rename = picker.renamed(steps.cleaned(self._parts, body, members), control, self._headers)
        facts = await self._facts(sent, members if sent is body else None, tenant)
        body = sent
        if facts is None:
            return self._unbooked(steps.least_busy(self._parts, subset), body, rename)
        priority = picker.priority(control)
        if tenant is None and not self._parts.tenancy.by_tenant:
            tenant = control.fairness_id  # Else who it is is not for its client to say.
        facts = _with_control(facts, tenant, priority)
        wait_s: float | None = None
        if self._parts.queue is not None and route.queued:
            sheddable = priority is not None and priority < 0
            if trace is not None:
                trace.stage("queue")
            wait_s = await self._parts.queue.enter(
                facts, self._headers, self._record, sheddable=sheddable, within=subset
            )
        return self._plan(self._within(facts, subset), body, rename, wait_s)

    def _plan(
        self, facts: RequestFacts, body: bytes, rename: tuple[str, str] | None = None, wait_s: float | None = None
    ) -> Pick:
        if self._trace is not None:
            self._trace.stage("decide")
        flight = steps.planned(self._parts, self._record, facts)
        if self._trace is not None:
            self._trace.decided(flight)
        try:
            self._note_overhead()
            return self._booked(flight, body, rename, wait_s)
        except BaseException:
            flight.cancel()
            raise

    # ---- with a prompt -----------------------------------------------------------------------------------------------

    async def _facts(self, body: bytes, members: dict[str, Any] | None, tenant: str | None) -> RequestFacts | None:
        """None: it is of no API we know, and goes where there is least to do. Raises ApiError."""
        deadline_s = self._picker._settings.decision_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                if self._route is _UNKNOWN:
                    return await self._facts_of_unknown(body)
                kind = self._route.tokens
                return await steps.read_facts(self._parts, self._booking_id, kind, body, self._headers, members, tenant)
        except TimeoutError:
            self._parts.metrics.rejected("decision_timeout")
            raise ApiError(
                503,
                f"No endpoint was picked within {deadline_s:g} s.",
                type_=errors.UNAVAILABLE,
                code="decision_timeout",
                retry_after_s=1,
            ) from None

    @property
    def _booking_id(self) -> str:
        """Clients may repeat an id; bookings are kept under one of ours."""
        return f"{self._record.request_id}/{self._number}"

    def _within(self, facts: RequestFacts, subset: frozenset[str] | None) -> RequestFacts:
        """Only on these workers. Raises ApiError."""
        if subset is None:
            return facts
        both = subset if facts.subset is None else subset & facts.subset
        if not both:
            self._parts.metrics.rejected("no_worker")
            raise errors.no_worker("who holds the response that this one follows is none of the allowed endpoints")
        return msgspec.structs.replace(facts, subset=both)

    async def _facts_of_unknown(self, body: bytes) -> RequestFacts | None:
        """Of a path that nobody knows; where its body names a model that is served, it goes to who serves it."""
        try:
            facts = await self._parts.reader.read(self._booking_id, None, body, self._headers)
        except BadRequest:
            return None
        workers = self._parts.planner.fleet.workers.values()
        return facts if any(worker.serves(facts.model) for worker in workers) else None

    async def _realtime(self, subset: frozenset[str] | None) -> Pick:
        """A WebSocket, to a worker that serves the model of the query, or the only one there is; else to any."""
        parts, headers = self._parts, self._headers
        model = next(iter(parse_qs(self._ask.path.partition("?")[2]).get("model", ())), None)
        tenant = steps.identified_session(parts, headers)
        try:
            facts = await parts.reader.session(self._booking_id, model, headers)
        except BadRequest:  # It is named later, which only the pod hears.
            return self._unbooked(steps.least_busy(parts, subset))
        return self._plan(self._within(_with_control(facts, tenant, None), subset), b"")

    def _booked(self, flight: Flight, body: bytes, rename: tuple[str, str] | None, wait_s: float | None) -> Pick:
        shared, plan = self._shared, flight.plan
        endpoint = self._endpoint(flight.worker)
        worker = self._parts.planner.fleet.workers[flight.worker]
        if plan.chosen.prefill is not None:
            self._record.prefill = plan.chosen.prefill[0]
        headers = carrying.plan_headers(plan, flight.facts, worker, shared.places, self._number)
        others = carrying.fallbacks(plan, shared.places, self._picker._settings.fallback_endpoints)
        scores = carrying.scores(plan, shared.places) if self._picker._settings.emit_scores else {}
        pick = self._pick((endpoint, *others), headers, body, rename, scores)
        sent, queue = Sent(flight, self._record), self._parts.queue
        may_go = queue is not None and self._route.queued and queue.sent(flight.facts, sent)
        answered = partial(queue.evictables.remove, sent) if queue is not None and may_go else None
        try:
            watch = Watched(
                shared,
                self._record,
                began_s=self._began_s,
                endpoint=endpoint,
                flight=flight,
                plan_id=self._number,
                kind=self._route.tokens,
                keeps=steps.keeps_response(self._route.tokens, body),
                wait_s=wait_s,
                trace=self._trace,
                answered=answered,
            )
        except BaseException:
            if answered is not None:
                answered()
            raise
        return pick(watch=watch, recall=sent.recall if may_go else None)

    # ---- without -----------------------------------------------------------------------------------------------------

    def _stored(self) -> str:
        """The id of the response that is read or changed, below whatever prefix; empty: of none."""
        _, there, name = self._path.rpartition(RESPONSES)
        name = name.removesuffix(_CANCEL)
        is_one = there and "/" not in name and self._ask.method != "OPTIONS"
        return name if is_one and self._ask.method not in self._route.methods else ""

    async def _without_prompt(self, stored: str, subset: frozenset[str] | None, tenant: str | None) -> str:
        """The worker that holds the response `stored`, else the one with least to do."""
        if stored:
            holder = (await self._picker._find_holder(stored, self._headers, tenant)).worker
            if subset is None or holder in subset:
                return holder
        return steps.least_busy(self._parts, subset)

    def _unbooked(self, worker: str, body: bytes | None = None, rename: tuple[str, str] | None = None) -> Pick:
        self._record.worker = worker
        if self._trace is not None:
            self._trace.decided(None)
        endpoint = self._endpoint(worker)
        pick = self._pick((endpoint,), {}, self._ask.body if body is None else body, rename)
        return pick(
            watch=Watched(self._shared, self._record, began_s=self._began_s, endpoint=endpoint, trace=self._trace)
        )

    # ---- both --------------------------------------------------------------------------------------------------------

    def _endpoint(self, worker: str) -> str:
        endpoint = self._shared.places.endpoint(worker)
        if endpoint is None:
            raise errors.no_worker(f"{worker} has no address")
        return endpoint

    def _pick(
        self,
        endpoints: tuple[str, ...],
        headers: dict[str, str],
        body: bytes,
        rename: tuple[str, str] | None,
        scores: dict[str, float] | None = None,
    ) -> Callable[..., Pick]:
        """The pick but for its watch, which exists only when nothing can go wrong any more."""
        asked, is_test = self._ask.headers, self._picker._settings.conformance
        if "x-request-id" not in asked:
            headers["x-request-id"] = self._record.request_id
        context = {} if self._trace is None or self._ask.context else self._trace.context()
        headers.update(context)  # A proxy that traces says to the endpoint what it is part of; else we do.
        removed = [name for name in not_for_workers(asked) if name not in headers]
        removed += [name.lower() for name in asked if name not in self._headers]  # Who it is stays here.
        if rename is not None and _ACCEPTS in asked:
            removed.append(_ACCEPTS)  # In what is compressed no name can be put back.
        if TRACEPARENT in context and TRACESTATE not in context and TRACESTATE in asked:
            removed.append(TRACESTATE)  # Of another trace.
        return partial(
            Pick,
            endpoints=endpoints,
            set_headers=headers,
            remove_headers=tuple(dict.fromkeys(removed)),
            body=None if body == self._ask.body else body,
            rename=rename,
            hide_headers=() if self._parts.response_headers else (OUTCOME_HEADER,),
            add_headers={PICKED_FOR_TEST: ",".join(endpoints)} if is_test else {},
            served_header=SERVED_FOR_TEST if is_test else None,
            scores=scores or {},
        )

    def _note_overhead(self) -> None:
        record = self._record
        overhead_s = time.monotonic() - self._began_s - (record.queued_ms or 0.0) / 1000
        self._parts.metrics.overhead.observe(overhead_s)
        record.overhead_ms = round(overhead_s * 1000, 3)


def route_of(path: str) -> Route:
    """How a path is read: the route it is, else the longest it ends with (a gateway may mount the API below a prefix),
    else by load.
    """
    route = ROUTES.get(path)
    if route is not None:
        return route
    ends = [known for known in ROUTES if path.endswith(known)]
    return ROUTES[max(ends, key=len)] if ends else _UNKNOWN


def _is_text(value: str) -> bool:
    """Other bytes of a header come as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_control(facts: RequestFacts, tenant: str | None, priority: int | None) -> RequestFacts:
    """Objectives say the larger the sooner, engines and our queue the lower."""
    if tenant is None and priority is None:
        return facts
    return msgspec.structs.replace(facts, tenant=tenant, priority=facts.priority if priority is None else -priority)
