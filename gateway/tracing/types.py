"""What the faces know of tracing. Where it is off there is no `Tracing`, and each hook is one test for None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from multidict import CIMultiDict

if TYPE_CHECKING:
    from gateway.proxy.access import Record
    from gateway.proxy.flight import Flight
    from gateway.proxy.usage import Usage

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
TRACE_ID_HEADER = "x-warmroute-trace-id"
"""On answers that are errors."""

Stage = Literal["read_body", "tokenise", "queue", "decide"]
LegKind = Literal["prefill", "decode", "forward"]
"""forward: what is placed without a plan."""


class Leg(Protocol):
    """One request to one worker. What is said after its end is ignored."""

    headers: CIMultiDict[str]
    """Those it is to be sent with: a copy, with its own context."""

    def answered(self, status: int) -> None: ...

    def first_token(self) -> None: ...

    def failed(self, reason: str) -> None:
        """It ends, for `reason`: a word of ours, never a text."""

    def end(self) -> None: ...


class RequestTrace(Protocol):
    """One request, from its headers to its end."""

    def stage(self, name: Stage) -> None:
        """The stage before is over, and this one begins."""

    def decided(self, flight: Flight | None) -> None:
        """The stage is over, and it is known where the request goes. None: nothing is booked."""

    def leg(self, kind: LegKind, worker: str, rank: int | None, url: str, headers: CIMultiDict[str]) -> Leg:
        """`url`: the worker's."""

    def event(self, name: str, reason: str) -> None: ...

    def first_token(self) -> None:
        """Seen by somebody who sends no legs."""

    def context(self) -> dict[str, str]:
        """The headers that make what gets them a child of the request."""

    def finish(self, flight: Flight | None, usage: Usage | None) -> None:
        """The record is complete."""


class Tracing(Protocol):
    @property
    def problem(self) -> str | None:
        """Why spans do not get to the collector."""

    def request(self, record: Record, headers: Mapping[str, str], kind: str | None) -> RequestTrace:
        """Begins the trace of a request, or goes on with that of its `traceparent`, and notes its id in the record.
        `kind`: of the prompt, as in `Route.tokens`.
        """

    async def close(self) -> None:
        """Send what is left, within a few seconds."""
