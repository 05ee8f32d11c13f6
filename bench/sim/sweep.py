"""Running cells and keeping what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from bench.sim.grid import FAULT_S, REFERENCES, SETTLED_REQUESTS, Cell
from bench.sim.record import Record
from bench.sim.report import Figures, latencies, summarise
from bench.sim.world import Run

T = TypeVar("T")
Key = tuple[str, str, int]
"""Cell, arm, seed."""

SEEN_AFTER_S = 5.0
"""So long after a fault no placement may rest on what was before."""


def figures(run: Run) -> Figures:
    """The report, and what only some targets ask for: `settled`, after each worker had its first requests, and the
    share of placements that promised blocks which were not there, a while after the fault.
    """
    out = summarise(run)
    settled = run.records[SETTLED_REQUESTS * len(run.engines) :]
    out["settled"] = latencies(settled) | {"slo_share": share(record.met() for record in settled)}
    after = [record for record in run.records if record.arrival_s > FAULT_S + SEEN_AFTER_S]
    out["wrong_after_fault"] = share(_is_wrong(record) for record in after)
    return out


def _is_wrong(record: Record) -> bool:
    return record.ok and (record.predicted_tokens or 0) > record.cached_tokens


def share(those: Iterable[bool]) -> float:
    told = list(those)
    return sum(told) / len(told) if told else 1.0


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


class Ran(NamedTuple):
    """One run's figures and the processor time it took."""

    figures: Figures
    cpu_s: float


def make(cell: Cell, arm: str, seed: int) -> Ran:
    began_s = time.process_time()
    found = figures(cell.run(arm, seed))
    return Ran(found, time.process_time() - began_s)


class Sweep:
    """Each (cell, arm, seed) is run once, when it is first asked for. `full`: all arms, all seeds."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.cells: dict[str, Cell] = {}
        self._kept: dict[Key, Ran] = {}

    @property
    def cpu_s(self) -> float:
        """What all runs took, wherever and whenever they were made."""
        return sum(ran.cpu_s for ran in self._kept.values())

    @property
    def made(self) -> int:
        """All runs that are there."""
        return len(self._kept)

    def arms(self, cell: Cell) -> Sequence[str]:
        return cell.all_arms if self.full else cell.arms

    def seeds(self, cell: Cell) -> range:
        return range(cell.all_seeds if self.full else cell.seeds)

    def rivals(self, cell: Cell) -> list[str]:
        return [arm for arm in self.arms(cell) if arm not in REFERENCES and arm != "warmroute"]

    def run_arms(self, cell: Cell) -> list[str]:
        """Those that were run there, in the cell's order."""
        there = {arm: None for name, arm, _ in self._kept if name == cell.name}
        return [*(arm for arm in cell.all_arms if arm in there), *(arm for arm in there if arm not in cell.all_arms)]

    def need(self, cell: Cell, arms: Iterable[str]) -> None:
        """All of these are about to be asked for."""

    def each(self, calls: Iterable[Callable[[], T]]) -> list[T]:
        """The results of calls that do not need each other's."""
        return [call() for call in calls]

    def runs(self, cell: Cell, arm: str) -> list[Figures]:
        """One for each seed."""
        self.need(cell, [arm])
        return [self._run(cell, arm, seed).figures for seed in self.seeds(cell)]

    def figure(self, cell: Cell, arm: str, *path: str) -> float:
        """The mean over the seeds of one figure, named by its keys."""
        return mean(_at(run, path) for run in self.runs(cell, arm))

    def spread(self, cell: Cell, arm: str, *path: str) -> float:
        """Half the range over the seeds."""
        values = [_at(run, path) for run in self.runs(cell, arm)]
        return (max(values) - min(values)) / 2

    def keeps_slo(self, cell: Cell) -> bool:
        """Whether every arm meets 99 % of its objectives there, so that latency is what tells them apart."""
        arms = (*self.rivals(cell), "warmroute")
        self.need(cell, arms)
        return all(self.figure(cell, arm, "slo_share") >= 0.99 for arm in arms)

    def score(self, cell: Cell, arm: str) -> float:
        """The cell's metric, higher is better: SLO attainment, or (where all attain it) 1 / mean end-to-end seconds."""
        if self.keeps_slo(cell):
            return 1000 / self.figure(cell, arm, "e2e_mean_ms")
        return self.figure(cell, arm, "slo_share")

    def _run(self, cell: Cell, arm: str, seed: int) -> Ran:
        key = cell.name, arm, seed
        if key not in self._kept:
            self._take(key, cell, make(cell, arm, seed))
        return self._kept[key]

    def _take(self, key: Key, cell: Cell, ran: Ran) -> None:
        self.cells.setdefault(cell.name, cell)
        self._kept[key] = ran


def _at(run: Figures, path: Sequence[str]) -> float:
    found: Any = run
    for key in path:
        found = found[key]
    return float(found)
