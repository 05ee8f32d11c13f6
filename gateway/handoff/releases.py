"""Giving back what a prefill worker holds for a request that is over before a decode worker had it.

vLLM has no call for that. But a decode engine that refuses a request tells the prefill engine named in it to let go,
and refusing costs it nothing: one token of prompt, and more output asked for than any context has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from multidict import CIMultiDict

from gateway.debug.handoffs import HandoffMetrics
from gateway.handoff.stranded import Stranded
from gateway.proxy.headers import OUTCOME_HEADER
from gateway.proxy.peer import Upstream, UpstreamError
from gateway.proxy.upstream import UpstreamPool

_log = logging.getLogger(__name__)
_PATH = "/v1/completions"
_MORE_THAN_ANY_CONTEXT = 1 << 30
_TIMEOUT_S = 5.0
_MOST_AT_ONCE = 1024
_AT_ENGINE = 32


class Releases:
    """Releases run in the background; until one has worked, its tokens count as stranded.

    `decoders` names decode workers that may be asked, when the planned one cannot.
    """

    def __init__(self, upstreams: UpstreamPool, metrics: HandoffMetrics, decoders: Callable[[], Iterable[str]]) -> None:
        self.stranded = Stranded()
        self._upstreams = upstreams
        self._metrics = metrics
        self._decoders = decoders
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(_AT_ENGINE)

    def release(
        self,
        params: Mapping[str, Any],
        *,
        model: str,
        prefill: str,
        decode: str,
        n_tokens: int,
        lease_ends_s: float,
        authorization: str | None,
    ) -> None:
        number = self.stranded.add(prefill, n_tokens, lease_ends_s)
        if len(self._tasks) >= _MOST_AT_ONCE:
            self._metrics.released("dropped")
            return
        body = msgspec.json.encode(
            {
                "model": model,
                "prompt": [0],
                "max_tokens": _MORE_THAN_ANY_CONTEXT,
                "stream": False,
                "kv_transfer_params": params,
            }
        )
        headers: CIMultiDict[str] = CIMultiDict({"Content-Type": "application/json"})
        if authorization is not None:
            headers["Authorization"] = authorization
        task = asyncio.get_running_loop().create_task(self._release(number, prefill, decode, headers, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let those under way end, for a little while."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _release(self, number: int, prefill: str, decode: str, headers: CIMultiDict[str], body: bytes) -> None:
        others = [name for name in self._decoders() if name not in (prefill, decode)]
        for name in [decode, *others[:1]]:
            upstream = self._upstreams.get(name)
            if upstream is not None and await self._ask(upstream, headers, body):
                self.stranded.release(number)
                self._metrics.released("ok")
                return
        self._metrics.released("failed")
        _log.warning("what was prefilled for %s could not be given back; its lease will end it", decode)

    async def _ask(self, upstream: Upstream, headers: CIMultiDict[str], body: bytes) -> bool:
        """Whether the engine refused, as it must; one behind a face of ours has not had the params."""
        upstream.acquire()
        try:
            async with self._turns, asyncio.timeout(_TIMEOUT_S):
                response = await upstream.send("POST", _PATH, headers, body)
                try:
                    await response.read()
                finally:
                    response.close()
                return response.status in (400, 422) and response.header(OUTCOME_HEADER) is None
        except (UpstreamError, OSError):
            return False
        finally:
            self._upstreams.release(upstream)
