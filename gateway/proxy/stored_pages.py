"""GET /v1/responses/{id} (streamed, too) and POST /v1/responses/{id}/cancel: by the worker that holds the response."""

from __future__ import annotations

from functools import partial
from urllib.parse import unquote

from aiohttp import web
from multidict import CIMultiDict

from gateway.proxy import errors
from gateway.proxy.holders import PREFIX, ResponseHolders
from gateway.proxy.routes import Route
from gateway.proxy.server import DataPlane, target_of

_CANCEL = "/cancel"
_READ = Route(frozenset({"GET", "OPTIONS"}))
_CHANGE = Route(frozenset({"POST", "OPTIONS"}))


class StoredPages:
    def __init__(self, plane: DataPlane, holders: ResponseHolders) -> None:
        self._plane = plane
        self._holders = holders

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        target = target_of(request)
        name = target.partition("?")[0].removeprefix(PREFIX)
        route = _CHANGE if name.endswith(_CANCEL) else _READ
        name = unquote(name.removesuffix(_CANCEL), errors="surrogateescape")
        if not name or "/" in name:
            raise errors.unknown_url(request.method, target.partition("?")[0])
        holder = partial(self._holder, name)
        return await self._plane.exchange(request, route, target, holder)

    async def _holder(self, response_id: str, headers: CIMultiDict[str], tenant: str | None) -> str:
        place = await self._holders.find(response_id, headers, tenant)
        if self._plane.parts.background is not None:
            self._plane.parts.background.touched(response_id)
        return place.worker
