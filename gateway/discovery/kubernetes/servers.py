"""What was told of the pods' endpoints, and so what is to be told when a pod changes. Nothing here asks anybody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from gateway.discovery.base import change
from gateway.discovery.kubernetes.pods import Endpoint, Pod
from scorer.types import ChangeKind, WorkerChange

_MOST_LEFT: Final = 1024


class _Server(msgspec.Struct):
    """`serves`: it was told as ADDED, and not as DRAINING since. `left`: its pod is not there any more."""

    pod: str
    uid: str
    endpoint: Endpoint
    serves: bool
    left: bool = False


class Servers:
    """A pod that is ready serves. An endpoint that is not ready, or gone, or not chosen any more is DRAINING, so that
    what runs there ends. REMOVED is what certainly is not there: its pod went after it was draining, has ended, is
    another pod of the same name, or has lost its address to another pod.
    """

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        self._of: dict[str, set[str]] = {}
        self._at: dict[str, set[str]] = {}
        """Who is at a URL: several where pods share an address."""
        self._left: dict[str, None] = {}
        """The oldest first."""

    @property
    def pods(self) -> list[str]:
        return list(self._of)

    @property
    def serving(self) -> dict[str, Endpoint]:
        return {name: server.endpoint for name, server in self._servers.items() if server.serves}

    def settle(self, name: str, pod: Pod | None, endpoints: Mapping[str, Endpoint]) -> Iterator[WorkerChange]:
        """The pod of this name is so now, with these endpoints; None: there is none. To be taken to its end."""
        for worker in sorted(self._of.get(name, set()) - endpoints.keys()):
            server = self._servers[worker]
            if pod is not None and (pod.over or pod.uid != server.uid):
                yield self._remove(worker)
            elif server.left:
                continue
            elif server.serves:
                server.serves, server.left = False, pod is None
                yield _change(ChangeKind.DRAINING, worker, server.endpoint)
                if server.left:
                    self._remember(worker)
            elif pod is None:
                yield self._remove(worker)
        if pod is not None:
            for worker, endpoint in endpoints.items():
                yield from self._settle_one(worker, pod, endpoint)

    def _settle_one(self, worker: str, pod: Pod, endpoint: Endpoint) -> Iterator[WorkerChange]:
        server = self._servers.get(worker)
        if server is not None and not _is_same(server, pod, endpoint):
            yield self._remove(worker)
            server = None
        if not pod.ready:
            if server is not None:
                if server.serves:
                    yield _change(ChangeKind.DRAINING, worker, endpoint)
                self._set(worker, pod, endpoint)
            return
        if server is None or not server.serves:
            for other in sorted(self._at.get(endpoint.worker.url, ())):
                if other != worker and not self._servers[other].serves:
                    yield self._remove(other)
            yield _change(ChangeKind.ADDED, worker, endpoint)
        elif server.endpoint != endpoint:
            yield _change(ChangeKind.CHANGED, worker, endpoint)
        self._set(worker, pod, endpoint)

    def _set(self, worker: str, pod: Pod, endpoint: Endpoint) -> None:
        self._servers[worker] = _Server(pod.name, pod.uid, endpoint, pod.ready)
        self._of.setdefault(pod.name, set()).add(worker)
        self._at.setdefault(endpoint.worker.url, set()).add(worker)
        self._left.pop(worker, None)

    def _remember(self, worker: str) -> None:
        """Its address may become another's while it is draining."""
        self._left[worker] = None
        if len(self._left) > _MOST_LEFT:
            self._forget(next(iter(self._left)))

    def _remove(self, worker: str) -> WorkerChange:
        self._forget(worker)
        return WorkerChange(kind=ChangeKind.REMOVED, worker=worker)

    def _forget(self, worker: str) -> None:
        server = self._servers.pop(worker)
        siblings = self._of[server.pod]
        siblings.discard(worker)
        if not siblings:
            del self._of[server.pod]
        there = self._at[server.endpoint.worker.url]
        there.discard(worker)
        if not there:
            del self._at[server.endpoint.worker.url]
        self._left.pop(worker, None)


def _is_same(server: _Server, pod: Pod, endpoint: Endpoint) -> bool:
    return (server.pod, server.uid, server.endpoint.worker.url) == (pod.name, pod.uid, endpoint.worker.url)


def _change(kind: ChangeKind, worker: str, endpoint: Endpoint) -> WorkerChange:
    return msgspec.structs.replace(change(kind, worker, endpoint.worker), rank=endpoint.rank)
