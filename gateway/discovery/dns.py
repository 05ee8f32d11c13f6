"""Every address that a DNS name has, as a worker: headless services of Kubernetes, and what else lists servers so.

A resolver that does not answer, or answers that the name has no address, is more often a fault of DNS than the end of a
fleet: what is known stays, the first for as long as it lasts and the second until it was said a few times in a row. An
address that is missing while others are there is another matter: that server is on its way out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from gateway.config.schema import Worker
from gateway.discovery.base import PORTS, Source, differences, worker_name
from gateway.discovery.srv import Target, targets_of
from scorer.types import ChangeKind, WorkerChange

_log = logging.getLogger(__name__)

Addresses = Sequence[str]
Resolve = Callable[[str], Addresses]
"""All addresses of a name, none if it has none (any more). Raises OSError. It may block."""
Service = Callable[[str], Sequence[Target]]
"""All targets of a service's SRV records, likewise."""


class Server(NamedTuple):
    """`port` and `name` are those of an SRV record."""

    address: str
    port: int | None = None
    name: str | None = None


EMPTY_ANSWERS = 3
"""So many in a row are believed."""
_TIMEOUT_S = 10.0
_NO_ADDRESS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def addresses_of(name: str) -> Addresses:
    """By the system's resolver. Of a server that has both, its IPv4 address: it is one server."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        if exc.errno in _NO_ADDRESS:
            return []
        raise
    by_family = {family: [info[4][0] for info in found if info[0] == family] for family in {info[0] for info in found}}
    chosen = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []
    return sorted({str(address) for address in chosen})


class _Name:
    """One entry: `worker` stands for each server behind the host of its URL."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.host = urlsplit(worker.url).hostname or ""
        self.workers: dict[str, Worker] = {}
        self.problem: str | None = None
        self.asking: asyncio.Future[list[Server]] | None = None
        self._empty = 0

    def answered(self, servers: Sequence[Server]) -> None:
        if servers:
            self._empty = 0
            self.problem = None
            found = [_at(self.worker, server) for server in servers]
            self.workers = {worker_name(worker): worker for worker in found}
            return
        self._empty += 1
        self.problem = f"{self.host} has no address"
        if self._empty >= EMPTY_ANSWERS:
            self.workers = {}
        elif self.workers:
            self.problem += "; what it had stays for now"

    def failed(self, reason: str) -> None:
        self.problem = f"{self.host} cannot be resolved ({reason})" + ("; what it had stays" if self.workers else "")


class DnsDiscovery:
    """Resolves the host of each entry's URL every `interval_s`; its other keys are those of every worker found. A host
    that begins with `_` is a service, with SRV records.
    """

    source = Source.DNS

    def __init__(
        self,
        entries: Sequence[Worker],
        *,
        interval_s: float,
        resolve: Resolve = addresses_of,
        service: Service = targets_of,
    ) -> None:
        self._names = [_Name(entry) for entry in entries]
        self._interval_s = interval_s
        self._resolve = resolve
        self._service = service
        self._told: str | None = None

    @property
    def problem(self) -> str | None:
        return "; ".join(name.problem for name in self._names if name.problem is not None) or None

    async def changes(self) -> AsyncIterator[WorkerChange]:
        """Never ends."""
        threads = ThreadPoolExecutor(len(self._names), thread_name_prefix="dns")
        known: dict[str, Worker] = {}
        try:
            while True:
                await asyncio.gather(*(self._look(name, threads) for name in self._names))
                self._tell()
                found: dict[str, Worker] = {}
                for name in self._names:
                    found = name.workers | found
                before, known = known, found
                for each in differences(before, found, ChangeKind.DRAINING):
                    yield each
                await asyncio.sleep(self._interval_s)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    async def _look(self, name: _Name, threads: ThreadPoolExecutor) -> None:
        """A question that is not answered in time goes on, so that no more than one of each waits in a thread."""
        if name.asking is None:
            name.asking = asyncio.get_running_loop().run_in_executor(threads, self._servers, name.host)
        done, _ = await asyncio.wait({name.asking}, timeout=_TIMEOUT_S)
        if not done:
            name.failed("no answer")
            return
        asked, name.asking = name.asking, None
        try:
            name.answered(asked.result())
        except (OSError, UnicodeError) as exc:
            name.failed(str(getattr(exc, "strerror", None) or exc))

    def _servers(self, host: str) -> list[Server]:
        """In a thread."""
        if not host.startswith("_"):
            return [Server(address) for address in self._resolve(host)]
        targets = self._service(host)
        return [Server(address, it.port, it.name) for it in targets for address in self._resolve(it.name)]

    def _tell(self) -> None:
        problem = self.problem
        if problem != self._told:
            if problem is not None:
                _log.warning("DNS discovery: %s", problem)
            else:
                _log.info("DNS discovery: every name has addresses again")
        self._told = problem


def _at(worker: Worker, server: Server) -> Worker:
    """`worker` at one of its name's addresses; of endpoints, a host `*` stands for that."""
    url = urlsplit(worker.url)
    host = f"[{server.address}]" if ":" in server.address else server.address
    port = server.port or url.port or PORTS[url.scheme]
    return msgspec.structs.replace(
        worker,
        url=f"{url.scheme}://{host}:{port}{url.path.rstrip('/')}",
        server_name=worker.server_name or server.name or url.hostname,
        events=worker.events and worker.events.replace("//*:", f"//{host}:"),
        replay=worker.replay and worker.replay.replace("//*:", f"//{host}:"),
    )
