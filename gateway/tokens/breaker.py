"""Circuit breaker around one engine's ``/tokenize``, as a pure state machine: the caller brings the clock.

    closed --failures in a row--> open --open_s over--> half_open --success--> closed
                                   ^                        |
                                   +-------- failure -------+   (and open_s doubles, up to its bound)

Half open lets exactly one call through; everybody else is refused at once, so a dead engine costs one caller per
`open_s` its budget and nobody else anything.
"""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half_open"]
Ticket = Literal["call", "probe"]


class CircuitBreaker:
    """Every ticket `enter` gives out must come back in one of `success`, `failure` or `abandon`."""

    __slots__ = (
        "_failures",
        "_max_failures",
        "_open_max_s",
        "_open_min_s",
        "_open_s",
        "_probing",
        "_until_s",
        "opened",
    )

    def __init__(self, *, failures: int, open_s: float, open_max_s: float) -> None:
        self._max_failures = failures
        self._open_min_s = open_s
        self._open_max_s = max(open_s, open_max_s)
        self._open_s = open_s
        self._failures = 0
        self._until_s: float | None = None
        self._probing = False
        self.opened = 0

    def state(self, now_s: float) -> State:
        if self._until_s is None:
            return "closed"
        return "half_open" if self._probing or now_s >= self._until_s else "open"

    def enter(self, now_s: float) -> Ticket | None:
        """A ticket for one call, or None: do not call. In half open the first asker gets the probe."""
        if self._until_s is None:
            return "call"
        if self._probing or now_s < self._until_s:
            return None
        self._probing = True
        return "probe"

    def success(self, ticket: Ticket) -> None:
        """The engine answered. A call from before the breaker opened does not close it; the probe does."""
        if self._until_s is not None and ticket == "call":
            return
        self._failures = 0
        self._until_s = None
        self._probing = False
        self._open_s = self._open_min_s

    def failure(self, ticket: Ticket, now_s: float) -> None:
        """The engine failed or was too slow."""
        if ticket == "probe":
            self._probing = False
            self._open_s = min(self._open_s * 2, self._open_max_s)
            self._trip(now_s)
        elif self._until_s is None:
            self._failures += 1
            if self._failures >= self._max_failures:
                self._trip(now_s)

    def abandon(self, ticket: Ticket) -> None:
        """The caller went away before the call said anything about the engine."""
        if ticket == "probe":
            self._probing = False

    def _trip(self, now_s: float) -> None:
        self._until_s = now_s + self._open_s
        self._failures = 0
        self.opened += 1
