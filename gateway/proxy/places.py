"""How many requests may be served at once."""

from __future__ import annotations


class Places:
    """Those of one process that is a gateway by itself. `bodies`: those included that still send theirs, and those left
    out that take no place.
    """

    def __init__(self) -> None:
        self._served = 0
        self._bodies = 0

    @property
    def served(self) -> int:
        return self._served

    @property
    def bodies(self) -> int:
        return self._bodies

    def take(self, most: int) -> bool:
        """One more is served, if there are fewer than `most`."""
        if self._served >= most:
            return False
        self._served += 1
        return True

    def give_back(self) -> None:
        self._served -= 1

    def begin_body(self, takes_place: bool = True) -> None:
        self._bodies += takes_place

    def end_body(self, takes_place: bool = True) -> None:
        self._bodies -= takes_place
