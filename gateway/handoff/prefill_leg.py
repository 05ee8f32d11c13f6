"""One request to one prefill worker, and everything its answer can be but a good one."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from multidict import CIMultiDict

from gateway.engine.health import End, Ticket
from gateway.handoff.shared import Shared
from gateway.proxy.headers import RawHeaders, response_headers
from gateway.proxy.incoming import Reply
from gateway.proxy.peer import Broken, Disconnected, NoConnection, Upstream, UpstreamError
from gateway.tracing.types import Leg
from scorer.types import PdReason

_LONGEST_ANSWER_BYTES = 64 << 20
_WORDS = {End.CONNECT: "connect", End.TIMEOUT: "timeout", End.RESET: "disconnected"}


class RefusedByPrefill(Exception):
    """The prefill worker answered with a 4xx: the request is not right, and this is the client's answer."""

    def __init__(self, status: int, headers: RawHeaders, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self._headers = headers
        self._body = body

    def reply(self) -> Reply:
        headers = response_headers(self._headers)
        headers.popall("Content-Length", None)
        return Reply(self.status, headers, self._body)


class LegFailed(Exception):
    """No offer came of it. `everywhere`: nor would one from another prefill worker; `pair`: the two do not fit."""

    def __init__(self, why: PdReason, detail: str, *, everywhere: bool = False, pair: bool = False) -> None:
        super().__init__(detail)
        self.why = why
        self.everywhere = everywhere
        self.pair = pair


class Sending(Protocol):
    """The request as the proxy has it."""

    @property
    def method(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def headers(self) -> CIMultiDict[str]: ...
    @property
    def raw(self) -> bytes: ...


class PrefillLeg:
    """`quiet_s`: for so long its silence is expected."""

    def __init__(
        self,
        shared: Shared,
        name: str,
        upstream: Upstream,
        sending: Sending,
        *,
        quiet_s: float,
        prompt_tokens: int,
        leg: Leg | None = None,
    ) -> None:
        self._leg = leg
        self._shared = shared
        self._name = name
        self._upstream = upstream
        self._sending = sending
        self._quiet_s = quiet_s
        self._prompt_tokens = prompt_tokens
        self._ticket: Ticket | None = None

    @property
    def is_probe(self) -> bool:
        """Whether it shows if the worker is well again: nobody else is sent there meanwhile."""
        return self._ticket is not None and self._ticket.is_probe

    async def answer(self, headers: CIMultiDict[str], body: bytes) -> tuple[float, bytes]:
        """(when it began to answer, the answer). Raises LegFailed or RefusedByPrefill."""
        health = self._shared.health
        ticket = self._ticket = health.request_started(self._name, time.monotonic(), self._quiet_s)
        end = End.CANCELLED
        try:
            if self._leg is not None:
                headers = self._leg.headers
            async with asyncio.timeout(self._shared.settings.prefill_timeout_s):
                status, raw_headers, answered_s, data = await self._post(headers, body)
            if self._leg is not None:
                self._leg.answered(status)
                self._leg.end()
            end = End.OK if status < 400 else End.SERVER_ERROR if status >= 500 else End.CLIENT_ERROR
        except NoConnection as exc:
            end = End.CONNECT
            raise LegFailed(PdReason.PREFILL_FAILED, "it cannot be reached") from exc
        except TimeoutError as exc:
            end = End.TIMEOUT
            raise LegFailed(PdReason.PREFILL_TIMEOUT, "it did not answer in time") from exc
        except (UpstreamError, OSError) as exc:
            end = End.RESET
            raise LegFailed(PdReason.PREFILL_FAILED, "its answer broke off") from exc
        finally:
            health.request_ended(ticket, end, time.monotonic())
            if self._leg is not None:
                self._leg.failed(_WORDS.get(end, "cancelled"))  # Nothing, if it has answered.
        if 400 <= status < 500:
            raise RefusedByPrefill(status, raw_headers, data)
        if not 200 <= status < 300:
            raise LegFailed(PdReason.PREFILL_FAILED, f"it answered with status {status}")
        return answered_s, data

    async def _post(self, headers: CIMultiDict[str], body: bytes) -> tuple[int, RawHeaders, float, bytes]:
        """Once more on a new connection if a pooled one was closed under it: nothing is lost by computing twice."""
        try:
            return await self._once(headers, body, fresh=False)
        except Disconnected:
            return await self._once(headers, body, fresh=True)

    async def _once(
        self, headers: CIMultiDict[str], body: bytes, *, fresh: bool
    ) -> tuple[int, RawHeaders, float, bytes]:
        upstream = self._upstream
        began_s = time.monotonic()
        upstream.acquire()
        try:
            response = await upstream.send(self._sending.method, self._sending.target, headers, body, fresh=fresh)
            answered_s = time.monotonic()
            delay_s = self._shared.clock.delay_s(self._name, response.header("Date"))
            answered_s = max(began_s, answered_s - delay_s)
            try:
                data = await response.read(_LONGEST_ANSWER_BYTES)
                if data is None:
                    raise Broken("the prefill answer is too long")
                return response.status, response.raw_headers, answered_s, data
            except (UpstreamError, OSError):
                if response.status < 300:
                    self.strand(answered_s)
                raise
            finally:
                response.close()  # Nothing, when it was read to the end.
        finally:
            self._shared.upstreams.release(upstream)

    def strand(self, answered_s: float) -> None:
        """It has done its work, and what it holds only an answer that could be read would have told."""
        until_s = answered_s + self._shared.lease_s(self._name)
        self._shared.releases.stranded.add(self._name, self._prompt_tokens, until_s)
