"""One prompt computed by a prefill worker, and what the decode worker needs to fetch its KV.

Prefill first, decode after (NIXL pull). Each attempt ends in an `Offer` for the decode leg, in the next prefill worker,
or in none: then the decode worker computes the prompt itself. An offer is for one decode request, written before its
deadline: engines read whatever is in the named blocks by then, and answer 200 with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from gateway.handoff.answer import BadAnswer, BadParams, PrefillAnswer, read_answer
from gateway.handoff.bodies import Body
from gateway.handoff.connector import Legs
from gateway.handoff.prefill_leg import LegFailed, PrefillLeg, RefusedByPrefill, Sending
from gateway.handoff.shared import Shared
from gateway.proxy import errors
from gateway.proxy.errors import ApiError
from gateway.proxy.flight import Flight
from gateway.proxy.headers import LEG_HEADER, RANK_HEADER
from gateway.tracing.types import RequestTrace
from scorer.types import Outcome, OutcomeKind, PdReason, RequestFacts, TokenSource

_log = logging.getLogger(__name__)
_ECHOING = frozenset({"chat", "completions", "messages", "responses"})
"""APIs whose engine-side request ids contain ours (vLLM 0.32)."""
_ID_IN_BODY = frozenset({"responses"})
"""Of those, who take it from the body and not from X-Request-Id."""
_LOOK_S = 0.5
_LINGER_S = 0.5
"""When a client leaves during its prefill, so long is still waited for the answer: closing a connection stops an
engine, but not one that has finished and is just saying so, and what that holds only its answer can give back.
"""
_PREFILL_DONE = Outcome(kind=OutcomeKind.PREFILL_DONE)


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
        self.fetched = False
        """The decode worker has answered."""

    def take(self) -> bytes:
        """The decode leg's body."""
        body, self._decode_body = self._decode_body, None
        if body is None:
            raise RuntimeError("an offer was taken twice")
        return body


