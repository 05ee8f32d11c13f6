"""How well replicas decide, each seeing a part of the requests, beside one that sees all: in simulation, on llm-d's
ladder.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bench.scale.exchange import Settings
from bench.scale.replicas import Replicas
from bench.sim import grid
from bench.sim.grid import Cell
from bench.sim.peers import PeerWorld
from bench.sim.router import Router, Setup
from bench.sim.sweep import Sweep
from bench.sim.tables import table
from bench.sim.workloads.shared import LADDER, Ladder
from bench.sim.world import Run

FLOOR = "round-robin"
GOAL = 1.3
COUNTS = (1, 2, 4, 8)
_QUICK: Sequence[tuple[float, float]] = ((15, 2), (40, 3))
_SHOWN = (
    ("TTFT p50 ms", ("ttft_p50_ms",), "{:.0f}"),
    ("p90 ms", ("ttft_p90_ms",), "{:.0f}"),
    ("p99 ms", ("ttft_p99_ms",), "{:.0f}"),
    ("p90 ms in the last stage", ("last", "ttft_p90_ms"), "{:.0f}"),
    ("E2E mean s", ("e2e_mean_ms",), "{:.2f}"),
    ("tokens/s", ("output_tokens_per_s",), "{:.0f}"),
    ("hits", ("hit_share",), "{:.3f}"),
)


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
        arm = next((arm for each, arm in arms(_counts(self.all_arms)).items() if each == name), None)
        if arm is None:
            return Cell.run(self, name, seed)
        exchange = self.exchange if arm.shares else None

        def build(setup: Setup) -> Router:
            return Replicas(setup, arm.n, name=name, exchange=exchange, balance=self.balance, seed=seed)

        spec = replace(self.spec, scrape_s=self.spec.scrape_s / arm.n)
        return PeerWorld(spec, build, self.load(seed), seed=seed).run()


def _counts(names: Sequence[str]) -> list[int]:
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


def median(sweep: Sweep, cell: Cell, arm: str, path: Sequence[str]) -> float:
    """Over the seeds. `last` is the group of the ladder's last stage."""
    return statistics.median(_at(run, path) for run in sweep.runs(cell, arm))


def _at(run: dict[str, Any], path: Sequence[str]) -> float:
    if path[0] == "last":
        rates = [name for name in run["groups"] if name.endswith("/s")]
        return float(run["groups"][max(rates, key=lambda name: float(name[:-2]))][path[1]])
    return float(run[path[0]])


def lines(sweep: Sweep, cell: Replicated) -> list[str]:
    """A table of medians."""
    rows = [
        [name, *(_text(form, path, median(sweep, cell, name, path)) for _, path, form in _SHOWN)] for name in cell.arms
    ]
    return list(table(["routers", *(head for head, _, _ in _SHOWN)], rows))


def _text(form: str, path: Sequence[str], value: float) -> str:
    return form.format(value / 1000 if path[-1] == "e2e_mean_ms" else value)


def figures(sweep: Sweep, cell: Replicated) -> dict[str, float]:
    """`arm_figure`: one number each."""
    return {
        f"{_key(name)}_{'_'.join(path)}": round(median(sweep, cell, name, path), 3)
        for name in cell.arms
        for _, path, _ in _SHOWN
    }


def _key(name: str) -> str:
    return name.replace(",", "").replace(" ", "_").replace("-", "_")


def targets(sweep: Sweep, cell: Replicated) -> list[dict[str, Any]]:
    """Of those that share; `measured` is None where one replica was not run."""
    p90 = ("ttft_p90_ms",)
    alone = Arm(1, False).name
    base = median(sweep, cell, alone, p90) if alone in cell.arms else None
    found = []
    for name, arm in arms(_counts(cell.arms)).items():
        if arm.shares:
            measured = None if not base else median(sweep, cell, name, p90) / base
            found.append(
                {
                    "name": f"{arm.n} replicas with sync: TTFT p90 over one replica's",
                    "goal": f"<= {GOAL:g}",
                    "measured": None if measured is None else round(measured, 3),
                    "met": None if measured is None else measured <= GOAL,
                }
            )
    return found
