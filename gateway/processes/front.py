"""The one admin face of a gateway's processes: what is asked of the gateway is asked of one of them, of all, or
answered here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from gateway.debug.stream import PATH as STREAM
from gateway.logs import PATH as LOG_LEVEL
from gateway.processes import families
from gateway.processes.asking import Asking
from gateway.processes.assignment import BOARD_SOCKET
from gateway.processes.changes import Change, Changes, is_for_all
from gateway.processes.crew import Crew, Place
from gateway.processes.internal import NOTICE, Notice
from gateway.processes.merge import labelled
from gateway.processes.process import Process
from gateway.processes.recording import Recording
from gateway.proxy import errors
from gateway.proxy.body import read_body
from gateway.proxy.errors import SERVER_NAME, ApiError, json_response
from gateway.proxy.routes import CONTROLS, RESET
from gateway.proxy.server import Page, target_of
from gateway.record.recorder import PATH as RECORD

_log = logging.getLogger(__name__)
RESTART = "/admin/restart"
PROCESSES = "/debug/processes"
LOST = "process_lost"
_WHICH = "process"
_LONGEST_BODY_BYTES = 64 << 20
_READYZ_S = 5.0
SILENT_S = 30.0
"""A process that says nothing for so long is stuck, or was stopped."""
START_S = 60.0
"""And so is one that has not started by then."""
_STATES = ("starting", "serving", "draining")
_GET = ("GET", "HEAD")


class Front:
    """`restart` is called when all are to be replaced; it returns at once."""

    def __init__(
        self, crew: Crew, asking: Asking, restart: Callable[[], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._crew = crew
        self._asking = asking
        self._restart = restart
        self.recording = Recording(crew, asking)
        self._changes = Changes()
        self._one_by_one = asyncio.Lock()
        self.sockets_lost = False
        """Whether processes cannot be asked, as somebody has removed their sockets."""
        self._polling = asyncio.Lock()
        self._heard_s: dict[str, float] = {}

    def pages(self) -> dict[str, Page]:
        return {
            "/metrics": self.metrics,
            "/livez": _livez,
            "/readyz": self.readyz,
            RESTART: self._restart_page,
            PROCESSES: self._processes,
            RECORD: self.recording.page,
            STREAM: self._stream,
        }

    # ---- answered here -----------------------------------------------------------------------------------------------

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        await self.poll()
        told = [self._with_lost(each) for each in self._crew.totals.told()]
        text = await asyncio.to_thread(generate_latest, _Registry([*told, *self._own()]))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST, "Server": SERVER_NAME})

    async def poll(self) -> None:
        """Take in what all count now."""
        async with self._polling:
            processes = [each for each in self._crew.alive if each.started.is_set()]
            found = await asyncio.gather(*(self._said_by(each) for each in processes))
            now_s = self._now()
            for process in self._crew.alive:
                if not process.started.is_set() and now_s - process.began_s > START_S:
                    _log.error("%s has not started within %d s and is killed", process.assignment.name, START_S)
                    process.kill()
            for process, them in zip(processes, found, strict=True):
                if process.gone.is_set():
                    continue
                if them is not None:
                    self._crew.totals.heard(process.life, them)
                    self._heard_s[process.life] = now_s
                elif now_s - self._heard_s.setdefault(process.life, now_s) > SILENT_S and self._can_be_asked(process):
                    _log.error("%s has said nothing for %d s and is killed", process.assignment.name, SILENT_S)
                    process.kill()
            self._heard_s = {each.life: self._heard_s[each.life] for each in processes if each.life in self._heard_s}
            await self._asking.forget_all_but(processes)

    def _can_be_asked(self, process: Process) -> bool:
        """Its silence is its own: nobody has removed its socket."""
        it = process.assignment
        return os.path.exists(it.admin_path if self._crew.answers(process) else it.own(BOARD_SOCKET))

    async def _said_by(self, process: Process) -> list[families.Family] | None:
        """None: nothing."""
        if self._crew.answers(process):
            return await self._asking.metrics(process)
        return [] if await self._asking.has_board(process) else None

    def _lost(self) -> list[Place]:
        """Places whose process does not do its work."""
        return [each for each in self._crew.places if each.process is None or each.process.state != "serving"]

    def _with_lost(self, family: families.Family) -> families.Family:
        """The one degradation that no process can tell."""
        if family.name != "warmroute_degraded" or not (self._lost() or self.sockets_lost):
            return family
        about = (("what", LOST),)
        samples = [each for each in family.samples if each.labels != about]
        return msgspec.structs.replace(family, samples=[*samples, families.Sample(family.name, about, 1.0)])

    def _own(self) -> list[families.Family]:
        states = dict.fromkeys(_STATES, 0.0)
        for process in self._crew.alive:
            if process.assignment.kind == "data" and process.state in states:
                states[process.state] += 1
        ends = {**dict.fromkeys(("ended", "succeeded", "unfit"), 0.0), **self._crew.ends}
        up = {
            "hub" if place.kind == "hub" else str(place.number): float(
                place.process is not None and place.process.state == "serving"
            )
            for place in self._crew.places
        }
        return [
            labelled("warmroute_processes", "Data planes, by state.", "state", states),
            labelled("warmroute_process_up", "Whether the process at this place does its work.", "process", up),
            labelled(
                "warmroute_process_ends",
                "Processes that are gone: ended by themselves or killed, succeeded by others, or unfit to succeed.",
                "why",
                ends,
                "counter",
            ),
        ]

    async def readyz(self, request: web.BaseRequest) -> web.Response:
        """As one process has it: ready if one is. `?verbose` has what degrades any of them."""
        crew, target = self._crew, request.rel_url.raw_path_qs
        processes = [each for each in crew.alive if each.assignment.kind == "data" and each.state == "serving"]
        answers = await asyncio.gather(
            *(self._asking.ask(each, "GET", target, timeout_s=_READYZ_S) for each in processes), return_exceptions=True
        )
        bodies: dict[str, dict[str, Any]] = {}
        for process, answer in zip(processes, answers, strict=True):
            if not isinstance(answer, BaseException):
                bodies[process.label] = msgspec.json.decode(answer.body)
        ready = sorted(label for label, body in bodies.items() if body.get("ready"))
        body: dict[str, Any] = {
            "ready": bool(ready) and not crew.stopping,
            "draining": crew.stopping,
            "usable_workers": max((each.get("usable_workers", 0) for each in bodies.values()), default=0),
            "processes": {"ready": len(ready), "of": len(crew.data)},
        }
        if "verbose" in request.rel_url.query:
            body["degraded"] = self._degraded(bodies)
        return _json(body, 200 if body["ready"] else 503)

    def _degraded(self, bodies: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Each of what they name once, with who names it where not all do."""
        found: dict[bytes, tuple[dict[str, Any], list[str]]] = {}
        for label, body in sorted(bodies.items()):
            for each in body.get("degraded", []):
                about = msgspec.json.encode([each.get("what"), each.get("worker"), each.get("model")])
                found.setdefault(about, (each, []))[1].append(label)
        out = [each if len(labels) == len(bodies) else {**each, "processes": labels} for each, labels in found.values()]
        if self.sockets_lost:
            detail = "the folder of the processes' sockets was removed; all are replaced, and the log says more"
            out.insert(0, {"what": LOST, "detail": detail})
        for place in self._lost():
            how = "is not there" if place.process is None or place.process.gone.is_set() else "is starting"
            detail = f"{place.name} {how}; it is started by itself, and the log says why it ended"
            out.insert(0, {"what": LOST, "detail": detail})
        return out

    async def _restart_page(self, request: web.BaseRequest) -> web.Response:
        """202: it has begun, or goes on already."""
        if request.method != "POST":
            raise errors.method_not_allowed(request.method, RESTART, frozenset({"POST"}))
        already = self._crew.is_restarting
        if not already:
            self._restart()
        return _json({"restarting": True, "already": already}, 202)

    async def _processes(self, request: web.BaseRequest) -> web.Response:
        """Who there is."""
        rows = [
            {
                "process": each.label,
                "pid": each.pid,
                "state": each.state,
                "ready": each.ready.is_set(),
                "serves": each in {place.process for place in self._crew.places},
            }
            for each in self._crew.alive
        ]
        return _json({"restarting": self._crew.is_restarting, "processes": rows})

    # ---- asked of processes ------------------------------------------------------------------------------------------

    async def other(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any other page."""
        path, target = target_of(request).partition("?")[0], self._target(request)
        if path.startswith("/internal/"):
            raise errors.unknown_url(request.method, path)
        body = None if request.method in _GET else await read_body(request, _LONGEST_BODY_BYTES)
        if is_for_all(request.method, path):
            return await self._all(request, target, body or b"")
        process = self._chosen(request)
        answer = await self._asking.ask(process, request.method, target, body, request.headers)
        notice = _notice(path, request, answer.body)
        if notice is not None:
            await self._tell_others(process, notice)
        return answer.response(process)

    async def _all(self, request: web.BaseRequest, target: str, body: bytes) -> web.Response:
        """One does it first: what is wrong with it is wrong everywhere, and then nothing has changed."""
        async with self._one_by_one:
            first, *others = self._reachable(request)
            answer = await self._asking.ask(first, request.method, target, body, request.headers)
            if answer.status >= 300:
                return answer.response(first)
            change = Change(request.method, target, body)
            self._changes.note(change, answer.body)
            if target.partition("?")[0] == LOG_LEVEL:
                logging.getLogger().setLevel(msgspec.json.decode(body)["level"].upper())
            said = await asyncio.gather(
                *(self._asking.ask(each, request.method, target, body, request.headers) for each in others),
                return_exceptions=True,
            )
        failed = [
            each.assignment.name
            for each, one in zip(others, said, strict=True)
            if not each.gone.is_set() and (isinstance(one, BaseException) or one.status >= 300)
        ]
        if failed:
            text = f"Some of the gateway's processes did not do it: {', '.join(failed)}. Ask again."
            raise ApiError(502, text, code="processes_differ")
        return answer.response(first)

    async def greet(self, process: Process) -> None:
        """What was changed before it came, and still holds."""
        if not self._crew.answers(process):
            return
        async with self._one_by_one:
            for change in self._changes.all():
                if change.method == "DELETE" and await self._is_back(change, process):
                    self._changes.forget(change)
                    continue
                answer = await self._asking.ask(process, change.method, change.target, change.body)
                if answer.status >= 300:
                    _log.warning(
                        "%s did not take %s %s: %s",
                        process.assignment.name,
                        change.method,
                        change.target,
                        answer.status,
                    )

    async def _is_back(self, removal: Change, process: Process) -> bool:
        """Whether the worker was named again since (by a file, by the configuration), as another process knows."""
        other = next((each for each in self._crew.serving() if each is not process), None)
        if other is None:
            return False
        try:
            answer = await self._asking.ask(other, "GET", removal.target.partition("?")[0])
        except ApiError:
            return False
        return answer.status == 200 and not msgspec.json.decode(answer.body)["leaving"]

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._asking.stream(self._chosen(request), request, self._target(request))

    async def _tell_others(self, who: Process, notice: Notice) -> None:
        body = msgspec.json.encode(notice)
        others = [each for each in self._crew.answering if each is not who]
        await asyncio.gather(*(self._asking.ask(each, "POST", NOTICE, body) for each in others), return_exceptions=True)

    def _reachable(self, request: web.BaseRequest) -> list[Process]:
        """All that can be told, the one that answers first."""
        first = self._chosen(request)
        return [first, *(each for each in self._crew.answering if each is not first)]

    def _chosen(self, request: web.BaseRequest) -> Process:
        """As `?process=` says, else the first that serves. Raises ApiError."""
        wanted = request.rel_url.query.get(_WHICH)
        there = {
            each.label: each
            for place in self._crew.places
            if (each := place.process) is not None and each in self._crew.answering
        }
        if wanted is None:
            found = next(self._crew.serving(), None) or next(iter(there.values()), None)
            if found is None:
                raise ApiError(503, "No process is there now. Ask again.", code="no_process", retry_after_s=1.0)
            return found
        if wanted not in there:
            names = ", ".join(there) or "none"
            raise ApiError(404, f"No process {wanted[:20]} is there now, but {names}.", code="no_process", param=_WHICH)
        return there[wanted]

    def _target(self, request: web.BaseRequest) -> str:
        """As asked for, without what is for us."""
        url = request.rel_url
        return url.without_query_params(_WHICH).raw_path_qs if _WHICH in url.query else target_of(request)


class _Registry(CollectorRegistry):
    def __init__(self, them: list[families.Family]) -> None:
        super().__init__()
        self.register(_Given(them))


class _Given(Collector):
    def __init__(self, them: list[families.Family]) -> None:
        self._them = them

    def describe(self) -> Any:
        return ()

    def collect(self) -> Any:
        return families.metrics(self._them)


def _notice(path: str, request: web.BaseRequest, body: bytes) -> Notice | None:
    """What the other processes have to hear of what one has done."""
    control = CONTROLS.get(path)
    if control is None and path != RESET:
        return None
    try:
        answer = msgspec.json.decode(body)
        if path == RESET:
            return Notice(cleared=list(answer["workers"]))
        done = [name for name, said in answer["results"].items() if said["status"] and said["status"] < 400]
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return None  # It was refused.
    if control is None or not done:
        return None
    cleared = done if control.clears_cache(request.rel_url.query) else []
    return Notice(cleared=cleared, models=control.models) if cleared or control.models else None


def _livez(request: web.BaseRequest) -> web.Response:
    return json_response(b'{"status":"ok"}')


def _json(body: Any, status: int = 200) -> web.Response:
    return json_response(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n", status)
