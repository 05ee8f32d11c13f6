"""What is known of workers that hand prompts over to each other, kept true as they come, restart and go.

Whether two can pair at all is told before anything is tried: engines compare a hash of these very things when they
shake hands, and refuse each other for any difference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gateway.debug.handoffs import HandoffMetrics
from gateway.engine.capabilities import Capabilities
from gateway.handoff.compatible import Side, differences, without_connector
from gateway.handoff.engine_ids import EngineIds
from gateway.handoff.stranded import Stranded
from scorer.fleet import Fleet, Worker
from scorer.pairs import Pairs
from scorer.peers import hands_over
from scorer.types import Role

_FAILING_S = 60.0


class Pairing:
    """`capabilities_of` a worker: what its engine said of itself, None before it was asked."""

    def __init__(
        self,
        fleet: Fleet,
        pairs: Pairs,
        engine_ids: EngineIds,
        stranded: Stranded,
        metrics: HandoffMetrics,
        capabilities_of: Callable[[str], Capabilities | None],
    ) -> None:
        self._fleet = fleet
        self._pairs = pairs
        self._engine_ids = engine_ids
        self._stranded = stranded
        self._metrics = metrics
        self._capabilities_of = capabilities_of
        self._failed_s: dict[str, float] = {}
        """When a decode engine last counted a failed transfer."""

    def compare(self, name: str) -> None:
        """The worker has said what it is: look at every pair it could be in."""
        worker = self._fleet.workers.get(name)
        if worker is None:
            return
        for other in self._fleet.workers.values():
            for prefill, decode in ((worker, other), (other, worker)):
                if decode.role.decodes and (prefill.role is Role.PREFILL or _are_peers(prefill, decode)):
                    self._pairs.set_incompatible((prefill.name, decode.name), self._apart(prefill, decode))

    def restarted(self, name: str, alive_s: float = math.inf) -> None:
        """What it held for others is gone, and so is the state its breakers were about. `alive_s`: when the old process
        was last heard.
        """
        self._engine_ids.retire(name, time.monotonic(), alive_s)
        self._stranded.forget(name)
        self._pairs.forget(name)

    def transfers_failed(self, name: str, now_s: float) -> None:
        """The engine has counted failed transfers. One that computes the prompt itself then does not tell otherwise."""
        self._failed_s[name] = now_s

    def failing(self, now_s: float) -> list[str]:
        """Workers whose transfers failed within the last minute."""
        return [name for name, failed_s in self._failed_s.items() if now_s - failed_s < _FAILING_S]

    def gone(self, name: str) -> None:
        self._engine_ids.forget(name)
        self._pairs.forget(name)
        self._metrics.forget(name)
        self._failed_s.pop(name, None)

    def _apart(self, prefill: Worker, decode: Worker) -> str | None:
        """Why the two cannot pair, as far as both say anything about it."""
        ours, theirs = self._side(prefill), self._side(decode)
        if ours is None or theirs is None:
            return None
        for difference in differences(ours, theirs):
            return str(difference)
        name = without_connector(ours, theirs)
        return None if name is None else f"{name} has no NIXL connector"

    def _side(self, worker: Worker) -> Side | None:
        told = self._capabilities_of(worker.name)
        if told is None:
            return None
        return Side(
            name=worker.name,
            version=told.version,
            model_path=told.root,
            kv_cache_dtype=told.kv_cache_dtype,
            block_size=told.block_size,
            hands_over=hands_over(worker),
            settings=told.settings,
        )


def _are_peers(source: Worker, decode: Worker) -> bool:
    """Whether the first could hand prompts over to the second that it holds more of."""
    alike = (source.models or frozenset()) & (decode.models or frozenset())
    return source is not decode and bool(alike and hands_over(source) and hands_over(decode))