class Handoff:
    """The prefill side of one request."""

    def __init__(self, shared: Shared, flight: Flight, sending: Sending, trace: RequestTrace | None = None) -> None:
        self._trace = trace
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
            except LegFailed as failure:
                self._next(failure, tries)
        return None

    def _next(self, failure: LegFailed, tries: int) -> None:
        """The next prefill worker, or none."""
        shared, flight = self._shared, self._flight
        settings, planned = shared.settings, flight.plan
        names = self._names()
        if self._trace is not None:
            self._trace.event("prefill_failed", failure.why.value)
        shared.metrics.handoff(*names, failure.why.value)
        shared.metrics.stage(planned.choice, stage="prefill", outcome=failure.why.value)
        _log.log(
            logging.DEBUG if failure.why is PdReason.NO_PARAMS and failure.everywhere else logging.WARNING,
            "prefill on %s for %s: %s (%s)",
            *names,
            failure.why.value,
            failure,
        )
        now_s = time.monotonic()
        request_id = flight.facts.request_id
        if failure.pair:
            broke = Outcome(kind=OutcomeKind.PAIR_FAILED, reason=f"{failure.why.value}: {failure}")
            shared.planner.observe(request_id, broke, now_s)
        stop = failure.everywhere or not settings.try_next or tries >= settings.max_tries
        plan = shared.planner.next_prefill(
            request_id, failure.why, shared.available.names(), now_s, shared.rng, local=stop
        )
        if plan is None:
            raise ConnectionResetError("the request has ended")
        if not plan.remote and not settings.then_local and not (failure.everywhere or planned.chosen.peer):
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
            raise LegFailed(PdReason.PREFILL_FAILED, "the worker has just been removed")
        try:
            async with asyncio.timeout(shared.settings.prefill_timeout_s):
                hosts, port = await shared.hosts.side_channel(worker.url, shared.nixl_of(name))
        except TimeoutError as exc:
            raise LegFailed(PdReason.PREFILL_TIMEOUT, "its host name was not resolved in time") from exc
        decode = shared.planner.fleet.workers.get(flight.worker)
        block_size = worker.block_size() or (None if decode is None else decode.block_size())
        if block_size is None:
            raise LegFailed(PdReason.UNKNOWN_BLOCK_SIZE, "neither engine says its block size", everywhere=True)
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
        headers[LEG_HEADER] = "prefill"
        for name_here in (RANK_HEADER, "Accept-Encoding"):  # We are to read the answer.
            headers.popall(name_here, None)
        if len(worker.loads) > 1:
            headers[RANK_HEADER] = str(rank)
        body = self._body.prefill(
            shared.connector.prefill_params(legs),
            request_id=legs.request_id if self._kind in _ID_IN_BODY else None,
        )
        began_s = time.monotonic()
        leg = PrefillLeg(
            shared,
            name,
            upstream,
            self._sending,
            quiet_s=flight.plan.chosen.price.ttft_s,
            prompt_tokens=flight.facts.prompt_tokens,
            leg=None if self._trace is None else self._trace.leg("prefill", name, rank, upstream.base_url, headers),
        )
        asked = asyncio.get_running_loop().create_task(leg.answer(headers, body))
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOK_S))[0]:
                if not leg.is_probe and name not in shared.available.names():
                    asked.cancel()
                    raise LegFailed(PdReason.PREFILL_TIMEOUT, "it has stopped answering anything")
        except asyncio.CancelledError:
            asked.add_done_callback(partial(self._nobody_waits, legs, leg))
            asyncio.get_running_loop().call_later(_LINGER_S, asked.cancel)
            raise
        try:
            answered_s, data = asked.result()
        except RefusedByPrefill as refusal:
            if flight.plan.chosen.peer:  # Nobody depends on it: whether the request is right, the decode worker says.
                why = f"it answered with status {refusal.status}"
                raise LegFailed(PdReason.PREFILL_FAILED, why, everywhere=True) from refusal
            shared.metrics.handoff(*self._names(), "refused")
            shared.metrics.stage(flight.plan.choice, stage="prefill", outcome="refused")
            raise
        self._note_prefill(name, began_s)
        return self._offer(legs, leg, data, answered_s)

    def _nobody_waits(self, legs: Legs, leg: PrefillLeg, asked: asyncio.Task[tuple[float, bytes]]) -> None:
        """The client left, and the prefill worker has answered all the same."""
        if asked.cancelled() or asked.exception() is not None:
            return
        answered_s, data = asked.result()
        with suppress(LegFailed):
            self.give_back(self._offer(legs, leg, data, answered_s))

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

    def _note_prefill(self, name: str, began_s: float) -> None:
        shared, request_id = self._shared, self._flight.facts.request_id
        now_s = time.monotonic()
        self.prefill_s = now_s - began_s
        wait_s = shared.planner.prefill_wait_s(request_id, now_s)
        shared.planner.observe(request_id, _PREFILL_DONE, now_s)
        if wait_s is not None:
            wait_s = min(wait_s, self.prefill_s)
            shared.metrics.prefilled(name, wait_s, self.prefill_s - wait_s)

    def _offer(self, legs: Legs, leg: PrefillLeg, data: bytes, answered_s: float) -> Offer:
        shared = self._shared
        lease_ends_s = answered_s + shared.lease_s(legs.prefill_worker)
        try:
            answer = read_answer(data, self._kind)
        except BadAnswer as exc:
            leg.strand(answered_s)
            raise LegFailed(PdReason.PREFILL_FAILED, str(exc)) from exc
        self._note_cached(legs.prefill_worker, answer)
        if not answer.params:
            raise self._nothing_held(legs, answer)
        held = answer.prompt_tokens or self._flight.facts.prompt_tokens
        try:
            params = shared.connector.decode_params(legs, answer)
            same_ids = _same_ids(self._flight.facts, answer)
            self._check_origin(legs, answer, same_ids)
            ids = _ids_for_decode(self._flight.facts, answer, same_ids)
        except BadParams as exc:
            # No engine may see them, so nobody can give the blocks back before the lease is over.
            shared.releases.stranded.add(legs.prefill_worker, held, lease_ends_s)
            other = isinstance(exc, OtherPrompt)
            raise LegFailed(PdReason.BAD_PARAMS, str(exc), pair=not other, everywhere=other) from exc
        shared.metrics.stage(self._flight.plan.choice, stage="prefill", outcome="ok")
        return Offer(
            legs,
            answer,
            self._body.decode(params, ids),
            deadline_s=lease_ends_s - shared.settings.margin_s,
            lease_ends_s=lease_ends_s,
        )

    def _check_origin(self, legs: Legs, answer: PrefillAnswer, same_ids: bool) -> None:
        """That it is the answer to this very request, from a process that lives. Raises BadParams."""
        params = answer.params or {}
        engine_id, request_id = (str(params.get(name)) for name in ("remote_engine_id", "remote_request_id"))
        address = str(params.get("remote_host")), str(params.get("remote_port"))
        ids = self._shared.engine_ids
        why = ids.accept(legs.prefill_worker, engine_id, request_id, time.monotonic(), address=address)
        if why is not None:
            raise BadParams(why)
        if self._kind in _ECHOING and legs.request_id not in request_id and not same_ids:
            raise OtherPrompt("nothing in it says which prompt it has computed: its request id is not ours")

    def _note_cached(self, name: str, answer: PrefillAnswer) -> None:
        if answer.prompt_tokens is not None and answer.cached_tokens is not None:
            predicted = self._flight.plan.chosen.prefill_cached_tokens
            self._shared.hits.reported(name, answer.prompt_tokens, predicted, answer.cached_tokens)

    def _nothing_held(self, legs: Legs, answer: PrefillAnswer) -> LegFailed:
        """A prompt shorter than a block, or an answer that stopped by itself, leaves nothing to fetch anywhere; a
        server without connector never does.
        """
        short = answer.prompt_tokens is not None and answer.prompt_tokens < legs.block_size
        by_itself = short or answer.stopped
        return LegFailed(PdReason.NO_PARAMS, "it holds nothing for others", everywhere=by_itself, pair=not by_itself)

    def _names(self) -> tuple[str, str]:
        return self.prefiller or "", self._flight.worker


class OtherPrompt(BadParams):
    """The prefill worker has computed another prompt than ours: not the pair's fault, but this request's end there."""


def _known_ids(facts: RequestFacts) -> bytes | None:
    return facts.tokens if facts.exact_prefix_tokens is None else None


def _same_ids(facts: RequestFacts, answer: PrefillAnswer) -> bool:
    """Whether both sides have said the prompt's ids, and the same."""
    known, said = _known_ids(facts), answer.prompt_token_ids
    return known is not None and said is not None and array("I", said).tobytes() == known


def _ids_for_decode(facts: RequestFacts, answer: PrefillAnswer, same_ids: bool) -> Sequence[int] | bytes | None:
    """The prompt's ids, as both engines are to have them. Raises OtherPrompt when what we know and what the prefill
    worker says differ: its blocks would be taken for those of this prompt.
    """
    known, said = _known_ids(facts), answer.prompt_token_ids
    if known is None:
        return said
    if answer.prompt_tokens is not None and answer.prompt_tokens != len(known) // 4:
        raise OtherPrompt(f"it has computed {answer.prompt_tokens} tokens of a prompt of {len(known) // 4}")
    if said is not None and not same_ids:
        raise OtherPrompt("it has computed other tokens than the prompt's")
    return None if facts.token_source is TokenSource.GIVEN else known
