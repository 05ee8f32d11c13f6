"""Which worker holds a stored response, be it known here or not.

What this gateway has seen being made it remembers. An id it does not know (it was restarted, another gateway made it)
is asked of every worker that decodes, once, on behalf of the client and with its credentials.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from urllib.parse import quote

from multidict import CIMultiDict

from gateway.proxy import errors
from gateway.proxy.errors import ApiError
from gateway.proxy.peer import Upstream, UpstreamError
from gateway.proxy.upstream import UpstreamPool
from gateway.stored import LONGEST_ID, Gone, Place, StoredResponses

PREFIX = "/v1/responses/"
_TIMEOUT_S = 2.0
_MOST_ASKED = 64
"""Workers asked for one id."""
_MOST_ASKING = 16
_UNKNOWN_S = 2.0
_MOST_UNKNOWN = 1024
OUTCOMES = ("known", "gone", "found", "not_found", "unsure")
"""Of looking ids up: remembered; remembered of a worker that is gone; found by asking; held by nobody; not all said."""
_LARGEST_ANSWER_BYTES = 64 << 10
"""Read to keep the connection; of a longer one it is closed."""
_NOT_FOR_A_GET = ("Content-Type", "Content-Encoding", "Range", "If-None-Match", "If-Modified-Since")


class _Says(Enum):
    HELD = "held"
    NOT_HELD = "not held"
    REFUSED = "refused"
    NOTHING = "nothing"


class ResponseHolders:
    """`workers()`: the names of those that may hold responses."""

    def __init__(
        self,
        stored: StoredResponses,
        upstreams: UpstreamPool,
        workers: Callable[[], Collection[str]],
        *,
        by_tenant: bool = False,
    ) -> None:
        """`by_tenant`: each is its owner's alone, so that one whose owner is not known here is nobody's."""
        self._by_tenant = by_tenant
        self._stored = stored
        self._upstreams = upstreams
        self._workers = workers
        self.lookups = dict.fromkeys(OUTCOMES, 0)
        self._asking = 0
        self._unknown: OrderedDict[str, float] = OrderedDict()
        """Ids that nobody held, and until when that is believed."""

    async def find(self, response_id: str, headers: Mapping[str, str], tenant: str | None = None) -> Place:
        """Where it is, for a tenant. Raises ApiError: 404 `response_not_found`, or 503 while that cannot be said."""
        now_s = time.monotonic()
        known = self._stored.find(response_id, now_s, tenant)
        if isinstance(known, Place):
            self.lookups["known"] += 1
            return known
        if known is None and self._by_tenant:
            self.lookups["not_found"] += 1
            raise _not_found(response_id)
        workers = self._workers()
        why: str | None = None
        if isinstance(known, Gone):
            why = f"worker {known.worker}, which held it, is gone or was restarted"
            if known.worker not in workers:
                self.lookups["gone"] += 1
                raise _not_found(response_id, why)
        # Who is back may have been away from us only, its process all the while running.
        if len(workers) == 1:
            return Place(next(iter(workers)), None)
        if not workers:
            raise errors.no_worker("none is known")
        if self._unknown.get(response_id, 0.0) > now_s or not _can_be_one(response_id):
            self.lookups["not_found"] += 1
            raise _not_found(response_id, why)
        if self._asking >= _MOST_ASKING:
            raise errors.too_many_requests(_MOST_ASKING)
        self._asking += 1
        try:
            return await self._ask(response_id, headers, sorted(workers), why, tenant)
        finally:
            self._asking -= 1

    async def _ask(
        self, response_id: str, headers: Mapping[str, str], workers: list[str], why: str | None, tenant: str | None
    ) -> Place:
        asked = workers[:_MOST_ASKED]
        tasks = {asyncio.ensure_future(self._says(worker, response_id, headers)): worker for worker in asked}
        left, said = set(tasks), {_Says.NOT_HELD} if asked == workers else {_Says.NOTHING}
        refused: str | None = None
        try:
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    said.add(task.result())
                    if task.result() is _Says.HELD:
                        self.lookups["found"] += 1
                        place = Place(tasks[task], None)
                        self._stored.remember(response_id, place, time.monotonic(), tenant)
                        return place
                    if task.result() is _Says.REFUSED:
                        refused = tasks[task]
        finally:
            for task in left:
                task.cancel()
        if refused is not None:
            return Place(refused, None)  # Whose answer will say why.
        if _Says.NOTHING in said:
            self.lookups["unsure"] += 1
            raise errors.no_worker("not all of those that may hold this response could be asked")
        self.lookups["not_found"] += 1
        self._unknown[response_id] = time.monotonic() + _UNKNOWN_S
        if len(self._unknown) > _MOST_UNKNOWN:
            self._unknown.popitem(last=False)
        raise _not_found(response_id, why)

    async def _says(self, worker: str, response_id: str, headers: Mapping[str, str]) -> _Says:
        upstream = self._upstreams.get(worker)
        if upstream is None:
            return _Says.NOTHING
        upstream.acquire()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status = await _status(upstream, PREFIX + quote(response_id, safe=""), headers)
        except (UpstreamError, OSError):
            return _Says.NOTHING
        finally:
            self._upstreams.release(upstream)
        if status == 200:
            return _Says.HELD
        if status in (401, 403):
            return _Says.REFUSED
        return _Says.NOTHING if status >= 500 and status != 501 else _Says.NOT_HELD


async def _status(upstream: Upstream, target: str, headers: Mapping[str, str]) -> int:
    mine: CIMultiDict[str] = CIMultiDict(headers)
    for name in _NOT_FOR_A_GET:
        mine.popall(name, None)
    async with await upstream.send("GET", target, mine, b"") as response:
        await response.read(_LARGEST_ANSWER_BYTES)
        return response.status


def _can_be_one(response_id: str) -> bool:
    """Not what came as bytes that are no UTF-8, or as half a surrogate pair: no engine makes such."""
    try:
        response_id.encode()
    except UnicodeEncodeError:
        return False
    return len(response_id) <= LONGEST_ID


def _not_found(response_id: str, why: str | None = None) -> ApiError:
    response_id = response_id.encode("utf-8", "replace").decode()
    shown = response_id if len(response_id) <= LONGEST_ID else response_id[:LONGEST_ID] + "..."
    text = f"Response with id '{shown}' not found" + ("." if why is None else f": {why}.")
    return ApiError(404, text, code="response_not_found", param="response_id")
