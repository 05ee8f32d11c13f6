"""The ports where a NIXL side channel listens. Who connects is let go at once: handshakes go within the process."""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Final

_ports: Final = itertools.count(5600)  # vLLM's default, then one for each rank of a process
_ATTEMPTS: Final = 200


class SideChannel:
    """`ports`: one for each rank, known from the start."""

    def __init__(self, host: str, port: int, ranks: int) -> None:
        """`port` 0: free ones, which may still change until the first `listen`."""
        self.host = host
        self.ports: Sequence[int] = [port + rank if port else next(_ports) for rank in range(ranks)]
        self._fixed = bool(port)
        self._servers: list[asyncio.Server] = []

    async def listen(self) -> None:
        """At an address that is not ours, or at ports that were given and are taken, nobody does."""
        for _ in range(_ATTEMPTS):
            try:
                for port in self.ports:
                    self._servers.append(await asyncio.start_server(_let_go, self.host, port))
            except OSError:
                self.close()
                if self._fixed:
                    return
                self.ports = [next(_ports) for _ in self.ports]
            else:
                break
        self._fixed = True

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers = []


async def _let_go(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
