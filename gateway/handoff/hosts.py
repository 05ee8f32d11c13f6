"""Under which addresses a worker's NIXL side channel may be found: those of its HTTP server, or those configured."""

from __future__ import annotations

import asyncio
import socket
import time
from urllib.parse import urlsplit

_KEPT_S = 60.0
_FAILED_KEPT_S = 5.0
_MOST_KEPT = 1024


class Hosts:
    """Names and addresses of hosts, looked up off the loop and kept for a minute."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, frozenset[str]]] = {}

    async def of(self, host: str) -> frozenset[str]:
        """`host` itself and what it resolves to; what cannot be resolved is only itself."""
        now_s = time.monotonic()
        known = self._known.get(host)
        if known is not None and known[0] > now_s:
            return known[1]
        names, kept_s = {host}, _KEPT_S
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            names |= {str(address[0]) for *_, address in found}
        except (OSError, UnicodeError):
            kept_s = _FAILED_KEPT_S
        if len(self._known) >= _MOST_KEPT:
            del self._known[next(iter(self._known))]
        self._known[host] = now_s + kept_s, frozenset(names)
        return self._known[host][1]

    async def side_channel(self, url: str, nixl: str | None) -> tuple[frozenset[str], int | None]:
        """(allowed hosts, port of rank 0 or None for any) of the worker at `url`; `nixl` is `host` or `host:port`."""
        if nixl is None:
            return await self.of(urlsplit(url).hostname or ""), None
        parts = urlsplit(f"//{nixl}")
        return await self.of(parts.hostname or nixl), parts.port
