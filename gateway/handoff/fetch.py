"""The decode leg: the request with transfer params, sent in time or not at all, and its answer looked at."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.debug.handoffs import HandoffMetrics
from gateway.engine.health import End
from gateway.handoff.answer import PrefillAnswer
from gateway.handoff.cached import CachedTokens
from gateway.handoff.handoff import Offer
from gateway.handoff.opening import Opening, State
from gateway.handoff.watch import LegWatch, Verdict
from gateway.proxy.attempt import AttemptFailed, BehindSidecar, LeaseOver, LoadFailed, Rejected
from gateway.proxy.headers import OUTCOME_HEADER
from gateway.proxy.peer import Upstream, UpstreamError
from gateway.proxy.relay import Answer
from gateway.proxy.timed import TimedBody

_log = logging.getLogger(__name__)
_DEAF_S = 300.0
"""So long a server that did not ask for a body is not waited for again."""
_LOAD_FAILED = 500
"""What vLLM answers when the KV it was told to fetch did not come."""
_ABOUT_OUR_PART = frozenset({413, 417, 431})


class _Error(msgspec.Struct):
    type: str | None = None


class _Told(msgspec.Struct):
    error: _Error | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Ends(msgspec.Struct):
    choices: list[_Choice] = []


_WITH_CHOICES = frozenset({"chat", "completions", "generate"})
_ends = msgspec.json.Decoder(_Ends)
_errors = msgspec.json.Decoder(_Told)
_LONGEST_WHOLE_BYTES = 64 << 20


class Attempt(Protocol):
    """Sends and waits for the first piece of the answer. Raises AttemptFailed."""

    async def __call__(self, body: TimedBody, *, fresh: bool, ask: bool) -> Answer: ...


class Fetch:
    """One decode leg at `upstream`. `heard_since(s)`: whether its engine has answered anything since; `replaceable`:
    another worker could decode.
    """

    def __init__(
        self,
        upstream: Upstream,
        kind: str,
        attempt: Attempt,
        metrics: HandoffMetrics,
        *,
        heard_since: Callable[[float], bool],
        replaceable: bool,
    ) -> None:
        self._upstream = upstream
        self._kind = kind
        self._attempt = attempt
        self._metrics = metrics
        self._heard_since = heard_since
        self._replaceable = replaceable

    async def run(self, offer: Offer, missing_tokens: int, *, fresh: bool) -> Answer:
        """The worker's answer. Raises LoadFailed, LeaseOver or AttemptFailed."""
        began_s = time.monotonic()
        answer = await self._send(offer, offer.take(), fresh=fresh)
        if answer.status == _LOAD_FAILED:
            raise LoadFailed(f"status 500, {_kind_of(answer.first)}")
        if answer.status < 400 and (failure := await _bad_opening(answer)) is not None:
            raise LoadFailed(failure)
        if answer.status in _ABOUT_OUR_PART:
            raise Rejected(answer.status)
        if answer.status >= 400:
            self._metrics.handoff(offer.legs.prefill_worker, offer.legs.decode_worker, "refused")
            offer.written = False  # Who refuses it may not have looked at the params; to release twice is harmless.
            return answer
        first_byte_s = time.monotonic() - began_s
        await self._restate(answer, offer.answer)
        if answer.whole and self._kind in _WITH_CHOICES and _ended_in_error(answer.first):
            raise LoadFailed("the answer ended in an error")  # Some versions say 200 to that.
        if answer.upstream.header(OUTCOME_HEADER) is not None:
            raise BehindSidecar(answer)
        self._metrics.fetched(offer.legs.prefill_worker, offer.legs.decode_worker, missing_tokens, first_byte_s)
        return answer

    async def _send(self, offer: Offer, data: bytes, *, fresh: bool) -> Answer:
        """Once more if nothing of the body had left: over a new connection, or to a server that cannot ask for it."""
        upstream = self._upstream
        try:
            return await self._carry(offer, TimedBody(data, offer.deadline_s), fresh=fresh)
        except _Untouched as untouched:
            if untouched.deaf:
                upstream.deaf_until_s = time.monotonic() + _DEAF_S
                _log.warning(
                    "%s does not ask for bodies (Expect: 100-continue); for a while none are held back",
                    offer.legs.decode_worker,
                )
            try:
                return await self._carry(offer, TimedBody(data, offer.deadline_s), fresh=True)
            except _Untouched as again:
                raise AttemptFailed(End.TIMEOUT if again.deaf else End.RESET) from again

    async def _carry(self, offer: Offer, body: TimedBody, *, fresh: bool) -> Answer:
        ask = time.monotonic() >= self._upstream.deaf_until_s
        watch: LegWatch | None = None
        try:
            async with asyncio.timeout(None) as limit:
                watch = LegWatch(
                    limit,
                    body,
                    asks=ask,
                    replaceable=self._replaceable,
                    deadline_s=offer.deadline_s,
                    lease_ends_s=offer.lease_ends_s,
                    heard_since=self._heard_since,
                )
                return await self._attempt(body, fresh=fresh, ask=ask)
        except TimeoutError as exc:
            if watch is not None and watch.verdict is Verdict.DEAF:
                raise _Untouched(deaf=True) from exc
            if watch is not None and watch.verdict is Verdict.LATE:
                raise LeaseOver from exc
            raise AttemptFailed(End.TIMEOUT) from exc
        except AttemptFailed as exc:
            if body.late:
                raise LeaseOver from exc
            if exc.end is End.RESET and not body.begun and not fresh:
                raise _Untouched from exc
            raise
        finally:
            offer.written = body.written_s is not None
            if watch is not None:
                watch.stop()

    async def _restate(self, answer: Answer, prefill: PrefillAnswer) -> None:
        """Have the answer say what `cached_tokens` means on every path (see docs/disaggregation.md)."""
        if not _is_plain(answer):
            return
        rewriting = CachedTokens(self._kind, prefill.cached_tokens, add_absent=prefill.reports_cached)
        if answer.is_stream:
            answer.rewriting = rewriting
            return
        pieces = [answer.first]
        size = len(answer.first)
        while size <= _LONGEST_WHOLE_BYTES:
            try:
                piece = await answer.upstream.readany()
            except TimeoutError as exc:
                raise AttemptFailed(End.TIMEOUT) from exc
            except (UpstreamError, OSError) as exc:
                raise AttemptFailed(End.RESET) from exc
            if not piece:
                answer.become(rewriting.whole(b"".join(pieces)))
                return
            pieces.append(piece)
            size += len(piece)
        answer.first = b"".join(pieces)


