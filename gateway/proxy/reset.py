"""`POST /admin/index/reset`: what we know of workers' caches is forgotten, for those of a worker, of a model, or all.

For new weights: the engine's cache is emptied first, then this is called; or this with `engine=true`, which does both
in that order. What an engine published before is not brought back by a replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from gateway.core import Core
from gateway.proxy import errors
from gateway.proxy.admin import EngineControls
from gateway.proxy.body import read_body
from gateway.proxy.errors import ApiError, json_response
from gateway.proxy.routes import CONTROLS, RESET

_LONGEST_BODY_BYTES = 1 << 20
_ENGINE_RESET = CONTROLS["/reset_prefix_cache"]
_NOT_THERE = "the engine has no /reset_prefix_cache; it has with VLLM_SERVER_DEV_MODE=1"


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As parameters or as a JSON body: which workers (names), which models or adapters, or `all`."""

    worker: str | list[str] = []
    model: str | list[str] = []
    all: bool = False
    engine: bool = False


class IndexReset:
    def __init__(self, core: Core, controls: EngineControls) -> None:
        self._core = core
        self._controls = controls

    async def page(self, request: web.BaseRequest) -> web.Response:
        """`{"workers": {name: {"blocks", "assumed_blocks", "engine"?}}}`; 502 if an engine was asked and has not said
        yes, after everything was forgotten here all the same.
        """
        if request.method != "POST":
            raise errors.method_not_allowed(request.method, RESET, frozenset({"POST"}))
        asked = await _read(request)
        names = self._workers(asked)
        results: dict[str, dict[str, Any]] = {name: {} for name in names}
        said = await asyncio.gather(*(self._reset_engine(name) for name in names)) if asked.engine else []
        for name, answer in zip(names, said, strict=False):
            results[name]["engine"] = answer
        for name in names:
            results[name] = {**self._known_blocks(name), **results[name]}
            self._core.cache_cleared(name)
        if not set(self._core.fleet.workers) - set(names):
            self._core.prefixes.clear()
        failed = any(answer["status"] is None or answer["status"] >= 400 for answer in said)
        body = msgspec.json.format(msgspec.json.encode({"workers": results}), indent=2) + b"\n"
        return json_response(body, 502 if failed else 200)

    def _workers(self, asked: _Asked) -> list[str]:
        """Raises ApiError."""
        workers = self._core.fleet.workers
        names, models = _several(asked.worker), _several(asked.model)
        if not names and not models and not asked.all:
            raise ApiError(400, "Say of what: worker=NAME, model=NAME or all=true.", code="invalid_reset")
        unknown = sorted(set(names) - set(workers))
        if unknown:
            raise errors.unknown_worker(unknown, sorted(workers))
        wanted = set(workers) if asked.all else set(names)
        for model in models:
            serving = {worker.name for worker in workers.values() if worker.serves(model)}
            if not serving:
                raise errors.model_not_found(model)
            wanted |= serving
        return sorted(wanted)

    def _known_blocks(self, worker: str) -> dict[str, int]:
        """What it is thought to hold: as its events say, and of what it was sent."""
        core = self._core
        return {"blocks": core.index.blocks(worker), "assumed_blocks": core.planner.holdings.assumed_blocks(worker)}

    async def _reset_engine(self, worker: str) -> dict[str, Any]:
        answer = await self._controls.ask(worker, _ENGINE_RESET, _ENGINE_RESET.path, CIMultiDict(), b"")
        return {**answer, "body": _NOT_THERE} if answer["status"] in (404, 405) else answer


async def _read(request: web.BaseRequest) -> _Asked:
    body = await read_body(request, _LONGEST_BODY_BYTES)
    query = request.rel_url.query
    try:
        if not body:
            given: dict[str, Any] = {key: query.getall(key) for key in query}
            for flag in {"all", "engine"} & set(given):
                given[flag] = given[flag][-1] or "true"
            return msgspec.convert(given, _Asked, strict=False)
        if query:
            raise ApiError(400, "Give parameters or a body, not both.", code="invalid_reset")
        return msgspec.json.decode(body, type=_Asked)
    except msgspec.MsgspecError as exc:
        raise ApiError(400, f"{exc}.", code="invalid_reset") from None


def _several(value: str | Sequence[str]) -> Iterable[str]:
    return [value] if isinstance(value, str) else value
