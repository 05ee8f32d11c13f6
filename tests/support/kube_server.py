"""A stand-in for kube-apiserver, as far as clients that list, watch and hold leases see it, with its faults.

True to it in what such clients rely on: one resourceVersion for all writes, lists in pages of one version, watches
from a version, 410 as a status and inside of a watch, bookmarks, timeoutSeconds, label and field selectors (an object
that no longer matches is DELETED for that watch), writes that conflict.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from tests.support.stacked import Stacked

Object = dict[str, Any]

PODS = "pods"
POOLS = "inferencepools.inference.networking.k8s.io"
LEASES = "leases.coordination.k8s.io"
OBJECTIVES = "inferenceobjectives.llm-d.ai"
OLD_OBJECTIVES = "inferenceobjectives.inference.networking.x-k8s.io"
REWRITES = "inferencemodelrewrites.llm-d.ai"
OLD_REWRITES = "inferencemodelrewrites.inference.networking.x-k8s.io"
VERSIONS = {
    "": "v1",
    "inference.networking.k8s.io": "v1",
    "coordination.k8s.io": "v1",
    "llm-d.ai": "v1alpha2",
    "inference.networking.x-k8s.io": "v1alpha2",
}
_COLLECTION = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>\w+)/namespaces/(?P<namespace>[^/]+)/(?P<rest>.+)"
)


class _Watch:
    """One open watch. `mute`: nothing comes any more, not even its end. `lossy`: it leaves out what happens."""

    def __init__(self, kind: str, namespace: str, chosen: Callable[[Object | None], bool]) -> None:
        self.kind = kind
        self.namespace = namespace
        self.chosen = chosen
        self.queue: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()
        self.mute = False
        self.lossy = False
        self.transport: asyncio.Transport | None = None

    def note(self, kind: str, namespace: str, before: Object | None, after: Object | None, shown: Object) -> None:
        if (kind, namespace) != (self.kind, self.namespace) or self.lossy:
            return
        was, now = self.chosen(before), self.chosen(after)
        if was or now:
            self.queue.put_nowait(("MODIFIED" if was and now else "ADDED" if now else "DELETED", shown))


class KubeServer(Stacked):
    """In a test: ``async with KubeServer() as kube:``. Collections that are not `installed` are 404."""

    def __init__(self, *, bookmark_s: float = 0.1, tls: ssl.SSLContext | None = None) -> None:
        self.installed = {PODS, POOLS, LEASES}
        self.forbidden: set[str] = set()
        self.tokens: set[str] | None = None
        """Those that are taken; None: nobody has to have one."""
        self.refusals: list[tuple[int, dict[str, str]]] = []
        """(status, headers) of the next answers."""
        self.down = False
        """Connections are closed without a word."""
        self.parted: set[str] = set()
        """Tokens of those for whom it is down."""
        self.slow_s = 0.0
        self.gone_in_stream = True
        """Whether a watch from a version that is gone is answered 200 and then told so, or 410."""
        self.asked: list[tuple[str, str]] = []
        """(verb, collection) of every request that was answered."""
        self.queries: list[dict[str, str]] = []
        self.watches: set[_Watch] = set()
        self._bookmark_s = bookmark_s
        self._tls = tls
        self._version = 1000
        self._compacted = 0
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._log: list[tuple[int, str, str, Object | None, Object | None, Object]] = []
        self._pages: dict[str, tuple[int, list[Object]]] = {}

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def _start(self) -> None:
        server = web.Server(self._handle)
        runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        self._stack.callback(self.cut)
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.port = runner.addresses[0][1]

    # ---- what a test does --------------------------------------------------------------------------------------------

    def put(self, kind: str, name: str, body: Object, namespace: str = "default") -> Object:
        """Create or change one."""
        key = (kind, namespace, name)
        before = self._objects.get(key)
        after = copy.deepcopy(body)
        self._version += 1
        meta = after.setdefault("metadata", {})
        uid = before["metadata"]["uid"] if before else f"uid-{self._version}"
        meta.update(name=name, namespace=namespace, resourceVersion=str(self._version))
        meta.setdefault("uid", uid)
        meta.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        self._objects[key] = after
        self._note(kind, namespace, before, after, after)
        return after

    def delete(self, kind: str, name: str, namespace: str = "default") -> None:
        before = self._objects.pop((kind, namespace, name))
        self._version += 1
        shown = copy.deepcopy(before)
        shown["metadata"]["resourceVersion"] = str(self._version)
        self._note(kind, namespace, before, None, shown)

    def get(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        return self._objects.get((kind, namespace, name))

    def all(self, kind: str, namespace: str = "default") -> dict[str, Object]:
        return {name: it for (k, ns, name), it in self._objects.items() if (k, ns) == (kind, namespace)}

    def compact(self) -> None:
        """Older versions are gone, for new watches and for pages of lists."""
        self._compacted = self._version
        self._log.clear()
        self._pages.clear()

    def cut(self) -> None:
        """Every watch's connection breaks."""
        for watch in list(self.watches):
            if watch.transport is not None:
                watch.transport.abort()

    def lose(self, *, mute: bool = True) -> None:
        """Every open watch stays open, and tells nothing any more (`mute`), or only bookmarks."""
        for watch in self.watches:
            watch.mute = watch.mute or mute
            watch.lossy = True

    def count(self, verb: str, kind: str) -> int:
        return self.asked.count((verb, kind))

    def _note(self, kind: str, namespace: str, before: Object | None, after: Object | None, shown: Object) -> None:
        self._log.append((self._version, kind, namespace, before, after, shown))
        for watch in self.watches:
            watch.note(kind, namespace, before, after, shown)

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.down or token in self.parted:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if self.refusals:
            status, headers = self.refusals.pop(0)
            return _status(status, "a fault", headers)
        if self.tokens is not None and token not in self.tokens:
            return _status(401, "Unauthorized")
        if "/namespaces/" not in request.path:
            return self._resources(request.path)
        found = _COLLECTION.fullmatch(request.path)
        assert found is not None, request.path
        group, namespace = found["group"] or "", found["namespace"]
        plural, _, name = found["rest"].partition("/")
        kind = f"{plural}.{group}" if group else plural
        if kind not in self.installed or VERSIONS[group] != found["version"]:
            return web.Response(status=404, text="404 page not found\n")
        verb = _verb(request, name)
        self.asked.append((verb, kind))
        self.queries.append(dict(request.query))
        if kind in self.forbidden:
            message = f'{plural} is forbidden: User "system:serviceaccount:x" cannot {verb} resource "{plural}"'
            return _status(403, message)
        if verb == "watch":
            return await self._watch(request, kind, namespace)
        if verb == "list":
            return self._list(request, kind, namespace)
        if verb == "get":
            one = self.get(kind, name, namespace)
            return _status(404, f'{plural} "{name}" not found') if one is None else web.json_response(one)
        return self._write(verb, kind, namespace, name, await request.json())

    def _resources(self, path: str) -> web.Response:
        _, _, group, version = path.split("/")
        plurals = [kind.partition(".")[0] for kind in self.installed if kind.partition(".")[2] == group]
        if not plurals or VERSIONS[group] != version:
            return web.Response(status=404, text="404 page not found\n")
        resources = [{"name": plural, "namespaced": True, "kind": plural, "verbs": ["list"]} for plural in plurals]
        return web.json_response({"kind": "APIResourceList", "resources": resources})

    def _list(self, request: web.BaseRequest, kind: str, namespace: str) -> web.Response:
        query = request.query
        token, limit = query.get("continue", ""), int(query.get("limit", "0"))
        if token:
            if token not in self._pages:
                return _status(410, "The provided continue parameter is too old to display a consistent list result.")
            version, items = self._pages.pop(token)
        else:
            chosen = _selection(query)
            version = self._version
            items = [it for _, it in sorted(self.all(kind, namespace).items()) if chosen(it)]
        meta = {"resourceVersion": str(version)}
        if limit and len(items) > limit:
            meta["continue"] = f"page-{self._version}-{len(self._pages)}-{len(items)}"
            self._pages[meta["continue"]] = version, items[limit:]
            items = items[:limit]
        return web.json_response({"kind": "List", "metadata": meta, "items": items or None})

    async def _watch(self, request: web.BaseRequest, kind: str, namespace: str) -> web.StreamResponse:
        query = request.query
        since = int(query["resourceVersion"])
        gone = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}
        if since < self._compacted and not self.gone_in_stream:
            return web.json_response(gone, status=410)
        watch = _Watch(kind, namespace, _selection(query))
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        if since < self._compacted:
            await _say(answer, "ERROR", gone)
            return answer
        watch.transport = request.transport
        for version, k, ns, before, after, shown in self._log:
            if version > since:
                watch.note(k, ns, before, after, shown)
        self.watches.add(watch)
        try:
            await self._tell(watch, answer, float(query["timeoutSeconds"]))
        finally:
            self.watches.discard(watch)
        return answer

    async def _tell(self, watch: _Watch, answer: web.StreamResponse, for_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + for_s
        while loop.time() < until_s or watch.mute:
            try:
                wait_s = self._bookmark_s if watch.mute else min(self._bookmark_s, max(0.0, until_s - loop.time()))
                kind, shown = await asyncio.wait_for(watch.queue.get(), wait_s)
            except TimeoutError:
                kind, shown = "BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}}
            if watch.transport is None or watch.transport.is_closing():
                return
            if not watch.mute:
                with suppress(ConnectionResetError):  # It was cut.
                    await _say(answer, kind, shown)

    def _write(self, verb: str, kind: str, namespace: str, name: str, body: Object) -> web.Response:
        name = name or body["metadata"]["name"]
        before = self.get(kind, name, namespace)
        if verb == "create":
            if before is not None:
                return _status(409, f'"{name}" already exists')
            return web.json_response(self.put(kind, name, body, namespace), status=201)
        if before is None:
            return _status(404, f'"{name}" not found')
        if body["metadata"].get("resourceVersion") != before["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        return web.json_response(self.put(kind, name, body, namespace))


def _verb(request: web.BaseRequest, name: str) -> str:
    if request.method == "GET":
        return "get" if name else "watch" if request.query.get("watch") == "true" else "list"
    return {"POST": "create", "PUT": "update"}[request.method]


async def _say(answer: web.StreamResponse, kind: str, shown: Object) -> None:
    await answer.write(json.dumps({"type": kind, "object": shown}).encode() + b"\n")


def _status(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}
    return web.json_response(body, status=status, headers=headers)


def _selection(query: Any) -> Callable[[Object | None], bool]:
    labels = list(_requirements(query.get("labelSelector", "")))
    fields = [part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part]

    def chosen(one: Object | None) -> bool:
        if one is None:
            return False
        meta = one["metadata"]
        return all(matches(meta.get("labels") or {}) for matches in labels) and all(
            {"metadata.name": meta["name"], "metadata.namespace": meta["namespace"]}[name] == value
            for name, value in fields
        )

    return chosen


def _requirements(selector: str) -> Iterator[Callable[[dict[str, str]], bool]]:
    """Each part of a label selector, such as `a=b,c!=d,e in (f,g),h,!i`."""
    for part in filter(None, (part.strip() for part in re.split(r",(?![^(]*\))", selector))):
        found = re.fullmatch(r"(?P<key>[^\s=!]+)\s*(?P<how>in|notin|==?|!=)\s*\(?(?P<values>[^)]*)\)?", part)
        if found is None:
            yield partial(_has, part.removeprefix("!"), None, not part.startswith("!"))
        else:
            values = {value.strip() for value in found["values"].split(",")}
            yield partial(_has, found["key"], values, found["how"] in ("in", "=", "=="))


def _has(key: str, values: set[str] | None, wanted: bool, labels: dict[str, str]) -> bool:
    """`values`: one of these; None: any."""
    return (key in labels if values is None else labels.get(key) in values) is wanted
