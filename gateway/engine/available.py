"""The workers that requests may go to now."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scorer.fleet import Worker
from scorer.types import Role


class Available:
    """Of `workers`, those for which `is_available(name)` holds when it is asked."""

    def __init__(self, workers: Mapping[str, Worker], is_available: Callable[[str], bool]) -> None:
        self._workers = workers
        self.is_up = is_available

    def names(self) -> list[str]:
        return list(filter(self.is_up, self._workers))

    def decoders(self) -> list[str]:
        """Those that answer clients: of role decode, or both."""
        return [name for name in self.names() if self._workers[name].role.decodes]

    def prefills(self) -> list[str]:
        return [name for name in self.names() if self._workers[name].role is Role.PREFILL]
