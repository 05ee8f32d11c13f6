"""Cores, and the CPU time and memory of process trees (Linux)."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_PROCESS_CLOCK = 2
"""CPUCLOCK_SCHED; see clock_getcpuclockid(3)."""


class Cores(msgspec.Struct, frozen=True):
    """One core for each side; the same number where there are not enough."""

    load: int
    backend: int
    router: int

    @property
    def shared(self) -> bool:
        """Whether the router has no core to itself."""
        return self.router in (self.load, self.backend)

    def told(self) -> str:
        if self.shared:
            return f"only core {self.router}: everything shares it, and rates mean little"
        if self.load == self.backend:
            return f"router on core {self.router}; load and backends on core {self.load}"
        return f"router on core {self.router}, load on core {self.load}, backends on core {self.backend}"


def choose_cores(allowed: Iterable[int]) -> Cores:
    """Of those this process may run on: with one everything shares it, with two the router has one to itself."""
    first, *more = sorted(allowed)
    if not more:
        return Cores(first, first, first)
    return Cores(first, more[1] if len(more) > 1 else first, more[0])


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """This thread, and every process it starts meanwhile, on `core`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads a process has and had, to the nanosecond. Raises ProcessLookupError."""
    try:
        return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    except OSError as exc:
        raise ProcessLookupError(f"no process {pid}") from exc


def parent_of(stat: str) -> int:
    """The parent's pid in the text of /proc/PID/stat; the command in it may hold spaces and parentheses."""
    return int(stat.rpartition(")")[2].split()[1])


def tree(root: int) -> list[int]:
    """`root` and everything below it."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = parent_of((folder / "stat").read_text(encoding="utf-8", errors="replace"))
                children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a process and all below it that live."""
    total = 0.0
    for pid in tree(root):
        with contextlib.suppress(ProcessLookupError):
            total += cpu_s(pid)
    return total


def tree_rss_bytes(root: int) -> int:
    """Resident memory of a process and all below it; pages they share count for each."""
    pages = 0
    for pid in tree(root):
        with contextlib.suppress(OSError):
            pages += int((_PROC / str(pid) / "statm").read_text().split()[1])
    return pages * resource.getpagesize()
