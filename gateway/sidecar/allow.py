"""Which targets a hint header may name. Whoever can send headers could otherwise make us connect anywhere.

Hosts are compared as they are given: addresses as addresses (whatever their spelling), names as names. No name is ever
resolved, so a name does not match a network and an address does not match a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import NamedTuple

from gateway.addresses import is_metadata
from gateway.sidecar.endpoint import Endpoint, Host, parse_host, parse_port

_ANY = "*"


class Entry(NamedTuple):
    """One line of `pd.allow`; None stands for any host, any port."""

    host: Host | IPv4Network | IPv6Network | None
    port: int | None

    def covers(self, endpoint: Endpoint) -> bool:
        if self.port is not None and self.port != endpoint.port:
            return False
        if isinstance(self.host, IPv4Network | IPv6Network):
            return not isinstance(endpoint.host, str) and endpoint.host in self.host
        if self.host is None:
            return not is_metadata(endpoint.host)  # "Any" was not meant so.
        return self.host == endpoint.host


def parse_entry(text: str) -> Entry:
    """`host:port`, `host:*`, `CIDR:port`, `CIDR:*`, an IPv6 address or CIDR in brackets, or `*`. Raises ValueError with
    the entry in its text.
    """
    if text == _ANY:
        return Entry(None, None)
    host, colon, port = text.rpartition(":")
    try:
        if not colon or "]" in port:
            raise ValueError(f"has no port (:{_ANY} for any)")
        if ":" in host and "/" not in host and not host.startswith("["):
            raise ValueError("has an IPv6 address without brackets")
        return Entry(_host(host), None if port == _ANY else parse_port(port))
    except ValueError as exc:
        raise ValueError(f"{text!r} cannot be read: {exc}") from None


def _host(text: str) -> Host | IPv4Network | IPv6Network:
    if "/" not in text:
        return parse_host(text)
    return ip_network(text.removeprefix("[").removesuffix("]"), strict=False)


class AllowList:
    """`entries` as in `pd.allow`. Raises ValueError."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = [parse_entry(entry) for entry in entries]

    def allows(self, endpoint: Endpoint) -> bool:
        return any(entry.covers(endpoint) for entry in self._entries)
