"""A sweep whose runs are made by several processes at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from bench.sim.grid import Cell
from bench.sim.jobs import Jobs
from bench.sim.kept import Kept
from bench.sim.sweep import Key, Ran, Sweep, make

T = TypeVar("T")


class Missing(Exception):
    """A run was asked for that is still to be made."""


class Worked(NamedTuple, Generic[T]):
    """What an asker came to, the `cpu_s` of the runs it was the first to ask for, and when its answer was there."""

    answer: T
    runs: int
    cpu_s: float
    done_s: float


class _Asking(Generic[T]):
    """One asker on its way. `open` are the runs it waits for, `runs` those it was the first to ask for."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self.ask = ask
        self.open: dict[Key, Cell] = {}
        self.begun = self.runs = 0
        self.cpu_s = 0.0
        self.worked: Worked[T] | None = None

    def pay(self, ran: Ran) -> None:
        self.runs += 1
        self.cpu_s += ran.cpu_s


class Ahead(Sweep):
    """Askers are functions of this sweep. Whatever one asks for that is not there ends the call; it is called again,
    from its beginning, when that has been run. So it may choose what to ask for next by what it was told, knows nothing
    of others or of processes, and comes to what it would have come to by itself: a run depends on nothing but its cell,
    arm and seed. `told` hears of each run.
    """

    def __init__(
        self, jobs: Jobs, kept: Kept, *, full: bool = False, told: Callable[[str], None] = lambda line: None
    ) -> None:
        super().__init__(full=full)
        self.found = 0
        """Runs that need not be made, as they were kept."""
        self.asked: dict[str, Cell] = {}
        """The cells that the asker has asked for so far, in this call."""
        self._jobs = jobs
        self._cache = kept
        self._told = told
        self._open: dict[Key, Cell] = {}
        self._asking: _Asking[Any] | None = None
        self._owner: dict[Key, _Asking[Any]] = {}
        """Runs under way, and who asked for them."""

    def need(self, cell: Cell, arms: Iterable[str]) -> None:
        there = [self._look(cell, arm, seed) for arm in arms for seed in self.seeds(cell)]
        if not all(there):
            raise Missing

    def each(self, calls: Iterable[Callable[[], T]]) -> list[T]:
        """The results of calls that do not need each other's: what they miss is run at once."""
        found, missing = [], False
        for call in calls:
            try:
                found.append(call())
            except Missing:
                missing = True
        if missing:
            raise Missing
        return found

    def work(self, askers: Mapping[str, Callable[[], T]]) -> Iterator[tuple[str, Worked[T]]]:
        """The answers, in the order of the askers. A free process takes the run of whoever has begun the fewest, so
        that who asks for one run after the other is not the last to be ready.
        """
        began_s = time.monotonic()
        asking = {name: _Asking(ask) for name, ask in askers.items()}
        for name, it in asking.items():
            while (worked := it.worked) is None:
                self._step(list(asking.values()), began_s)
            yield name, worked

    def _step(self, asking: list[_Asking[T]], began_s: float) -> None:
        """Ask all that wait for nothing, fill the free processes, and wait until a run is over."""
        for it in asking:
            if it.worked is None and not it.open:
                self._ask(it, began_s)
        while self._jobs.free:
            able = [it for it in asking if it.open.keys() - self._owner.keys()]
            if not able:
                break
            it = min(able, key=lambda it: it.begun)
            key, cell = next((key, cell) for key, cell in it.open.items() if key not in self._owner)
            it.begun += 1
            self._owner[key] = it
            self._jobs.begin((key, cell), partial(make, cell, *key[1:]))
        for (key, cell), ran in self._jobs.wait() if not self._jobs.idle else ():
            self._cache.add(cell, key[1], key[2], ran)
            self._tell(key, ran)
            self._take(key, cell, ran)
            self._owner.pop(key).pay(ran)
            for it in asking:
                it.open.pop(key, None)

    def _ask(self, it: _Asking[T], began_s: float) -> None:
        self._open, self.asked, self._asking = {}, {}, it
        try:
            answer = it.ask()
        except Missing:
            it.open = self._open
        else:
            it.worked = Worked(answer, it.runs, it.cpu_s, time.monotonic() - began_s)
        self._asking = None

    def _run(self, cell: Cell, arm: str, seed: int) -> Ran:
        if not self._look(cell, arm, seed):
            raise Missing
        return self._kept[cell.name, arm, seed]

    def _look(self, cell: Cell, arm: str, seed: int) -> bool:
        key = cell.name, arm, seed
        self.asked.setdefault(cell.name, cell)
        if key in self._kept:
            return True
        ran = self._cache.find(cell, arm, seed)
        if ran is None:
            self._open[key] = cell
            return False
        self.found += 1
        if self._asking is not None:
            self._asking.pay(ran)
        self._take(key, cell, ran)
        return True

    def _tell(self, key: Key, ran: Ran) -> None:
        cell, arm, seed = key
        it = ran.figures
        self._told(
            f"{cell}: {arm}, seed {seed}: SLO {it['slo_share']:.3f}, TTFT {it['ttft_mean_ms']:.0f} ms"
            f" (p99 {it['ttft_p99_ms']:.0f}), TPOT {it['tpot_mean_ms']:.1f} ms, E2E {it['e2e_mean_ms']:.0f} ms,"
            f" hits {it['hit_share']:.3f}, remote {it['remote_share']:.2f}; {ran.cpu_s:.1f} s"
        )
