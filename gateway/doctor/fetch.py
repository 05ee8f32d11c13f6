"""HTTP to one worker, with the ways it can fail told apart."""

from __future__ import annotations

import asyncio
import email.utils
import os
import ssl
import time
from collections.abc import Callable, Mapping

import aiohttp
import msgspec

_MAX_BODY_BYTES = 16 << 20


class Answer(msgspec.Struct, frozen=True):
    """What came back. `date_s` is the server's clock (Unix seconds, whole) from its Date header; `sent_s` and `came_s`
    are ours, when it was asked and when its headers were here.
    """

    status: int
    body: bytes
    date_s: float | None = None
    sent_s: float = 0.0
    came_s: float = 0.0


class Fault(msgspec.Struct, frozen=True):
    """No answer; `code` is a finding's code."""

    code: str
    sentence: str


class Http:
    """Requests to `url`, each within `timeout_s`. `headers` may hold a secret and are never shown."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        self.url = url
        self.session = session
        self.timeout_s = timeout_s
        self.headers = dict(headers or {})
        self.on_answer: Callable[[Answer], None] = lambda answer: None

    async def get(self, path: str) -> Answer | Fault:
        return await self._ask("GET", path, None, {})

    async def post(
        self, path: str, body: object, *, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Answer | Fault:
        sent = {"Content-Type": "application/json", **(headers or {})}
        return await self._ask("POST", path, msgspec.json.encode(body), sent, timeout_s)

    async def _ask(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> Answer | Fault:
        allowed_s = timeout_s or self.timeout_s
        sent_s = time.time()
        try:
            async with (
                asyncio.timeout(allowed_s),
                self.session.request(
                    method, self.url + path, data=data, headers={**self.headers, **headers}, allow_redirects=False
                ) as response,
            ):
                came_s = time.time()
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _MAX_BODY_BYTES:
                        return Fault("not-vllm", f"{path} sends more than {_MAX_BODY_BYTES} bytes")
                date_s = _unix_s(response.headers.get("Date"))
                answer = Answer(response.status, bytes(body), date_s, sent_s, came_s)
                self.on_answer(answer)
                return answer
        except TimeoutError:
            return Fault("timeout", f"{path} gave no answer within {allowed_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return classify(path, error)


def classify(path: str, error: Exception) -> Fault:
    """Which finding an exception of the HTTP client stands for."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return Fault("tls-failed", f"its certificate is not trusted ({error.certificate_error})")
    if isinstance(error, aiohttp.ClientConnectorSSLError | ssl.SSLError):
        return Fault("tls-failed", "the TLS handshake failed; the port seems to speak plain HTTP")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Fault("unreachable", f"the host name {error.host} cannot be resolved")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Fault("unreachable", f"cannot connect to {error.host}:{error.port} ({os_reason(error.os_error)})")
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return Fault("not-http", f"{path}: something listens, but its answer is not HTTP ({type(error).__name__})")
    if isinstance(error, aiohttp.ClientOSError | OSError):
        return Fault("not-http", f"{path}: the connection was cut before an answer ({type(error).__name__})")
    return Fault("unreachable", f"{path}: {type(error).__name__}")


def os_reason(error: OSError) -> str:
    """What the system says; asyncio puts addresses in the place of its text."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)


def _unix_s(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
