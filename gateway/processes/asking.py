"""What the supervisor asks its processes, over their admin sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp import web

from gateway.processes import families
from gateway.processes.assignment import BOARD_SOCKET
from gateway.processes.board_client import BoardClient
from gateway.processes.internal import METRICS
from gateway.processes.process import Process
from gateway.proxy.errors import ApiError

_log = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_LONGEST_S = 150.0
"""Beyond what engine controls may take."""
# Who asks is checked where it comes in, the site of a browser's page too.
_OF_ONE_HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade", "te", "origin")
)
_ORIGIN = "http://process"
PROCESS = "x-warmroute-process"
"""Whose answer it is."""


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    headers: Mapping[str, str]

    def response(self, process: Process) -> web.Response:
        kept = {name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_HOP}
        return web.Response(status=self.status, body=self.body, headers={**kept, PROCESS: process.label})


class Asking:
    """In a running event loop; `close` at the end."""

    def __init__(self) -> None:
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def ask(
        self,
        process: Process,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _LONGEST_S,
    ) -> Answer:
        """Raises ApiError (502) where it does not answer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session(process).request(
                method,
                _ORIGIN + target,
                data=body,
                headers=_sent(headers or {}),
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                return Answer(answer.status, await answer.read(), dict(answer.headers))
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise _silent(process, exc) from None

    async def stream(self, process: Process, request: web.BaseRequest, target: str) -> web.StreamResponse:
        """An answer as it comes, until either side ends it. Raises ApiError (502) where there is none."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S)
        try:
            async with self._session(process).get(
                _ORIGIN + target, headers=_sent(request.headers), timeout=timeout, allow_redirects=False
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_ONE_HOP}
                response = web.StreamResponse(status=answer.status, headers={**kept, PROCESS: process.label})
                response.force_close()
                await response.prepare(request)
                try:
                    async for data in answer.content.iter_any():
                        await response.write(data)
                    await response.write_eof()
                except (aiohttp.ClientError, ConnectionError):
                    pass  # One of the two has left; the other sees the end.
                return response
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise _silent(process, exc) from None

    @asynccontextmanager
    async def reading(self, process: Process, path: str) -> AsyncIterator[aiohttp.StreamReader]:
        """What it has to say there, as long as it says something. Raises ApiError where it does not."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S)
        try:
            async with self._session(process).get(_ORIGIN + path, timeout=timeout) as answer:
                if answer.status != 200:
                    raise _silent(process, ConnectionError())
                yield answer.content
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise _silent(process, exc) from None

    async def metrics(self, process: Process) -> list[families.Family] | None:
        """None where it does not tell any."""
        try:
            answer = await self.ask(process, "GET", METRICS, timeout_s=_TIMEOUT_S)
            return await asyncio.to_thread(families.decode, answer.body) if answer.status == 200 else None
        except (ApiError, msgspec.MsgspecError):
            return None

    async def has_board(self, process: Process) -> bool:
        """Whether a hub's board answers."""
        board = BoardClient(process.assignment.own(BOARD_SOCKET), _TIMEOUT_S)
        try:
            await board.ask([["mget", []]])
        except (OSError, TimeoutError):
            return False
        finally:
            await board.aclose()
        return True

    async def forget_all_but(self, processes: Iterable[Process]) -> None:
        there = {each.life for each in processes}
        for life in [life for life in self._sessions if life not in there]:
            await self._sessions.pop(life).close()

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    def _session(self, process: Process) -> aiohttp.ClientSession:
        session = self._sessions.get(process.life)
        if session is None:
            connector = aiohttp.UnixConnector(process.assignment.admin_path, limit=0)
            session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
            self._sessions[process.life] = session
        return session


def _sent(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OF_ONE_HOP}


def _silent(process: Process, exc: BaseException) -> ApiError:
    text = f"The gateway's {process.assignment.name} does not answer ({type(exc).__name__}). Ask again."
    return ApiError(502, text, code="process_unreachable", retry_after_s=1.0)
