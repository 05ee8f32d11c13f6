"""What this pod is: its engines, one for each data-parallel rank, and our listener before each of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit, urlunsplit

from gateway.config.schema import Worker
from gateway.discovery import worker_name
from gateway.proxy.incoming import Sender
from gateway.sidecar.endpoint import Endpoint, Host, endpoint_of, parse_host

_POD_IP = "POD_IP"
"""Environment variable that holds the pod's own address (llm-d's charts set it)."""


class Pod:
    """`engines[r]` is the engine of rank r; `ports()` says where we listen for each, once we do."""

    def __init__(self, engine_url: str, size: int, ports: Callable[[], Sequence[int]]) -> None:
        self.engines = [Worker(url=_url_of_rank(engine_url, rank), role="decode") for rank in range(size)]
        self.names = [worker_name(engine) for engine in self.engines]
        self._ports = ports
        self._hosts = _own_hosts()
        self._engine_endpoints = {endpoint_of(engine.url) for engine in self.engines}

    def rank_here(self, request: Sender) -> int:
        """The rank whose listener the request came to."""
        if len(self.names) == 1:
            return 0
        address, ports = request.sockname(), self._ports()
        return ports.index(address[1]) if address is not None and address[1] in ports else 0

    def rank_of(self, endpoint: Endpoint, request: Sender) -> int | None:
        """The rank whose listener `endpoint` is, as seen by who sent `request`."""
        ports = self._ports()
        if endpoint.port in ports and self._is_here(endpoint.host, request):
            return ports.index(endpoint.port)
        return None

    def is_self(self, endpoint: Endpoint, request: Sender) -> bool:
        """Whether a request sent there would come back to us or to our own engine."""
        return endpoint in self._engine_endpoints or self.rank_of(endpoint, request) is not None

    def engine_behind(self, endpoint: Endpoint) -> Endpoint:
        """The engine behind a listener of another pod like this one; what is at no listener's port is an engine."""
        ports = self._ports()
        if endpoint.port not in ports:
            return endpoint
        own = endpoint_of(self.engines[ports.index(endpoint.port)].url)
        return endpoint if own is None else endpoint._replace(port=own.port)

    def _is_here(self, host: Host, request: Sender) -> bool:
        if host in self._hosts:
            return True
        address = request.sockname()
        try:
            return address is not None and parse_host(address[0]) == host
        except ValueError:
            return False


def _own_hosts() -> frozenset[Host]:
    hosts: set[Host] = set()
    for text in (os.environ.get(_POD_IP, ""), socket.gethostname(), "localhost", "127.0.0.1", "::1"):
        try:
            hosts.add(parse_host(text))
        except ValueError:
            continue
    return frozenset(hosts)


def _url_of_rank(url: str, rank: int) -> str:
    if rank == 0:
        return url
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = (parts.port or {"http": 80, "https": 443}[parts.scheme]) + rank
    return urlunsplit(parts._replace(netloc=f"{host}:{port}"))
