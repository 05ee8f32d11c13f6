"""What is done with each request, whether we relay it (`handler`) or tell a proxy where to (`gateway.epp`).

Before it goes: whose it is, what must not pass, its facts, its plan with the booking. After: what its answer told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from multidict import CIMultiDict

from gateway.auth.checks import PRIORITY_HEADER, member_of, named_in_form
from gateway.auth.door import Visit
from gateway.handoff.bodies import clean
from gateway.proxy import errors
from gateway.proxy.access import Record
from gateway.proxy.errors import ApiError
from gateway.proxy.flight import Flight
from gateway.proxy.headers import is_unread
from gateway.proxy.parts import Parts
from gateway.proxy.routes import Route
from gateway.proxy.usage import Usage
from gateway.request import BadRequest
from gateway.sidecar.hints import NO_HINTS, Hints
from gateway.stored import Place, ResponseHead, is_stored
from indexer import Prompt
from scorer.fleet import STALE_S, Worker
from scorer.planner import ModelNotFound, NoWorker
from scorer.types import Outcome, OutcomeKind, PdReason, Plan, RequestFacts

_log = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""In logs and metrics, the status of an answer nobody waited for (nginx's)."""
_USUAL_BLOCK_TOKENS = 16


# ---- before it goes --------------------------------------------------------------------------------------------------


def at_door(parts: Parts, headers: CIMultiDict[str], *, anonymous: bool = False) -> Visit | None:
    """By its key, which is taken out of `headers`; None: nobody needs one, or this request does not. Raises
    ApiError.
    """
    door = parts.door
    if door is None:
        return None
    if anonymous:
        door.hide(headers)
        return None
    try:
        return door.identify(headers)
    except BadRequest as exc:
        raise bad_request(parts, exc) from None
    except ApiError:
        parts.metrics.rejected("bad_key")
        raise


def entered(parts: Parts, visit: Visit, *, works: bool = True) -> None:
    """`works`: an engine has work to do for it. Raises ApiError (429)."""
    try:
        visit.enter(works=works)
    except ApiError:
        parts.metrics.rejected("key_limit")
        raise


def within_key(
    parts: Parts, visit: Visit, facts: RequestFacts, headers: CIMultiDict[str], body: bytes, route: Route
) -> RequestFacts:
    """The facts of what its key may ask for, with its tokens reserved. Raises ApiError."""
    try:
        if visit.key.models is not None:
            visit.check_model(named_in_form(headers, body) or facts.lora or facts.model)
        if visit.key.priority is not None:
            priority = visit.check_priority(headers, member_of(body, "priority"))
            if priority is not None:
                headers[PRIORITY_HEADER] = str(priority)
                facts = msgspec.structs.replace(facts, priority=priority)
    except BadRequest as exc:
        raise bad_request(parts, exc) from None
    except ApiError:
        parts.metrics.rejected("key_forbids")
        raise
    if route.queued:
        output_tokens = facts.max_output_tokens
        if output_tokens is None:
            writes = route.tokens is not None or route.generates
            output_tokens = round(parts.planner.cost.output_tokens(None)) if writes else 0
        try:
            visit.reserve(facts, output_tokens * facts.n_sequences)
        except ApiError:
            parts.metrics.rejected("key_limit")
            raise
    return facts


def identified(
    parts: Parts,
    headers: CIMultiDict[str],
    body: bytes,
    *,
    salted: bool,
    anonymous: bool,
    takes_salt: bool = True,
    authenticated: str | None = None,
) -> tuple[str | None, bytes]:
    """Whose it is, and the body with the cache salt of its tenant (see `Tenancy.take`). Raises ApiError."""
    try:
        return parts.tenancy.take(
            headers, body, salted=salted, takes_salt=takes_salt, anonymous=anonymous, authenticated=authenticated
        )
    except (BadRequest, ApiError) as exc:
        raise _unidentified(parts, exc) from None


def identified_session(parts: Parts, headers: CIMultiDict[str], authenticated: str | None = None) -> str | None:
    """Whose connection it is (see `Tenancy.take_session`). Raises ApiError."""
    try:
        return parts.tenancy.take_session(headers, authenticated)
    except (BadRequest, ApiError) as exc:
        raise _unidentified(parts, exc) from None


def _unidentified(parts: Parts, exc: BadRequest | ApiError) -> ApiError:
    if isinstance(exc, BadRequest):
        return bad_request(parts, exc)
    parts.metrics.rejected("no_identity")
    return exc


