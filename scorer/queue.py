"""The order in which requests that wait for a place leave: by priority, fair between tenants, by deadline.

Priorities are classes, the lowest number first; each `AGEING`-th place goes to the class of whoever has waited longest,
so that none waits for ever. Within a class tenants take turns by tokens (start-time fair queueing: a tenant's clock is
ahead by what it was given), within a tenant the earliest deadline goes first, then who came first.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator

AGEING = 8
_RATE_OVER_S = 10.0
_MOST_IDLE = 1024
"""Tenants remembered in a class though nothing of theirs waits."""


class Entry:
    """One request that waits. `tokens` of prompt; `cost` in tokens, the answer's included, is what it is charged."""

    __slots__ = ("cost", "deadline_s", "number", "priority", "since_s", "tenant", "tokens", "waits")

    def __init__(
        self,
        *,
        since_s: float,
        deadline_s: float,
        priority: int = 0,
        tenant: str = "",
        tokens: int = 0,
        cost: float = 1,
    ) -> None:
        self.since_s = since_s
        self.deadline_s = deadline_s
        self.priority = priority
        self.tenant = tenant
        self.tokens = tokens
        self.cost = max(1.0, cost)
        self.number = 0
        self.waits = False


_Row = tuple[float, int, Entry]


class _Tenant:
    __slots__ = ("clock", "number", "rows")

    def __init__(self, clock: float, number: int) -> None:
        self.clock = clock
        self.number = number
        self.rows: list[_Row] = []


class _Class:
    """Those of one priority. `clock` is that of the tenant served last, which nobody is behind: who is new begins
    there, with no credit.
    """

    __slots__ = ("clock", "idle", "line", "n", "tenants")

    def __init__(self) -> None:
        self.clock = 0.0
        self.n = 0
        self.idle = 0
        self.tenants: dict[str, _Tenant] = {}
        self.line: list[tuple[float, int, str]] = []
        """A heap of the tenants by (clock, number); a clock that has moved on is put right when it gets to the top."""

    def add(self, entry: Entry) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            tenant = self.tenants[entry.tenant] = _Tenant(self.clock, entry.number)
            heapq.heappush(self.line, (tenant.clock, tenant.number, entry.tenant))
        elif not tenant.rows:
            self.idle -= 1
        insort(tenant.rows, (entry.deadline_s, entry.number, entry))
        self.n += 1

    def remove(self, entry: Entry) -> None:
        tenant = self.tenants[entry.tenant]
        del tenant.rows[bisect_left(tenant.rows, (entry.deadline_s, entry.number))]
        self.n -= 1
        if not tenant.rows:
            self.idle += 1
            if self.idle > _MOST_IDLE:
                self._forget_idle()

    def _forget_idle(self) -> None:
        self.tenants = {name: tenant for name, tenant in self.tenants.items() if tenant.rows}
        self.line = [(tenant.clock, tenant.number, name) for name, tenant in self.tenants.items()]
        heapq.heapify(self.line)
        self.idle = 0

    def head(self) -> Entry:
        while True:
            clock, number, name = self.line[0]
            tenant = self.tenants[name]
            if tenant.clock != clock:
                heapq.heapreplace(self.line, (tenant.clock, number, name))
            elif not tenant.rows:  # All others are as far: its having been served does not count any longer.
                heapq.heappop(self.line)
                del self.tenants[name]
                self.idle -= 1
                self.clock = clock
            else:
                return tenant.rows[0][2]

    def serve(self, entry: Entry) -> None:
        tenant = self.tenants[entry.tenant]
        self.clock = tenant.clock
        tenant.clock += entry.cost
        self.remove(entry)


