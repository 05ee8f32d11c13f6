"""The workers that requests may go to now."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scorer.fleet import Worker
from scorer.types import Role


class Available:
    """Of `workers`, those for which `is_available(name)` holds when it is asked; of these, if there are any, those for
    which `is_better(name)` does.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        is_available: Callable[[str], bool],
        is_better: Callable[[str], bool] | None = None,
        works: Callable[[str], bool] | None = None,
    ) -> None:
        """`works(name)`: whether one that is not available could all the same serve what nobody else can."""
        self._workers = workers
        self.is_up = is_available
        self._is_better = is_better
        self._works = works

    def names(self) -> list[str]:
        up = list(filter(self.is_up, self._workers))
        if self._is_better is None:
            return up
        better = list(filter(self._is_better, up))
        return better if any(self._workers[name].role.decodes for name in better) else up

    def names_for(self, subset: frozenset[str] | None) -> list[str]:
        """For a request that may go to `subset` only: where that is one worker (it holds a stored response), as long as
        it works, whatever failed before.
        """
        names = self.names()
        if subset is not None and len(subset) == 1 and self._works is not None:
            (name,) = subset
            if name not in names and name in self._workers and self._works(name):
                names.append(name)
        return names

    def decoders(self) -> list[str]:
        """Those that answer clients: of role decode, or both."""
        return [name for name in self.names() if self._workers[name].role.decodes]

    def prefills(self) -> list[str]:
        return [name for name in self.names() if self._workers[name].role is Role.PREFILL]
