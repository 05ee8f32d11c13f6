"""Finished runs in a file, so that a sweep that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import bench.engine
import bench.sim
import indexer
import scorer
from bench.sim.grid import Cell, Traces
from bench.sim.sweep import Ran

_TELLING = (
    "ahead", "against", "catalog", "decisions", "figure", "jobs", "kept", "measured", "mixed_load", "page", "plot",
    "reasons", "tables", "targets", "validate",
)  # fmt: skip
"""Modules of bench/sim that only order runs or tell of them: with a change of theirs a run is still the same."""


class Kept:
    """Runs by cell, arm, seed and a digest of all they come from: the code, the cell's servers, the traces, the Python.

    One JSON line each, written when the run is over. A line that was cut off is a run that is not there; lines of other
    code are left alone. Without a `path` nothing is kept. `also`: modules that runs come from besides. Raises OSError.
    """

    def __init__(self, path: Path | None, traces: Traces, *, also: Sequence[ModuleType] = ()) -> None:
        self._path = path
        self._from = f"{_code(*also)} {_trace(traces.mooncake)} {_trace(traces.azure)} {sys.version_info[:2]}"
        self._lines: dict[str, Ran] = {}
        if path is None:
            return
        with path.open("a+b") as file:  # It must be writable now, not after the first hour.
            file.seek(0)
            text = file.read()
            if text and not text.endswith(b"\n"):
                file.write(b"\n")
        for line in text.splitlines():
            try:
                found = json.loads(line)
                self._lines[found["digest"]] = Ran(found["figures"], found["cpu_s"])
            except (ValueError, KeyError, TypeError):
                continue

    def find(self, cell: Cell, arm: str, seed: int) -> Ran | None:
        return self._lines.get(self._digest(cell, arm, seed)) if self._path else None

    def add(self, cell: Cell, arm: str, seed: int, ran: Ran) -> None:
        if self._path is None:
            return
        line = {"digest": self._digest(cell, arm, seed), "cell": cell.name, "arm": arm, "seed": seed, **ran._asdict()}
        with self._path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def _digest(self, cell: Cell, arm: str, seed: int) -> str:
        told = f"{self._from}\n{cell.name}\n{cell.spec!r}\n{arm}\n{seed}"
        return hashlib.sha256(told.encode()).hexdigest()[:32]


@cache
def _code(*also: ModuleType) -> str:
    """A digest of every file a run may come from."""
    found = hashlib.sha256()
    rooms = [Path(next(iter(package.__path__))) for package in (indexer, scorer, bench.engine, bench.sim)]
    for room in rooms:
        for file in sorted(room.rglob("*.py")):
            name = file.relative_to(room.parent)
            if name.parent == Path("sim") and name.stem in _TELLING:
                continue
            found.update(f"{name}\n".encode() + file.read_bytes())
    for module in also:
        found.update(f"{module.__name__}\n".encode() + Path(module.__file__ or "").read_bytes())
    return found.hexdigest()


def _trace(path: Path | None) -> str:
    return "generated" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