class FairQueue:
    """Requests of one model that wait. No clock: times come with the entries."""

    def __init__(self) -> None:
        self.tokens = 0
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []
        self._entries: dict[Entry, None] = {}
        """As they came."""
        self._tenants: dict[str, list[int]] = {}
        self._numbers = 0
        self._served = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """As they came."""
        return iter(self._entries)

    def tenants(self) -> dict[str, tuple[int, int]]:
        """Of each tenant that waits, (requests, prompt tokens)."""
        return {name: (n, tokens) for name, (n, tokens) in self._tenants.items()}

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """Its (requests, prompt tokens)."""
        n, tokens = self._tenants.get(tenant, (0, 0))
        return n, tokens

    def oldest(self) -> Entry | None:
        return next(iter(self._entries), None)

    def add(self, entry: Entry) -> None:
        self._numbers += 1
        entry.number = self._numbers
        entry.waits = True
        self._entries[entry] = None
        self.tokens += entry.tokens
        row = self._tenants.setdefault(entry.tenant, [0, 0])
        row[0] += 1
        row[1] += entry.tokens
        members = self._classes.get(entry.priority)
        if members is None:
            members = self._classes[entry.priority] = _Class()
            insort(self._priorities, entry.priority)
        members.add(entry)

    def remove(self, entry: Entry) -> bool:
        """Take it out, wherever it is; whether it waited."""
        if not entry.waits:
            return False
        self._classes[entry.priority].remove(entry)
        self._left(entry)
        return True

    def head(self) -> Entry | None:
        """Who is next."""
        if not self._entries:
            return None
        priority = self._priorities[0]
        if len(self._priorities) > 1 and self._served % AGEING == AGEING - 1:
            priority = next(iter(self._entries)).priority
        return self._classes[priority].head()

    def first(self) -> Entry | None:
        """Who would be next if priority alone counted between classes."""
        return self._classes[self._priorities[0]].head() if self._entries else None

    def pop(self, *, by_priority: bool = False) -> Entry | None:
        """Who is next, no longer waiting. `by_priority`: `first` instead, and whose turn it is by age keeps it."""
        entry, next_ = self.first() if by_priority else self.head(), self.head()
        if entry is not None:
            self._served += entry is next_
            self._classes[entry.priority].serve(entry)
            self._left(entry)
        return entry

    def displaced_by(self, priority: int) -> Entry | None:
        """Who would have to go for a request of `priority`: of a lower class than it, the last that came."""
        if not self._priorities or self._priorities[-1] <= priority:
            return None
        lowest = self._priorities[-1]
        return next(entry for entry in reversed(self._entries) if entry.priority == lowest)

    def ahead(self, priority: int, tenant: str) -> int:
        """About how many would leave before a request that came now: its tenant's, as many of each other one, and no
        more than there are in its class and those before it.
        """
        at_most = sum(self._classes[p].n for p in self._priorities if p <= priority)
        turns = self.of_tenant(tenant)[0] + 1
        return min(at_most, turns * len(self._tenants.keys() | {tenant}) - 1)

    def _left(self, entry: Entry) -> None:
        entry.waits = False
        del self._entries[entry]
        self.tokens -= entry.tokens
        row = self._tenants[entry.tenant]
        row[0] -= 1
        row[1] -= entry.tokens
        if not row[0]:
            del self._tenants[entry.tenant]
        if not self._classes[entry.priority].n:
            del self._classes[entry.priority]
            self._priorities.remove(entry.priority)


class Rate:
    """How many a second, lately. The time before the first does not count."""

    __slots__ = ("_began_s", "_last_s", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._began_s = self._last_s = 0.0

    def begin(self, now_s: float) -> None:
        """Nothing has happened yet."""
        self._sum = 0.0
        self._began_s = self._last_s = now_s

    def note(self, now_s: float) -> None:
        self._decay(now_s)
        self._sum += 1

    def per_s(self, now_s: float) -> float:
        """0 before the first."""
        self._decay(now_s)
        over_s = _RATE_OVER_S * -math.expm1(-max(1e-3, now_s - self._began_s) / _RATE_OVER_S)
        return self._sum / over_s

    def _decay(self, now_s: float) -> None:
        self._sum *= math.exp(min(0.0, self._last_s - now_s) / _RATE_OVER_S)
        self._last_s = now_s
