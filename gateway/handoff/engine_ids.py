"""Which engines and requests may be named in handoffs. Every life of an engine has a new id, and every prefill too."""

from __future__ import annotations

import math
from collections import OrderedDict

_MOST_RETIRED = 4096
_MOST_USED = 65_536


class EngineIds:
    """Ids as the prefill workers' answers bring them. One that belonged to an earlier life of a worker, or belongs to
    another worker, is not accepted: its blocks are gone or somebody else's. After `lease_s` nothing of that life can be
    on its way any more; an id that comes again then was given to the engine by its configuration.
    """

    def __init__(self, lease_s: float = math.inf) -> None:
        self._lease_s = lease_s
        self._owners: dict[str, str] = {}
        self._ids: dict[str, dict[str, float]] = {}
        """Of each worker, and when each first came."""
        self._retired: OrderedDict[str, float] = OrderedDict()
        """And when."""
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()

    def accept(self, worker: str, engine_id: str, request_id: str, now_s: float) -> str | None:
        """None, or why `worker` cannot have this id, or this prefill cannot be fetched again."""
        if now_s < self._retired.get(engine_id, -math.inf) + self._lease_s:
            return "the engine id is that of an earlier process"
        owner = self._owners.setdefault(engine_id, worker)
        if owner != worker:
            return f"the engine id is that of {owner}"
        self._ids.setdefault(worker, {}).setdefault(engine_id, now_s)
        if (engine_id, request_id) in self._used:
            return "these params have been used"  # A cache between us and the worker, say.
        self._used[engine_id, request_id] = None
        if len(self._used) > _MOST_USED:
            self._used.popitem(last=False)
        return None

    def retire(self, worker: str, now_s: float, alive_s: float = math.inf) -> None:
        """The worker has restarted or is gone. Its old process was last seen alive at `alive_s`: what first came later
        may be the new one's, whose requests can be here before anybody has noticed the restart.
        """
        ids = self._ids.pop(worker, {})
        for engine_id, first_s in ids.items():
            if first_s > alive_s:
                self._ids.setdefault(worker, {})[engine_id] = first_s
                continue
            del self._owners[engine_id]
            self._retired[engine_id] = now_s
        while len(self._retired) > _MOST_RETIRED:
            self._retired.popitem(last=False)
