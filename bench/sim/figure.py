"""A figure that was measured and simulated, and what is said of the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.sim.jobs import Jobs

MEDIAN, TAIL = 0.15, 0.30


class Figure(NamedTuple):
    """One cell of a table, in ms or as a share. `interval`: what nine in ten single runs gave. `reason`: why it is off,
    with the numbers that show it; only ever given when they were computed and do show it.
    """

    row: str
    column: str
    measured: float
    simulated: float
    tolerance: float
    interval: tuple[float, float] | None = None
    reason: str = ""

    @property
    def deviation(self) -> float:
        return self.simulated / self.measured - 1

    @property
    def close(self) -> bool:
        return abs(self.deviation) <= self.tolerance

    @property
    def explained(self) -> bool:
        return not self.close and bool(self.reason)

    @property
    def unexplained(self) -> bool:
        return not self.close and not self.reason

    def near(self, simulated: float, noise: float = 0.0) -> bool:
        """Whether that would be within tolerance of the measurement, were it wrong by `noise`."""
        least, most = self.measured - noise, self.measured + noise
        return least * (1 - self.tolerance) <= simulated <= most * (1 + self.tolerance)

    def because(self, shown: bool, reason: str) -> Figure:
        """With that reason, if it is shown to be one and the figure is off and has none."""
        return self._replace(reason=reason) if shown and self.unexplained else self


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    figures: Callable[[Jobs], Iterator[Figure]]


@dataclass(frozen=True, slots=True)
class Judged:
    """A table as it came out."""

    name: str
    figures: Sequence[Figure]

    @property
    def close(self) -> int:
        return sum(figure.close for figure in self.figures)

    @property
    def explained(self) -> int:
        return sum(figure.explained for figure in self.figures)

    @property
    def unexplained(self) -> int:
        return sum(figure.unexplained for figure in self.figures)
