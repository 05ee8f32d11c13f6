"""One stream of a proxy: its session, read from and written to gRPC, and its decision, made meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import grpc
import msgspec

from gateway.extproc.refusals import internal, undecided
from gateway.extproc.session import ProtocolError, Session
from gateway.extproc.types import Ask, Picker, Refusal
from gateway.pb import ext_proc_pb2 as pb
from gateway.proxy.errors import log_unexpected

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse]


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


class Stream:
    """`run` it once. Tasks that outlive it, decisions called off, are kept in `tasks` until they are done."""

    def __init__(
        self,
        session: Session,
        context: Context,
        picker: Picker,
        deadline_s: float,
        counts: Counts,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._session = session
        self._context = context
        self._picker = picker
        self._deadline_s = deadline_s
        self._counts = counts
        self._tasks = tasks
        self._picking: asyncio.Task[None] | None = None
        self._outgoing: deque[pb.ProcessingResponse] = deque()
        self._writing: asyncio.Future[None] | None = None
        """Done when whoever writes has written all there was."""

    async def run(self) -> None:
        """Returns when the proxy has ended the stream and needed nothing more of us; aborts it otherwise."""
        self._counts.open += 1
        self._counts.begun += 1
        try:
            await self._talk()
        finally:
            self._counts.open -= 1
            self._call_off()
            self._session.close()

    async def _talk(self) -> None:
        session = self._session
        try:
            while (message := await self._read()) is not None:
                self._outgoing += session.feed(message)
                if session.decided:
                    self._call_off()  # Overtaken by the proxy's own answer, if there is no verdict yet.
                elif session.ask is not None and self._picking is None:
                    self._decide(session.ask)
                await self._flush()
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except ProtocolError as exc:
            self._counts.broken += 1
            _say_once(str(exc))
            await self._written()
            await self._context.abort(grpc.StatusCode.INTERNAL, f"protocol error: {exc}")
        except Exception as exc:
            self._counts.failed += 1
            log_unexpected(_log, "a proxy's stream is broken off", exc)
            await self._written()
            await self._context.abort(grpc.StatusCode.INTERNAL, "internal error")
        await self._written()
        if not session.decided:
            await self._context.abort(grpc.StatusCode.INTERNAL, "the stream ended before its request was whole")

    async def _read(self) -> pb.ProcessingRequest | None:
        """None: the proxy says no more."""
        message: object = await self._context.read()
        return message if isinstance(message, pb.ProcessingRequest) else None

    def _decide(self, ask: Ask) -> None:
        self._counts.blind += ask.blind
        self._picking = task = asyncio.get_running_loop().create_task(self._pick(ask), name="pick")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _call_off(self) -> None:
        if self._picking is not None:
            self._picking.cancel()
            self._picking = None

    async def _pick(self, ask: Ask) -> None:
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit:
                verdict = await self._picker.pick(ask)
            self._outgoing += self._session.decide(verdict)
        except Exception as exc:
            self._outgoing += self._session.decide(self._instead(exc, limit.expired()))
        self._picking = None  # What is decided is also sent.
        try:
            await self._flush()
        except Exception as exc:  # The proxy has gone; `_talk` learns of it by itself.
            _log.debug("an answer was not sent: %s", type(exc).__name__)

    def _instead(self, exc: Exception, expired: bool) -> Refusal:
        if expired and isinstance(exc, TimeoutError):
            self._counts.late += 1
            return undecided(self._deadline_s)
        self._counts.failed += 1
        log_unexpected(_log, "a request is refused, since no endpoint could be picked for it", exc)
        return internal()

    async def _flush(self) -> None:
        """Whoever comes first writes for all, so that answers go out in order."""
        if self._writing is not None:
            return
        writing = self._writing = asyncio.get_running_loop().create_future()
        try:
            while self._outgoing:
                await self._context.write(self._outgoing.popleft())
        finally:
            self._writing = None
            writing.set_result(None)

    async def _written(self) -> None:
        """Until nobody writes: gRPC takes no end of a stream in the middle of a message, and drops it with an error."""
        if self._writing is not None:
            await asyncio.wait([self._writing])


_MOST_SAID = 64
_said: set[str] = set()


def _say_once(problem: str) -> None:
    """A proxy that is set up wrongly has the same one with every request."""
    if problem not in _said and len(_said) < _MOST_SAID:
        _said.add(problem)
        _log.warning("a proxy's stream is broken off, and others for the same reason later: %s", problem)
