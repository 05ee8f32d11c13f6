"""Workers that hint headers name: those known, and those that become known because a hint named them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum

from gateway.sidecar.allow import AllowList
from gateway.sidecar.endpoint import Endpoint, endpoint_of
from scorer.fleet import Fleet, Worker
from scorer.types import ChangeKind, Role, WorkerChange

MOST_HINTED = 256
_FORGET_AFTER_S = 600.0
_ORIGIN = {"origin": "hint"}
"""Label of the workers added here; one that a discovery names as well gets its labels, and is ours no more."""


class Refusal(Enum):
    DENIED = "denied"
    FULL = "full"
    NEW = "new"
    """Said only where nobody is to be added."""


class Targets:
    """`apply` takes a change of the fleet in (`Core.apply`). Hinted workers are kept while they have work or were
    named in the last ten minutes, at most `most` of them.
    """

    def __init__(
        self,
        fleet: Fleet,
        apply: Callable[[WorkerChange], None],
        allow: Iterable[str],
        *,
        scheme: str = "http",
        most: int = MOST_HINTED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._apply = apply
        self._allow = AllowList(allow)
        self._scheme = scheme
        self._most = most
        self._clock = clock
        self._named_s: OrderedDict[str, float] = OrderedDict()
        """Hinted workers and when they were last named, the longest ago first."""
        self._found: dict[Endpoint, str] = {}
        """Who was found where, to be looked at first: a search goes through the whole fleet."""

    def admit(self, endpoint: Endpoint, *, look: bool = False) -> str | Refusal:
        """The name of the prefill worker at `endpoint`, which is added to the fleet if it is allowed and new. One that
        is known needs no entry. `look`: nothing is changed.
        """
        worker = self._at(endpoint)
        is_known = worker is not None and worker.role is Role.PREFILL
        if not is_known and not self._allow.allows(endpoint):
            return Refusal.DENIED
        if look:
            return Refusal.NEW if worker is None else worker.name
        if worker is None:
            return self._add(endpoint, Role.PREFILL)
        if worker.role is Role.SOURCE and _is_hinted(worker):
            self._apply(_hinted(worker.name, worker.url, Role.PREFILL))  # It is named for more now.
        return self._named(worker)

    def source(self, endpoint: Endpoint, *, add: bool, look: bool = False) -> str | Refusal:
        """The name of a worker that may be asked for what it holds. `add`: one that is allowed and new joins the fleet,
        where it decodes nothing; else only those that are known will do. `look`: nothing is changed.
        """
        worker = self._at(endpoint)
        if worker is not None:
            return worker.name if look else self._named(worker)
        if not add or not self._allow.allows(endpoint):
            return Refusal.DENIED
        if look:
            return Refusal.NEW
        return self._add(endpoint, Role.SOURCE)

    def knows(self, endpoint: Endpoint) -> bool:
        return self._at(endpoint) is not None

    def _named(self, worker: Worker) -> str:
        if worker.name in self._named_s:
            self._touch(worker.name)
        return worker.name

    def _add(self, endpoint: Endpoint, role: Role) -> str | Refusal:
        name = str(endpoint)
        if name in self._fleet.workers:  # A worker of another address goes by this name.
            return Refusal.DENIED
        if len(self._named_s) >= self._most and not self._make_room(role):
            return Refusal.FULL
        self._apply(_hinted(name, f"{self._scheme}://{endpoint}", role))
        self._touch(name)
        return name

    def forget_unused(self) -> None:
        """Drop hinted workers nobody has named for long, and look anew who is where. Call it now and then."""
        self._found.clear()
        until_s = self._clock() - _FORGET_AFTER_S
        for name, named_s in list(self._named_s.items()):
            if named_s < until_s:
                self._drop(name)

    def _at(self, endpoint: Endpoint) -> Worker | None:
        """The worker there; one that a discovery names before one that was hinted."""
        workers = self._fleet.workers
        found = workers.get(self._found.get(endpoint, ""))
        if found is not None and _endpoint(found) == endpoint:
            return found
        there = [worker for worker in workers.values() if _endpoint(worker) == endpoint]
        worker = min(there, key=_is_hinted, default=None)
        if worker is not None:
            self._found[endpoint] = worker.name
        return worker

    def _touch(self, name: str) -> None:
        self._named_s[name] = self._clock()
        self._named_s.move_to_end(name)

    def _make_room(self, role: Role) -> bool:
        """A source, which is advice, takes nobody's place but a source's."""
        workers = self._fleet.workers
        names = [name for name in self._named_s if role is Role.PREFILL or _is_source(workers.get(name))]
        return any(self._drop(name) for name in names)

    def _drop(self, name: str) -> bool:
        """Whether there is one hinted worker less; one at work stays."""
        worker = self._fleet.workers.get(name)
        if worker is not None and _is_hinted(worker):
            if any(load.requests for load in worker.loads.values()):
                return False
            self._apply(WorkerChange(kind=ChangeKind.REMOVED, worker=name))
        del self._named_s[name]
        return True


def _hinted(name: str, url: str | None, role: Role) -> WorkerChange:
    return WorkerChange(kind=ChangeKind.ADDED, worker=name, url=url, role=role, labels=_ORIGIN)


def _endpoint(worker: Worker) -> Endpoint | None:
    return None if worker.url is None else endpoint_of(worker.url)


def _is_source(worker: Worker | None) -> bool:
    return worker is not None and worker.role is Role.SOURCE


def _is_hinted(worker: Worker) -> bool:
    return worker.labels == _ORIGIN