def cleaned(parts: Parts, body: bytes, members: Mapping[str, Any] | None = None) -> bytes:
    """Without what engines would act on blindly. `members`: `members_of(body)`, where they are known. Raises
    ApiError.
    """
    try:
        return clean(body, members)
    except BadRequest as exc:
        raise bad_request(parts, exc) from None


async def read_facts(
    parts: Parts,
    booking_id: str,
    kind: str | None,
    body: bytes,
    headers: CIMultiDict[str],
    members: dict[str, Any] | None = None,
    tenant: str | None = None,
) -> RequestFacts:
    """`members` as above. Raises ApiError."""
    try:
        if kind == "responses" and parts.tenancy.by_tenant and is_unread(headers):
            raise BadRequest("The request body must be plain JSON: it may follow a response.", code="not_readable")
        return await parts.reader.read(booking_id, kind, body, headers, members, tenant)
    except BadRequest as exc:
        raise bad_request(parts, exc) from None


def hinted(facts: RequestFacts, hints: Hints) -> RequestFacts:
    """The facts, with what somebody in front of us has settled."""
    keep_local = facts.keep_local
    if keep_local is None and hints.choice == "local":
        keep_local = PdReason.PLAN
    if hints is NO_HINTS and keep_local is facts.keep_local:
        return facts
    return msgspec.structs.replace(
        facts,
        keep_local=keep_local,
        prefill_hint=hints.prefill,
        kv_source=hints.kv_source,
        rank=facts.rank if hints.rank is None and hints.decode is None else hints.rank,
        subset=facts.subset if hints.decode is None else hints.decode,
    )


def bad_request(parts: Parts, exc: BadRequest) -> ApiError:
    parts.metrics.rejected("bad_request")
    return ApiError(400, str(exc), code=exc.code, param=exc.param)


def booked(parts: Parts, facts: RequestFacts) -> Plan:
    """Where it goes. Raises ApiError."""
    try:
        available = parts.available.names_for(facts.subset)
        plan = parts.plan(facts, available)
    except ModelNotFound as exc:
        parts.metrics.rejected("model_not_found")
        raise errors.model_not_found(exc.model) from None
    except NoWorker as exc:
        parts.metrics.rejected("no_worker")
        raise errors.no_worker(str(exc)) from None
    note = parts.index_note(facts)
    return plan if note is None else msgspec.structs.replace(plan, reason=f"{plan.reason}; {note}")


def planned(parts: Parts, record: Record, facts: RequestFacts) -> Flight:
    """Where it goes, booked and noted. Raises ApiError."""
    flight = taken_off(parts, facts, booked(parts, facts))
    note_plan(parts, record, flight)
    return flight


def taken_off(parts: Parts, facts: RequestFacts, plan: Plan) -> Flight:
    """The flight of a plan just booked. If there can be none, the booking is given back."""
    try:
        return Flight(parts.planner, parts.health, facts, plan, parts.decisions.pace.itl)
    except BaseException:
        parts.planner.observe(facts.request_id, Outcome(kind=OutcomeKind.CANCELLED), time.monotonic())
        raise


def note_plan(parts: Parts, record: Record, flight: Flight) -> None:
    plan, facts = flight.plan, flight.facts
    parts.metrics.decided(plan.choice, facts.token_source)
    parts.handoffs.metrics.decided(plan.choice, plan.pd_reason)
    if not plan.remote:
        note_local(parts, flight)
    record.worker, record.rank = flight.holder
    record.model = facts.model
    record.policy = plan.policy
    record.tokens = facts.token_source.value
    record.prompt_tokens = facts.prompt_tokens
    record.predicted_cached_tokens = plan.chosen.cached_tokens
    record.choice = plan.choice
    record.pd_reason = plan.pd_reason.value
    parts.decisions.note(record, plan)


def note_local(parts: Parts, flight: Flight) -> None:
    """What is cached on the decode worker counts only where it computes the prompt."""
    prompt_tokens, chosen = flight.facts.prompt_tokens, flight.plan.chosen
    parts.hits.predicted(flight.worker, prompt_tokens, chosen.cached_tokens)
    if _is_prompt(flight.facts):
        parts.sent(*chosen.decode, prompt_tokens - chosen.cached_tokens)


def _is_prompt(facts: RequestFacts) -> bool:
    """Not what is placed by load alone: most of that makes no KV blocks."""
    return facts.keep_local is not PdReason.NOT_GENERATION


