"""The few requests that discovery makes of the Kubernetes API: get, list, watch, and writes of a lease."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from gateway.discovery.kubernetes.access import Access

_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 30.0
_LONGEST_LINE_BYTES: Final = 32 << 20
"""etcd keeps objects of up to 1.5 MB."""
_MOST_WORDS: Final = 300
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""A peer that is gone without a word is noticed in half a minute, whatever a watch says or does not say."""


class ApiError(Exception):
    """The API could not be asked, or did not give what was asked for; the text is for people."""


class Unreachable(ApiError):
    """No answer, or none that can be read."""


class Refused(ApiError):
    """An answer that is an error. `retry_after_s`: when the API wants to be asked again, if it says so."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message or f"HTTP {status}")
        self.status = status
        self.retry_after_s = retry_after_s


class Status(msgspec.Struct):
    """Kubernetes' own shape of an error."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None

    def error(self, status: int, retry_after_s: float | None = None) -> Refused:
        return Refused(self.code or status, (self.message or self.reason or "")[:_MOST_WORDS], retry_after_s)


class Api:
    """One connection pool, made with the first request: in a running event loop. `close` it at the end."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._base = URL(access.server)
        self._open: aiohttp.ClientSession | None = None

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """Raises Refused or Unreachable, like the others."""
        return await self.send("GET", path, params=params)

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _ANSWER_S,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        async with self._answer(method, path, params, timeout, body) as answer:
            return await answer.read()

    async def watch(self, path: str, params: Mapping[str, str], longest_s: float) -> AsyncGenerator[bytes, None]:
        """The lines of a watch, each one JSON object, after an empty one that says that it is open. It ends when the
        API ends it.

        Unreachable: the connection broke, or the API did not end it within `longest_s`.
        """
        timeout = aiohttp.ClientTimeout(total=longest_s, sock_connect=_CONNECT_S)
        rest = bytearray()
        async with self._answer("GET", path, params, timeout) as answer:
            yield b""
            async for chunk in answer.content.iter_any():  # Lines are longer than `readline` takes.
                rest += chunk
                if b"\n" in chunk:
                    *lines, last = bytes(rest).split(b"\n")
                    rest = bytearray(last)
                    for line in lines:
                        if line.strip():
                            yield line
                elif len(rest) > _LONGEST_LINE_BYTES:
                    raise Unreachable("a watch sent a line without an end")

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()
            self._open = None

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - it is aiohttp's own
        body: Any = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session().request(
                method,
                self._base.joinpath(path.lstrip("/"), encoded=True),
                params=params,
                data=None if body is None else msgspec.json.encode(body),
                headers=self._headers(body is not None),
                timeout=timeout,
                allow_redirects=False,  # Nobody else is to see the token.
                server_hostname=self.access.server_name,
            ) as answer:
                if not 200 <= answer.status < 300:
                    raise _refused(answer.status, answer.headers.get("Retry-After"), await answer.content.read(65536))
                yield answer
        except TimeoutError:
            raise Unreachable(f"{self._base.host} gave no answer in time") from None
        except aiohttp.ClientConnectorCertificateError as exc:
            self.access.trust_anew()
            raise Unreachable(f"{self._base.host}: {exc.certificate_error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as exc:  # ValueError: a token that fits into no header.
            raise Unreachable(f"{self._base.host}: {_reason(exc)}") from None

    def _headers(self, has_body: bool) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "warmroute"}
        if has_body:
            headers["Content-Type"] = "application/json"
        token = self.access.bearer()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _session(self) -> aiohttp.ClientSession:
        if self._open is None or self._open.closed:
            connector = aiohttp.TCPConnector(limit=0, ssl=self.access.tls or True, socket_factory=_kept_alive)
            self._open = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._open


def _kept_alive(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


def _refused(status: int, retry_after: str | None, body: bytes) -> Refused:
    try:
        told = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        told = Status()
    if not told.message:
        known = {it.value: it.phrase for it in HTTPStatus}
        told.message = f"HTTP {status} {known.get(status, '')}".strip()
    told.code = status
    seconds = float(retry_after) if retry_after is not None and retry_after.isdigit() else None
    return told.error(status, seconds)


def _reason(exc: Exception) -> str:
    return str(getattr(exc, "strerror", None) or str(exc) or type(exc).__name__)
