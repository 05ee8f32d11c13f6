"""Addresses that are nobody's worker: link-local ones and a few others, where clouds hand out credentials.

Whoever can name a worker (a hint header, `/admin/workers`, DNS, a pod's status) could else have us fetch them.
"""

from __future__ import annotations

import os
import socket
import unicodedata
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

_NEVER = tuple(
    map(
        ip_network,
        (
            "169.254.0.0/16",
            "fe80::/10",
            "fd00:ec2::254/128",  # AWS
            "fd20:ce::254/128",  # Google
            "100.100.100.200/32",  # Alibaba
            "168.63.129.16/32",  # Azure
        ),
    )
)
_NOBODYS = "link-local and metadata addresses are nobody's engine (discovery.link_local allows them)"
_LOW_32_BITS = (1 << 32) - 1
_ENDS_IN_IPV4 = tuple(
    map(
        ip_network,
        (
            "::/96",  # IPv4-compatible, of long ago
            "::ffff:0:0:0/96",  # translated (SIIT)
            "64:ff9b::/96",  # NAT64
        ),
    )
)
_LOCAL_NAT64 = ip_network("64:ff9b:1::/48")
"""RFC 8215. How long the prefix of a translator is, and so where the IPv4 address stands (RFC 6052), is its network's
affair.
"""
_ISATAP = (0x00005EFE, 0x02005EFE)
"""The third quarter of such an address; the last is the IPv4 address."""


def is_metadata(address: str | IPv4Address | IPv6Address) -> bool:
    """Of an address; a name is none."""
    if isinstance(address, str):
        try:
            address = _read(address.partition("%")[0])
        except (OSError, ValueError):
            return False
    if isinstance(address, IPv6Address) and any(map(is_metadata, _within(address))):
        return True
    return any(address in network for network in _NEVER)


def _read(text: str) -> IPv4Address | IPv6Address:
    """As it is read where it connects: 2852039166 and 0xa9.254.43518, too, as the system does, and digits and dots of
    other widths or in circles, as IDNA does. Raises OSError or ValueError.
    """
    text = unicodedata.normalize("NFKC", text).replace("\N{IDEOGRAPHIC FULL STOP}", ".")
    return ip_address(text) if ":" in text else IPv4Address(socket.inet_aton(text.rstrip(".")))


def leads_to_metadata(url: str) -> bool:
    """Of a URL whose host is an address; of what is no URL, no."""
    try:
        return is_metadata(urlsplit(url).hostname or "")
    except ValueError:
        return False


def endpoint_leads_to_metadata(endpoint: str) -> bool:
    """Of a ZeroMQ endpoint that is to be connected to, `tcp://[source;]host:port`."""
    if not endpoint.startswith("tcp://"):
        return False
    host, _, _ = endpoint.removeprefix("tcp://").rpartition(";")[2].rpartition(":")
    return is_metadata(host.strip("[]"))


def check_endpoint(endpoint: str) -> None:
    """Raises OSError where nobody's engine is (see above)."""
    if endpoint_leads_to_metadata(endpoint):
        raise OSError(_NOBODYS)


def check_connected(fd: int) -> None:
    """Of a connection that is there: where it leads. Raises OSError where nobody's engine is."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            peer = connection.getpeername()
    except OSError:
        return  # It is gone already.
    if isinstance(peer, tuple) and is_metadata(str(peer[0])):
        raise OSError(_NOBODYS)


def usable(infos: list[Any]) -> list[Any]:
    """Those that `getaddrinfo` found and that may be connected to. Raises OSError when none is left."""
    kept = [info for info in infos if not is_metadata(str(info[4][0]))]
    if infos and not kept:
        raise OSError("its name leads to link-local or metadata addresses only (discovery.link_local allows them)")
    return kept


class GuardedResolver(AbstractResolver):
    """aiohttp's, without these addresses. Create it inside a running event loop."""

    def __init__(self) -> None:
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        kept = [each for each in found if not is_metadata(each["host"])]
        if found and not kept:
            raise OSError(f"{host} leads to link-local or metadata addresses only")
        return kept

    async def close(self) -> None:
        await self._inner.close()


def resolver(link_local: bool) -> AbstractResolver | None:
    """For a connector of aiohttp; None: its own."""
    return None if link_local else GuardedResolver()


def _within(address: IPv6Address) -> Iterator[IPv4Address]:
    """IPv4 addresses that an IPv6 one may stand for, on its way or at its end."""
    number = int(address)
    for inner in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())):
        if inner is not None:
            yield inner
    if any(address in network for network in _ENDS_IN_IPV4) or number >> 32 & _LOW_32_BITS in _ISATAP:
        yield IPv4Address(number & _LOW_32_BITS)
    if address in _LOCAL_NAT64:
        yield IPv4Address(number & _LOW_32_BITS)
        rest = number & ((1 << 80) - 1)  # Past the 48 bits; bits 64 to 71 of the whole are left out of the address.
        joined = (rest >> 64) << 56 | rest & ((1 << 56) - 1)
        for bits in (40, 32, 24):  # Behind it, of prefixes of 48, 56 and 64 bits.
            yield IPv4Address(joined >> bits & _LOW_32_BITS)
