"""One stream of a proxy: its session, fed with what comes, and its decision, made meanwhile. Transports carry it."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterable

import msgspec

from gateway.extproc.complaints import Complaints
from gateway.extproc.refusals import internal, undecided
from gateway.extproc.session import ProtocolError, Session
from gateway.extproc.types import Ask, Pick, Picker, Refusal
from gateway.pb import ext_proc_pb2 as pb
from gateway.proxy.errors import log_unexpected
from gateway.tracing.types import TRACEPARENT, TRACESTATE

_log = logging.getLogger(__name__)
_complaints = Complaints(_log, "a proxy's stream is broken off")

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"
_OF_CONTEXT = frozenset({TRACEPARENT, TRACESTATE})


class Counts(msgspec.Struct):
    """Of streams. open: now. blind: decided without seeing their bodies. late: not decided in time. broken: by messages
    that do not fit. failed: by an error of ours.
    """

    open: int = 0
    begun: int = 0
    blind: int = 0
    late: int = 0
    broken: int = 0
    failed: int = 0


class BrokenOff(Exception):
    """The stream is to be aborted as INTERNAL, with this text. To end it well would mean "go on without me"."""


class Shared:
    """What all streams of one server use. `tasks`: decisions, some of which outlive their streams."""

    def __init__(
        self,
        picker: Picker,
        *,
        deadline_s: float,
        max_body_bytes: int,
        sees_responses: bool,
        hears_context: bool = False,
    ) -> None:
        self.picker = picker
        self.deadline_s = deadline_s
        self.max_body_bytes = max_body_bytes
        self.sees_responses = sees_responses
        self.hears_context = hears_context
        self.counts = Counts()
        self.tasks: set[asyncio.Task[None]] = set()
        self.idle = asyncio.Event()
        self.idle.set()


class Stream(ABC):
    """Begins when it is made. A transport calls `received` and `ended`, writes `outgoing` after each, and calls `over`
    last, whatever happened.
    """

    def __init__(self, shared: Shared) -> None:
        self.outgoing: deque[pb.ProcessingResponse] = deque()
        self._shared = shared
        self._session = Session(max_body_bytes=shared.max_body_bytes, sees_responses=shared.sees_responses)
        self._picking: asyncio.Task[None] | None = None
        shared.counts.open += 1
        shared.counts.begun += 1
        shared.idle.clear()

    @abstractmethod
    async def flush(self) -> None:
        """Write `outgoing`, in order."""

    @abstractmethod
    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What the proxy has sent with its call."""

    def received(self, message: pb.ProcessingRequest) -> None:
        """Raises BrokenOff."""
        session = self._session
        try:
            self.outgoing += session.feed(message)
        except ProtocolError as exc:
            self._shared.counts.broken += 1
            _complaints.tell(str(exc))
            raise BrokenOff(f"protocol error: {exc}") from None
        except Exception as exc:
            raise self.failed(exc) from None
        if session.decided:
            self._call_off()  # Overtaken by the proxy's own answer, if there is no verdict yet.
        elif session.ask is not None and self._picking is None:
            self._decide(session.ask)

    def failed(self, exc: Exception) -> BrokenOff:
        """What to raise instead of it."""
        self._shared.counts.failed += 1
        log_unexpected(_log, "a proxy's stream is broken off", exc)
        return BrokenOff("internal error")

    def ended(self) -> None:
        """The proxy says no more. Raises BrokenOff if it would need to."""
        if not self._session.decided:
            raise BrokenOff("the stream ended before its request was whole")

    def over(self) -> None:
        shared = self._shared
        shared.counts.open -= 1
        if not shared.counts.open:
            shared.idle.set()
        self._call_off()
        self._session.close()

    def _decide(self, ask: Ask) -> None:
        self._shared.counts.blind += ask.blind
        if self._shared.hears_context:
            context = {name: value for name, value in self.metadata() if name in _OF_CONTEXT and type(value) is str}
            ask = msgspec.structs.replace(ask, context=context)
        self._picking = self._run(self._pick(ask), "pick")

    def _run(self, what: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(what, name=name)
        self._shared.tasks.add(task)
        task.add_done_callback(self._shared.tasks.discard)
        return task

    def _call_off(self) -> None:
        if self._picking is not None:
            self._picking.cancel()
            self._picking = None

    async def _pick(self, ask: Ask) -> None:
        limit = asyncio.timeout(self._shared.deadline_s)
        try:
            async with limit:
                verdict = await self._shared.picker.pick(ask)
            self.outgoing += self._session.decide(verdict)
            if isinstance(verdict, Pick) and verdict.recall is not None:
                verdict.recall.bind(self._take_back)
        except Exception as exc:
            self.outgoing += self._session.decide(self._instead(exc, limit.expired()))
        self._picking = None  # What is decided is also sent.
        await self._write()

    def _take_back(self, refusal: Refusal) -> bool:
        answers = self._session.take_back(refusal)
        if not answers:
            return False
        self.outgoing += answers
        self._run(self._write(), "take back")
        return True

    async def _write(self) -> None:
        try:
            await self.flush()
        except Exception as exc:  # The proxy has gone; the transport learns of it by itself.
            _log.debug("an answer was not sent: %s", type(exc).__name__)

    def _instead(self, exc: Exception, expired: bool) -> Refusal:
        if expired and isinstance(exc, TimeoutError):
            self._shared.counts.late += 1
            return undecided(self._shared.deadline_s)
        self._shared.counts.failed += 1
        log_unexpected(_log, "a request is refused, since no endpoint could be picked for it", exc)
        return internal()
