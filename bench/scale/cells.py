"""Numbers of replicas as the arms of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bench.scale.exchange import Settings
from bench.scale.replicas import Replicas
from bench.sim import grid
from bench.sim.grid import Cell
from bench.sim.peers import PeerWorld
from bench.sim.router import Router, Setup
from bench.sim.workloads.shared import LADDER, Ladder
from bench.sim.world import Run

FLOOR = "round-robin"
_QUICK: Sequence[tuple[float, float]] = ((15, 2), (40, 3))


class Arm(NamedTuple):
    """`n` replicas that share what they have in flight, or do not."""

    n: int
    shares: bool

    @property
    def name(self) -> str:
        if self.n == 1:
            return "1 replica"
        return f"{self.n} replicas, {'sync' if self.shares else 'apart'}"


def arms(counts: Sequence[int]) -> dict[str, Arm]:
    """By name; one replica has nobody to share with."""
    found = [Arm(n, shares) for n in counts for shares in ((True, False) if n > 1 else (False,))]
    return {arm.name: arm for arm in found}


@dataclass(frozen=True, slots=True)
class Replicated(Cell):
    """A cell whose arms are numbers of replicas; other arms are those of bench.sim. `exchange` and `balance` must show
    in its name, as runs are kept by that.
    """

    exchange: Settings = field(default_factory=Settings)
    balance: str = "random"

    def run(self, name: str, seed: int) -> Run:
        arm = next((arm for each, arm in arms(counts_of(self.all_arms)).items() if each == name), None)
        if arm is None:
            return Cell.run(self, name, seed)
        exchange = self.exchange if arm.shares else None

        def build(setup: Setup) -> Router:
            return Replicas(setup, arm.n, name=name, exchange=exchange, balance=self.balance, seed=seed)

        spec = replace(self.spec, scrape_s=self.spec.scrape_s / arm.n)
        return PeerWorld(spec, build, self.load(seed), seed=seed).run()


def counts_of(names: Sequence[str]) -> list[int]:
    return sorted({int(name.split()[0]) for name in names if name[0].isdigit()})


def ladder(counts: Sequence[int], seeds: int, exchange: Settings, balance: str, *, quick: bool = False) -> Replicated:
    """llm-d's ladder before so many replicas."""
    plain = grid.ladder(0.01)
    stages = _QUICK if quick else LADDER
    told = f"{exchange.interval_s * 1000:g} ms, ttl {exchange.ttl_s:g} s, {exchange.delay_s * 1000:g} ms late"
    if exchange.loss:
        told += f", {exchange.loss:.0%} lost"
    names = (FLOOR, *arms(counts))
    return Replicated(
        f"{plain.name}{', quick' if quick else ''}; {balance}; {told}",
        plain.spec,
        lambda seed: Ladder(seed, stages=stages),
        names,
        names,
        seeds,
        seeds,
        exchange=exchange,
        balance=balance,
    )
