"""The fleet without a split."""

from __future__ import annotations

from bench.sim.arms.choosing import Ruled, by_fresh_tokens
from bench.sim.router import Factory

ARMS: dict[str, Factory] = {
    # Run on a fleet whose servers all take whole requests (`bench.sim.grid`), each where least is to be computed.
    "aggregated": lambda setup: Ruled("aggregated", by_fresh_tokens),
}