def least_busy(parts: Parts, among: frozenset[str] | None = None) -> str:
    """Where a request without a prompt goes (CORS preflight, /version), with nothing booked. Raises ApiError."""
    workers = parts.planner.fleet.workers
    names = [
        name
        for name in parts.available.decoders()
        if not workers[name].draining and (among is None or name in among) and parts.upstreams.get(name) is not None
    ]
    if not names:
        parts.metrics.rejected("no_worker")
        raise errors.no_worker("none is up")
    inside = {name: _inside(workers[name]) for name in names}
    least = min(inside.values())
    return parts.rng.choice([name for name in names if inside[name] == least])


def _inside(worker: Worker) -> float:
    """Requests there: what is booked, or what its engine says if that is more."""
    booked = sum(load.in_line + load.streams for load in worker.loads.values())
    stats = worker.stats
    if stats is None or time.monotonic() - stats.scraped_at_s > STALE_S:
        return booked
    return max(booked, (stats.running or 0.0) + (stats.waiting or 0.0))


# ---- after -----------------------------------------------------------------------------------------------------------


def keeps_response(kind: str | None, body: bytes) -> bool:
    """Whether the worker is to keep the response to it."""
    return kind == "responses" and is_stored(body)


def may_run_on(members: Mapping[str, Any] | None) -> bool:
    """Whether a response may be computed on after its request was answered. `members` None: of a body that was not
    looked into.
    """
    return members is None or members.get("background") not in (None, False)


def response_head(parts: Parts, flight: Flight) -> ResponseHead:
    """Reads the id of a response that the worker keeps."""
    return ResponseHead(response_noted(parts, flight))


def response_noted(parts: Parts, flight: Flight) -> Callable[[str], None]:
    """To be told the id of a response that the worker keeps."""
    place, stored = Place(*flight.holder), parts.stored
    owner = flight.facts.tenant if parts.tenancy.by_tenant else None
    return lambda response_id: stored.remember(response_id, place, time.monotonic(), owner)


def note_usage(parts: Parts, record: Record, flight: Flight, usage: Usage) -> None:
    """What a whole good answer says of itself."""
    note_tokens(parts, record, usage)
    facts, cached = flight.facts, record.cached_tokens
    if cached is None or usage.prompt_tokens is None:
        return
    worker, predicted = flight.worker, flight.plan.chosen.cached_tokens
    if flight.plan.remote:
        parts.hits.handed_over(worker, usage.prompt_tokens, cached)
        return
    flight.cached(cached)
    parts.hits.reported(worker, usage.prompt_tokens, predicted, cached)
    if cached and facts.tokens is not None:
        known = parts.planner.fleet.workers.get(worker)
        block_size = (known and known.block_size()) or _USUAL_BLOCK_TOKENS
        prompt = Prompt(facts.tokens, cache_salt=facts.cache_salt, extra_keys=facts.extra_keys)
        parts.prefixes.note(prompt, facts.lora, block_size, cached, time.monotonic())


def note_tokens(parts: Parts, record: Record, usage: Usage) -> None:
    """Counted and logged, whoever has answered."""
    record.output_tokens = usage.output_tokens
    cached, prompt_tokens = usage.cached_tokens, usage.prompt_tokens
    if cached is not None and (prompt_tokens is None or cached > prompt_tokens):
        cached = None
    record.cached_tokens = cached
    parts.metrics.tokens(prompt_tokens, cached, usage.output_tokens)


def note_recorded(parts: Parts, flight: Flight, began_s: float, usage: Usage | None) -> None:
    """For the recordings under way: a prompt that was answered, or began to be."""
    usage = usage or Usage()
    input_tokens = flight.facts.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    output_tokens = flight.streamed_tokens if usage.output_tokens is None else usage.output_tokens
    try:
        parts.recorder.note(flight.facts, began_s, input_tokens, output_tokens)
    except Exception as exc:
        errors.log_unexpected(_log, "unexpected while recording; going on", exc)


def note_over(parts: Parts, record: Record, began_s: float, flight: Flight | None, wait_s: float | None) -> None:
    """It is over, and what was booked given back. `wait_s` is what `Queue.enter` returned."""
    if parts.queue is not None:
        parts.queue.ended(flight, wait_s, record)
    if flight is not None and record.status >= 400 and not flight.plan.remote and _is_prompt(flight.facts):
        parts.unsent(*flight.holder)
    duration_s = time.monotonic() - began_s
    record.duration_ms = round(duration_s * 1000, 3)
    parts.metrics.request(record.worker, record.status, duration_s)
    parts.access.write(record)
