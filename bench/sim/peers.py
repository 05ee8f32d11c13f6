"""KV taken from any engine that holds it, the rest computed where the request runs. Only the clairvoyant arm asks for
that: it is the reference for what moving prefixes between servers could bring.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.engine.request import Request
from bench.sim.flight import Flight
from bench.sim.router import Placement
from bench.sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlacement(Placement):
    """`source_tokens` of the prompt come from `source`, if it still has them; they are never pinned there."""

    source: str
    source_tokens: int


class PeerWorld(World):
    """A world that also knows how to pull a prefix."""

    def _request(self, flight: Flight, remote_tokens: int) -> Request:
        placement = flight.placement
        if isinstance(placement, PeerPlacement):
            flight.source = self.engines[placement.source]
            flight.lease_s = float("inf")
            remote_tokens = placement.source_tokens
        return super()._request(flight, remote_tokens)
