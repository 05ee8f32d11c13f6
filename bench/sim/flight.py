"""A request under way, and what a whole run came to."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from bench.sim.engine import SimEngine
from bench.sim.feed import Feed
from bench.sim.load import Ask
from bench.sim.record import Record
from bench.sim.router import Placement, SimRequest
from bench.sim.transfers import Transfers


class Flight:
    """A request on its way."""

    __slots__ = (
        "ask", "decoding_from", "last_s", "lease_s", "placement", "prefilling", "record", "reported", "request",
        "scheduled_s", "sent_s", "source", "tokens",
    )  # fmt: skip

    def __init__(self, ask: Ask, request: SimRequest, record: Record) -> None:
        self.ask = ask
        self.request = request
        self.record = record
        self.tokens = array("I", request.tokens)
        self.placement = Placement("")
        self.prefilling = False
        self.source: SimEngine | None = None
        """The prefill engine, while it holds KV for this request."""
        self.lease_s = 0.0
        self.sent_s = self.scheduled_s = self.last_s = 0.0
        self.decoding_from: int | None = None
        """The step of its decode engine after which it got one token with each."""
        self.reported = 0


@dataclass(slots=True, eq=False)
class Run:
    """What came of it."""

    arm: str
    records: list[Record]
    duration_s: float
    """From the first arrival to the last end."""
    engines: dict[str, SimEngine]
    feeds: dict[str, Feed]
    transfers: Transfers
    actions: int
    decisions: int
