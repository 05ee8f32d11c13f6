"""`/admin/workers`: the fleet as it is known, and workers that come, are drained and go at an operator's word.

What is added here lasts as long as this process: the durable list is the configuration's or `workers_file`.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gateway.config.load import ConfigError, read_worker
from gateway.core import Core
from gateway.debug.health import shown_worker
from gateway.discovery import Source, worker_name
from gateway.discovery.base import change
from gateway.proxy import errors
from gateway.proxy.body import read_body
from gateway.proxy.errors import ApiError, json_response
from gateway.proxy.routes import WORKERS as PATH
from gateway.proxy.server import target_of
from scorer.fleet import Worker
from scorer.types import ChangeKind, WorkerChange

_log = logging.getLogger(__name__)

_LONGEST_BODY_BYTES = 1 << 20
_OWNERS = {
    Source.STATIC: "the configuration",
    Source.FILE: "the workers file",
    Source.DNS: "DNS discovery",
    Source.KUBERNETES: "Kubernetes",
}
_HINT = "hint"


class WorkersPage:
    """Answers are JSON; errors have OpenAI's shape. `changes_list`: whether workers can be added and removed here; if
    not, only looked at and drained.
    """

    def __init__(self, core: Core, *, changes_list: bool = True) -> None:
        self._core = core
        self._changes_list = changes_list

    async def page(self, request: web.BaseRequest) -> web.Response:
        """`GET` the list, `POST` one worker."""
        if request.method in ("GET", "HEAD"):
            return self._list()
        if request.method != "POST" or not self._changes_list:
            allowed = {"GET", "POST"} if self._changes_list else {"GET"}
            raise errors.method_not_allowed(request.method, PATH, frozenset(allowed))
        return self._add(await read_body(request, _LONGEST_BODY_BYTES))

    async def below(self, request: web.BaseRequest) -> web.Response:
        """`GET` and `DELETE` /admin/workers/{name}, `POST` .../drain and .../undrain. A name may be a worker's URL."""
        path = target_of(request).partition("?")[0]
        head, _, verb = path.removeprefix(PATH + "/").rpartition("/")
        if head and verb in ("drain", "undrain"):
            _only(request, path, "POST")
            return self._set_drained(self._named(unquote(head)), verb == "drain")
        name = self._named(unquote(path.removeprefix(PATH + "/")))
        if request.method in ("GET", "HEAD"):
            return _json(self._shown(self._core.fleet.workers[name]))
        _only(request, path, "GET", *(["DELETE"] if self._changes_list else []))
        query = request.rel_url.query
        return self._remove(name, force=_flag(query.get("force")), timeout_s=_timeout_s(query.get("timeout_s")))

    def _list(self) -> web.Response:
        workers = self._core.fleet.workers
        return _json({"workers": [self._shown(workers[name]) for name in sorted(workers)]})

    def _add(self, body: bytes) -> web.Response:
        try:
            worker = read_worker(msgspec.json.decode(body))
        except msgspec.MsgspecError as exc:
            raise ApiError(400, f"The body is not JSON: {exc}.", code="invalid_json") from None
        except RecursionError:
            raise ApiError(400, "The body is nested too deep.", code="invalid_json") from None
        except ConfigError as exc:
            raise ApiError(400, str(exc).replace("\n", "; "), code="invalid_worker") from None
        name, core = worker_name(worker), self._core
        named = change(ChangeKind.ADDED, name, worker)
        if core.is_out_of_bounds(named.url or ""):
            text = f"{named.url} is link-local or of cloud metadata, which no worker is (see discovery.link_local)."
            raise ApiError(400, text, code="invalid_worker", param="url")
        if (endpoint := core.endpoint_out_of_bounds(named)) is not None:
            text = f"{endpoint} is link-local or of cloud metadata, where no engine is (see discovery.link_local)."
            raise ApiError(400, text, code="invalid_worker", param="events")
        claims = core.roster.claims(name)
        for source, claim in claims.items():
            if source is not Source.API:
                raise _conflict(f"{name} is in {_OWNERS[source]}, at {claim.url}; change it there.", "worker_exists")
            if claim.url != named.url:
                raise _conflict(f"{name} is the server at {claim.url}; remove that first.", "worker_exists")
        other = core.roster.named_at(named.url or "")
        if other is not None and other != name:
            raise _conflict(f"The server at {named.url} is known as {other}.", "worker_url_exists")
        core.take(Source.API, named)
        known = core.fleet.workers.get(name)
        if known is None:
            raise ApiError(400, f"{name} cannot be used; see the log.", code="invalid_worker")
        _log.info("%s was %s through the API: %s", name, "changed" if claims else "added", named.url)
        return _json(self._shown(known), 200 if claims else 201)

    def _set_drained(self, name: str, drained: bool) -> web.Response:
        core = self._core
        source = core.roster.source(name)
        if source is None and not core.fleet.workers[name].draining:
            raise _conflict(f"{name} was named by a request's hint, and serves no client.", "worker_not_listed")
        if source is None and not drained:
            raise _conflict(f"{name} is leaving: nothing names it any more. Add it again.", "worker_leaving")
        for each in core.roster.hold(name) if drained else core.roster.lift(name):
            core.apply(each)
        _log.info("%s was %s through the API", name, "drained" if drained else "taken up again")
        return _json(self._shown(core.fleet.workers[name]), 202 if drained else 200)

    def _remove(self, name: str, *, force: bool, timeout_s: float | None) -> web.Response:
        core = self._core
        for source in core.roster.claims(name):
            if source in (Source.FILE, Source.DNS, Source.KUBERNETES):
                raise _conflict(
                    f"{name} is in {_OWNERS[source]}, which would bring it back: take it out there, or drain it with "
                    f"POST {PATH}/{name}/drain.",
                    "worker_listed",
                )
        if core.roster.source(name) is None and not core.fleet.workers[name].draining:
            raise _conflict(f"{name} was named by a request's hint, and goes by itself.", "worker_not_listed")
        worker = core.fleet.workers[name]
        last = {**self._shown(worker), "state": "removed"}
        kind = ChangeKind.REMOVED if force else ChangeKind.DRAINING
        for source in core.roster.claims(name):
            core.take(source, WorkerChange(kind=kind, worker=name))
        if force:
            core.apply(WorkerChange(kind=ChangeKind.REMOVED, worker=name))  # It may have been leaving already.
            _log.info("%s was removed through the API", name)
            return _json(last)
        core.leaving.send_off(name, None if timeout_s is None else time.monotonic() + timeout_s)
        _log.info("%s is to go, when it is idle, through the API", name)
        return _json(self._shown(worker), 202)

    def _named(self, name: str) -> str:
        """The worker of that name, or at that URL. Raises ApiError."""
        workers = self._core.fleet.workers
        if name in workers:
            return name
        found = next((worker.name for worker in workers.values() if worker.url == name.rstrip("/")), None)
        if found is None:
            raise errors.unknown_worker([name], sorted(workers))
        return found

    def _shown(self, worker: Worker) -> dict[str, Any]:
        core = self._core
        source = core.roster.source(worker.name)
        left = None if source is None and worker.draining else _HINT
        shown = shown_worker(core, worker)
        return {
            "name": worker.name,
            "url": worker.url,
            "source": left if source is None else source.value,
            **shown,
            "handing_over": core.planner.handing_over(worker.name),
            "drained": core.roster.is_held(worker.name),
            "leaving": source is None and worker.draining,
            "weight": worker.weight,
            "labels": worker.labels,
        }


def _json(body: Any, status: int = 200) -> web.Response:
    return json_response(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n", status)


def _conflict(message: str, code: str) -> ApiError:
    return ApiError(409, message, code=code)


def _only(request: web.BaseRequest, path: str, *methods: str) -> None:
    if request.method not in methods:
        raise errors.method_not_allowed(request.method, path, frozenset(methods))


def _flag(value: str | None) -> bool:
    if value in (None, "0", "false"):
        return False
    if value in ("", "1", "true"):
        return True
    raise ApiError(400, "`force` is true or false.", param="force")


def _timeout_s(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ApiError(400, "`timeout_s` is a number of seconds.", param="timeout_s")
    return number
