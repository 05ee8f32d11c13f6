"""When connections of whom were broken on purpose: what a request that failed then is excused by."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf


class Broken:
    """Monotonic seconds. A kill breaks the connections of the moment it takes; those that are tried later are refused,
    which excuses nobody. A cut breaks those that are open when it begins, and until it is healed those that are tried.
    """

    def __init__(self) -> None:
        self._spans: defaultdict[str, list[list[float]]] = defaultdict(list)

    @contextmanager
    def cut(self, *names: str) -> Iterator[None]:
        spans = {name: [time.monotonic(), inf] for name in names}
        for name, span in spans.items():
            self._spans[name].append(span)
        try:
            yield
        finally:
            for span in spans.values():
                span[1] = time.monotonic()

    def touched(self, name: str, began_s: float, ended_s: float) -> bool:
        """Whether connections of `name` were broken between these times."""
        return any(begin <= ended_s and began_s <= end for begin, end in self._spans[name])
