"""Names of objectives -> priorities (InferenceObjective of llm-d and GAIE; the larger, the more important)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.errors import UserError

DEFAULT = 0
_MOST = (1 << 31) - 1


class Objectives:
    """Those of the configuration, and above them those a discovery has found, which `replace` sets as a whole."""

    def __init__(self, configured: Mapping[str, int] | None = None) -> None:
        self._configured = dict(configured or {})
        self._found: dict[str, int] = {}

    def configure(self, configured: Mapping[str, int]) -> None:
        """Those of the configuration from now on."""
        self._configured = dict(configured)

    def replace(self, found: Mapping[str, int]) -> None:
        self._found = dict(found)

    def priority(self, name: str) -> int | None:
        """None: there is none of that name. Below 0 a request may be dropped when there is no room."""
        return self._found.get(name, self._configured.get(name))

    def __len__(self) -> int:
        return len(self._configured.keys() | self._found.keys())


def read_objectives(entries: Iterable[str]) -> dict[str, int]:
    """`name=priority` each. Raises UserError."""
    found: dict[str, int] = {}
    for entry in entries:
        name, equals, text = (part.strip() for part in entry.rpartition("="))
        try:
            priority = int(text)
        except ValueError:
            priority = _MOST + 1
        if not equals or not name or abs(priority) > _MOST:
            raise UserError(f"epp.objectives: {entry!r} must be NAME=PRIORITY, a whole number of 32 bits")
        if name in found:
            raise UserError(f"epp.objectives: {name} is there twice")
        found[name] = priority
    return found
