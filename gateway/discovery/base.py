"""What every discovery shares: the protocol, workers' names, and the difference between two lists of workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from enum import Enum
from typing import Protocol
from urllib.parse import urlsplit

from gateway.config.schema import Worker
from gateway.errors import UserError
from scorer.types import ChangeKind, Role, WorkerChange

PORTS = {"http": 80, "https": 443}


class Source(Enum):
    """Where a worker is known from. Of several that name the same one, the first of these is believed."""

    STATIC = "static"
    FILE = "file"
    DNS = "dns"
    KUBERNETES = "kubernetes"
    API = "api"


class Discovery(Protocol):
    """One way to know workers. `problem` says, for people, why it knows less than it should; None: all is well."""

    @property
    def source(self) -> Source: ...

    @property
    def problem(self) -> str | None: ...

    def changes(self) -> AsyncIterator[WorkerChange]:
        """Every change, beginning with one ADDED per worker known. Ends when there can be no more.

        A worker that vanished is DRAINING (or REMOVED at once, where the discovery was told so): it gets no new
        requests, and its consumer decides when it is gone. ADDED again, it serves again.
        """
        ...


class NameClashError(UserError):
    """Two workers would have the same name."""


def worker_name(worker: Worker) -> str:
    """The given name, or host:port of the URL (with its path, where there is one). It never depends on the order of a
    list.
    """
    if worker.name is not None:
        return worker.name
    url = urlsplit(worker.url)
    host = url.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{url.port or PORTS[url.scheme]}{url.path.rstrip('/')}"


def by_name(workers: Iterable[Worker]) -> dict[str, Worker]:
    """Raises NameClashError."""
    named: dict[str, Worker] = {}
    for worker in workers:
        name = worker_name(worker)
        if name in named:
            raise NameClashError(f"two workers are called {name}: {named[name].url} and {worker.url}")
        named[name] = worker
    return named


def change(kind: ChangeKind, name: str, worker: Worker) -> WorkerChange:
    return WorkerChange(
        kind=kind,
        worker=name,
        url=worker.url.rstrip("/"),
        role=Role(worker.role),
        events_endpoint=worker.events,
        replay_endpoint=worker.replay,
        nixl_endpoint=worker.nixl,
        labels=worker.labels,
        server_name=worker.server_name,
        weight=worker.weight,
    )


def differences(
    before: Mapping[str, Worker], after: Mapping[str, Worker], vanished: ChangeKind
) -> Iterator[WorkerChange]:
    """What turns one list into the other. Another URL under the same name is another server: gone, and added."""
    for name, worker in before.items():
        if name not in after:
            yield change(vanished, name, worker)
        elif after[name].url != worker.url:
            yield change(ChangeKind.REMOVED, name, worker)
    for name, worker in after.items():
        known = before.get(name)
        if known is None or known.url != worker.url:
            yield change(ChangeKind.ADDED, name, worker)
        elif known != worker:
            yield change(ChangeKind.CHANGED, name, worker)
