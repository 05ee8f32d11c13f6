"""A request that the proxy was told to send on, which the queue may take back until its response begins."""

from __future__ import annotations

from gateway.epp.refusals import refusal
from gateway.extproc.types import Recall
from gateway.proxy.access import Record
from gateway.proxy.flight import Flight
from gateway.queue.evictable import Evictable
from gateway.queue.shed import Shed


class Sent(Evictable):
    """`recall` goes with the pick."""

    def __init__(self, flight: Flight, record: Record) -> None:
        super().__init__(flight.facts.priority, record, lambda: flight)
        self.recall = Recall()

    def take_back(self, shed: Shed) -> bool:
        return self.recall.refuse(refusal(shed, self.record))
