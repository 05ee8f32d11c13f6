"""Which engines and requests may be named in handoffs. Every life of an engine has a new id, and every prefill too."""

from __future__ import annotations

import math
from collections import OrderedDict

_MOST_RETIRED = 4096
_MOST_USED = 65_536
_MOST_OWNED = 16_384


class EngineIds:
    """Ids as the prefill workers' answers bring them. One that belonged to an earlier life of a worker, or belongs to
    another worker, is not accepted: its blocks are gone or somebody else's. After `lease_s` nothing of that life can be
    on its way any more; an id that comes again then was given to the engine by its configuration.
    """

    def __init__(self, lease_s: float = math.inf) -> None:
        self._lease_s = lease_s
        self._owners: OrderedDict[str, tuple[str, tuple[str, str]]] = OrderedDict()
        """The worker that brought the id first, and where the engine's side channel is."""
        self._ids: dict[str, dict[str, float]] = {}
        """Of each worker, and when each first came."""
        self._retired: OrderedDict[str, float] = OrderedDict()
        """And when."""
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()

    def accept(
        self,
        worker: str,
        engine_id: str,
        request_id: str,
        now_s: float,
        *,
        address: tuple[str, str] = ("", ""),
    ) -> str | None:
        """None, or why `worker` cannot have this id, or this prefill cannot be fetched (again).

        `address` is the side channel's: one engine may be known by two names.
        """
        if now_s < self._retired.get(engine_id, -math.inf) + self._lease_s:
            return "the engine id is that of an earlier process"
        owner, owned_at = self._owners.setdefault(engine_id, (worker, address))
        if owner != worker and owned_at != address:
            return f"the engine id is that of {owner}"
        self._ids.setdefault(worker, {}).setdefault(engine_id, now_s)
        if len(self._owners) > _MOST_OWNED:
            self._disown(self._owners.popitem(last=False)[0])
        if (engine_id, request_id) in self._used:
            return "these params have been used"  # A cache between us and the worker, say.
        self._used[engine_id, request_id] = None
        if len(self._used) > _MOST_USED:
            self._used.popitem(last=False)
        return None

    def forget(self, worker: str) -> None:
        """The worker is known no more. Its engine may live on, and come back under this name or another."""
        for engine_id in self._ids.pop(worker, {}):
            if self._owners.get(engine_id, ("",))[0] == worker:
                del self._owners[engine_id]

    def _disown(self, engine_id: str) -> None:
        for ids in self._ids.values():
            ids.pop(engine_id, None)

    def retire(self, worker: str, now_s: float, alive_s: float = math.inf) -> None:
        """The worker has restarted. Its old process was last seen alive at `alive_s`: what first came later
        may be the new one's, whose requests can be here before anybody has noticed the restart.
        """
        ids = self._ids.pop(worker, {})
        for engine_id, first_s in ids.items():
            if first_s > alive_s:
                self._ids.setdefault(worker, {})[engine_id] = first_s
                continue
            self._owners.pop(engine_id, None)
            self._retired[engine_id] = now_s
        while len(self._retired) > _MOST_RETIRED:
            self._retired.popitem(last=False)
