"""`host:port` as headers and the configuration give it, in one spelling. Nothing is resolved: a name is a name."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

Host = IPv4Address | IPv6Address | str
"""An address, or a name in lower case without its last dot."""

_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*")
_NUMBER = re.compile(r"(?:.*\.)?(?:\d+|0x[0-9a-f]*)")
"""127.1, 0177.0.0.1 and 2130706433 look like names, and resolvers take them for addresses."""
_PORT = re.compile(r"[0-9]{1,5}")
_LONGEST_NAME = 253
_SCHEME_PORTS = {"http": 80, "https": 443}


class Endpoint(NamedTuple):
    """`str()` gives it back with an IPv6 address in brackets."""

    host: Host
    port: int

    def __str__(self) -> str:
        host = str(self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def parse_host(text: str) -> Host:
    """An IPv6 address may stand in brackets; one that holds an IPv4 address is that. Raises ValueError."""
    if text.startswith("[") and text.endswith("]"):
        address: Host = IPv6Address(text[1:-1])
    else:
        try:
            address = ip_address(text)
        except ValueError:
            return _name(text)
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise ValueError("an address with a zone is of this host only")
        return address.ipv4_mapped or address
    return address


def _name(text: str) -> str:
    name = text.lower().removesuffix(".")
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name) or _NUMBER.fullmatch(name):
        raise ValueError("no host name and no address")
    return name


def parse_port(text: str) -> int:
    """Raises ValueError."""
    if not _PORT.fullmatch(text) or not 0 < int(text) <= 65535:
        raise ValueError("no port from 1 to 65535")
    return int(text)


@lru_cache(maxsize=4096)
def parse_endpoint(text: str) -> Endpoint:
    """Exactly `host:port` or `[IPv6]:port`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if ":" in host and not host.startswith("["):
        raise ValueError("an IPv6 address needs brackets")
    return Endpoint(parse_host(host), parse_port(port))


@lru_cache(maxsize=4096)
def endpoint_of(url: str) -> Endpoint | None:
    """Where an http(s) URL leads; None if it has no such host."""
    parts = urlsplit(url)
    try:
        return Endpoint(parse_host(parts.hostname or ""), parts.port or _SCHEME_PORTS[parts.scheme])
    except (ValueError, KeyError):
        return None
