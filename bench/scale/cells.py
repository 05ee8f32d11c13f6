"""Numbers of replicas as the arms of a cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bench.scale.exchange import Settings
from bench.scale.replicas import Replicas
from bench.sim import grid
from bench.sim.grid import Cell
from bench.sim.peers import PeerWorld
from bench.sim.router import Router, Setup
from bench.sim.workloads.generated import CHAT, Sessions
from bench.sim.workloads.shared import LADDER, Ladder
from bench.sim.world import Run

FLOOR = "round-robin"
_CHAT_RATE, _CHAT_S = 4.0, 100.0
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


def arms(counts: Iterable[int]) -> dict[str, Arm]:
    """By name; one replica has nobody to share with."""
    found = [Arm(n, shares) for n in sorted(counts) for shares in ((True, False) if n > 1 else (False,))]
    return {arm.name: arm for arm in found}


@dataclass(frozen=True, slots=True)
class Replicated(Cell):
    """A cell whose arms are numbers of replicas; other arms are those of bench.sim. `exchange` and `balance` must show
    in its name, as runs are kept by that.
    """

    exchange: Settings = field(default_factory=Settings)
    balance: str = "random"
    has_objectives: bool = False

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
    stages = _QUICK if quick else LADDER
    plain = replace(grid.ladder(0.01), load=lambda seed: Ladder(seed, stages=stages))
    return _replicated(plain, (FLOOR, *arms(counts)), seeds, exchange, balance, quick)


def chats(counts: Sequence[int], seeds: int, exchange: Settings, balance: str, *, quick: bool = False) -> Replicated:
    """Chats with objectives on one prefill and three decode servers, where prompts wait for each other: before one and
    before the most.
    """
    plain = grid.sessions("chat", CHAT, _CHAT_RATE)
    duration_s = 4.0 if quick else _CHAT_S
    plain = replace(
        plain,
        name=f"{plain.name} on 1P+3D",
        load=lambda seed: Sessions(seed, CHAT, rate=_CHAT_RATE, duration_s=duration_s),
    )
    found = _replicated(plain, tuple(arms({min(counts), max(counts)})), seeds, exchange, balance, quick)
    return replace(found, has_objectives=True)


def _replicated(
    plain: Cell, names: Sequence[str], seeds: int, exchange: Settings, balance: str, quick: bool
) -> Replicated:
    told = f"{exchange.interval_s * 1000:g} ms, ttl {exchange.ttl_s:g} s, {exchange.delay_s * 1000:g} ms late"
    if exchange.loss:
        told += f", {exchange.loss:.0%} lost"
    name = f"{plain.name}{', quick' if quick else ''}; {balance}; {told}"
    return Replicated(name, plain.spec, plain.load, names, names, seeds, seeds, exchange=exchange, balance=balance)
