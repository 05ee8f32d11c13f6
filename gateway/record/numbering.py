"""Numbers for things that must not be known by their own names.

A hash of a prompt's beginning is no secret: who guesses the prompt can hash the guess. A number given in the order in
which things are first seen says which are equal, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import count


class Numbering:
    """Numbers paths through trees: equal beginnings of paths have equal numbers, everything else has its own.

    The `capacity` steps asked for last are remembered. What is `forgotten` gets a new number when it comes again; no
    step is forgotten before all that lie beyond it, so that equal numbers always mean equal beginnings.
    """

    def __init__(self, capacity: int) -> None:
        self.forgotten = 0
        self._capacity = capacity
        self._known: OrderedDict[Hashable, int] = OrderedDict()
        self._next: Iterator[int] = count()

    def path(self, keys: Sequence[Hashable], n_more: int = 0) -> list[int]:
        """The numbers of a path's steps, `keys` of which each names all of the path up to it; then `n_more` numbers
        that nothing else has.
        """
        known = self._known
        numbers: list[int] = []
        for key in keys:
            number = known.get(key)
            if number is None:
                number = known[key] = next(self._next)
            numbers.append(number)
        for key in reversed(keys):  # The first step last: it is remembered longest.
            known.move_to_end(key)
        while len(known) > self._capacity:
            known.popitem(last=False)
            self.forgotten += 1
        numbers.extend(next(self._next) for _ in range(n_more))
        return numbers
