"""What a workload is to the world: requests that come by themselves or because others have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bench.sim.record import Record


@dataclass(slots=True, eq=False)
class Ask:
    """A request before it exists. `tokens` makes its prompt (a uint32 buffer) when it is sent; `output_tokens` is how
    long the answer will be, which only engines know; `max_output_tokens` is what the client says.
    """

    tokens: Callable[[], bytes]
    output_tokens: int
    max_output_tokens: int | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    session: str | None = None
    turn: int = 0
    group: str = ""
    seed: int = 0
    """Decides the ids of its answer, on whatever engine."""


class Stage(Protocol):
    """The world as a workload sees it."""

    @property
    def now_s(self) -> float: ...

    def submit(self, at_s: float, ask: Ask) -> None:
        """Send it at `at_s`."""


class Workload(Protocol):
    """A source of requests, used for one run. All chance comes from the seed it was made with."""

    def start(self, stage: Stage) -> None:
        """Submit what comes by itself, or the first of it."""

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        """A request is over (`record.ok` or not)."""
