"""Addresses that are nobody's worker: link-local ones and a few others, where clouds hand out credentials.

Whoever can name a worker (a hint header, `/admin/workers`, DNS, a pod's status) could else have us fetch them.
"""

from __future__ import annotations

import socket
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
_NAT64 = ip_network("64:ff9b::/96")


def is_metadata(address: str | IPv4Address | IPv6Address) -> bool:
    """Of an address; a name is none."""
    if isinstance(address, str):
        try:
            address = _read(address.partition("%")[0])
        except (OSError, ValueError):
            return False
    if isinstance(address, IPv6Address):
        address = _within(address)
    return any(address in network for network in _NEVER)


def _read(text: str) -> IPv4Address | IPv6Address:
    """As the system reads it where it connects: 2852039166 and 0xa9.254.43518, too. Raises OSError or ValueError."""
    return ip_address(text) if ":" in text else IPv4Address(socket.inet_aton(text.rstrip(".")))


def leads_to_metadata(url: str) -> bool:
    """Of a URL whose host is an address; of what is no URL, no."""
    try:
        return is_metadata(urlsplit(url).hostname or "")
    except ValueError:
        return False


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


def _within(address: IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 one stands for."""
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address in _NAT64:
        inner = IPv4Address(int(address) & 0xFFFFFFFF)
    return inner or address
