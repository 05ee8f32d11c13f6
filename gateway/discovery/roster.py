"""Who names which worker, and what the fleet is to be told of it when several do.

Of the sources that name a worker now, the first in the order of `Source` is believed; the next one takes over when it
lets go. What was added through the API ends where a list names the worker too: from then on it is the list's. An
operator's drain (`hold`) lies over all of them, until it is lifted or the worker is gone.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.discovery.base import Source
from scorer.types import ChangeKind, WorkerChange

_ORDER = tuple(Source)


class _Entry:
    """`claims` are what each source says now; `told` what the fleet was told last. Without a claim it is leaving."""

    __slots__ = ("claims", "draining", "held", "told")

    def __init__(self) -> None:
        self.claims: dict[Source, WorkerChange] = {}
        self.told: WorkerChange | None = None
        self.draining = False
        self.held = False

    @property
    def source(self) -> Source | None:
        return min(self.claims, key=_ORDER.index, default=None)


class Roster:
    """Every method that returns changes has them as the fleet is to take them in, in this order."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def take(self, source: Source, change: WorkerChange) -> list[WorkerChange]:
        """What follows from what `source` says."""
        name = change.worker
        going = change.kind in (ChangeKind.DRAINING, ChangeKind.REMOVED)
        entry = self._entries.get(name)
        if entry is None:
            if going:
                return []
            entry = self._entries[name] = _Entry()
        if not going:
            entry.claims[source] = msgspec.structs.replace(change, kind=ChangeKind.ADDED)
            if source is not Source.API:
                entry.claims.pop(Source.API, None)
        elif entry.claims.pop(source, None) is None and entry.claims:
            return []
        return list(self._settle(name, entry, change.kind))

    def hold(self, name: str) -> list[WorkerChange]:
        """No new requests to it, whoever names it, until `lift`."""
        return self._set_held(name, True)

    def lift(self, name: str) -> list[WorkerChange]:
        return self._set_held(name, False)

    def gone(self, name: str) -> None:
        """The fleet has dropped a worker that was leaving."""
        entry = self._entries.get(name)
        if entry is not None and not entry.claims:
            del self._entries[name]

    def source(self, name: str) -> Source | None:
        """Who is believed about it; None for one that nobody names (any more)."""
        entry = self._entries.get(name)
        return None if entry is None else entry.source

    def claims(self, name: str) -> dict[Source, WorkerChange]:
        """What each source that names it says."""
        entry = self._entries.get(name)
        return {} if entry is None else dict(entry.claims)

    def is_held(self, name: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.held

    def named_at(self, url: str) -> str | None:
        """The worker that somebody names at this URL."""
        for name, entry in self._entries.items():
            if any(claim.url == url for claim in entry.claims.values()):
                return name
        return None

    def _set_held(self, name: str, held: bool) -> list[WorkerChange]:
        entry = self._entries.get(name)
        if entry is None or entry.held == held:
            return []
        entry.held = held
        return list(self._settle(name, entry, ChangeKind.DRAINING))

    def _settle(self, name: str, entry: _Entry, leaving: ChangeKind) -> Iterator[WorkerChange]:
        """`leaving`: how the worker goes, if nobody names it any more."""
        source, before = entry.source, entry.told
        if source is None:
            if leaving is ChangeKind.REMOVED:
                del self._entries[name]
                yield WorkerChange(kind=ChangeKind.REMOVED, worker=name)
            elif before is not None:
                entry.draining, entry.held = True, False
                yield msgspec.structs.replace(before, kind=ChangeKind.DRAINING)
            return
        claim = entry.claims[source]
        moved = before is not None and before.url != claim.url
        if moved:  # Another server under the same name.
            yield WorkerChange(kind=ChangeKind.REMOVED, worker=name)
        if before is None or moved or (entry.draining and not entry.held):
            yield claim
        elif before != claim:
            yield msgspec.structs.replace(claim, kind=ChangeKind.CHANGED)
        elif entry.draining == entry.held:
            return
        entry.told, entry.draining = claim, entry.held
        if entry.held:
            yield msgspec.structs.replace(claim, kind=ChangeKind.DRAINING)
