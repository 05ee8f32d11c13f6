"""Which worker a message belongs to when many engines share one socket: its topic says so.

A topic is either declared for a worker, or has the worker's name as one of its parts between "@": the usual
``kv@<host>:<port>@<model>`` names a worker that is called by its address.
"""

from __future__ import annotations

from collections import Counter

_MAX_NAMED = 64
_MAX_KNOWN = 4096


class Topics:
    """Topic -> (worker, declared rank or None). `unmatched` counts messages by the topics that belong to nobody."""

    def __init__(self) -> None:
        self.unmatched: Counter[str] = Counter()
        self._declared: dict[bytes, tuple[str, int]] = {}
        self._workers: Counter[str] = Counter()
        self._found: dict[bytes, tuple[str, int | None] | None] = {}

    def add(self, worker: str, rank: int, topic: str | None) -> None:
        self._workers[worker] += 1
        if topic:
            self._declared[topic.encode()] = (worker, rank)
        self._found.clear()
        for name in [name for name in self.unmatched if self._search(name.encode()) is not None]:
            del self.unmatched[name]

    def remove(self, worker: str, rank: int) -> None:
        """One `add` of `worker` is undone; without one, nothing is."""
        if self._workers[worker] > 0:
            self._workers[worker] -= 1
        self._workers += Counter()
        self._declared = {topic: whose for topic, whose in self._declared.items() if whose != (worker, rank)}
        self._found.clear()

    def find(self, topic: bytes) -> tuple[str, int | None] | None:
        if topic not in self._found:
            if len(self._found) >= _MAX_KNOWN:
                self._found.clear()
            self._found[topic] = self._search(topic)
        found = self._found[topic]
        if found is None:
            name = topic[:128].decode(errors="replace")
            self.unmatched[name if name in self.unmatched or len(self.unmatched) < _MAX_NAMED else "(others)"] += 1
        return found

    def _search(self, topic: bytes) -> tuple[str, int | None] | None:
        declared = self._declared.get(topic)
        if declared is not None:
            return declared
        text = topic.decode(errors="replace")
        named = {part for part in (text, *text.split("@")) if part in self._workers}
        return (named.pop(), None) if len(named) == 1 else None