class _Untouched(Exception):
    """The leg has failed with nothing of its body sent. `deaf`: the server does not know how to ask for one."""

    def __init__(self, *, deaf: bool = False) -> None:
        super().__init__()
        self.deaf = deaf


def _is_plain(answer: Answer) -> bool:
    return answer.upstream.header("Content-Encoding") in (None, "identity")


async def _bad_opening(answer: Answer) -> str | None:
    """What a stream says that begins with the news that there will be none: its status was sent too early for that."""
    if not answer.is_stream or not _is_plain(answer):
        return None
    opening = Opening()
    state = opening.feed(answer.first)
    while state is State.PENDING:
        try:
            piece = await answer.upstream.readany()
        except TimeoutError as exc:
            raise AttemptFailed(End.TIMEOUT) from exc
        except (UpstreamError, OSError):
            return "the stream broke off before any content"
        if not piece:
            state = opening.end()
            break
        answer.first += piece
        state = opening.feed(piece)
    return f"an error event, {_kind_of(opening.error or b'')}" if state is State.FAILED else None


def _ended_in_error(body: bytes) -> bool:
    if b'"error"' not in body:
        return False
    try:
        return any(choice.finish_reason == "error" for choice in _ends.decode(body).choices)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return False


def _kind_of(body: bytes) -> str:
    """What kind of error an engine tells of. Not its text, which may quote the prompt."""
    try:
        error = _errors.decode(body).error
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        error = None
    return (error.type if error is not None else None) or "it gave no reason"
