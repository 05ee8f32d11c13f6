"""A copy of one collection of the Kubernetes API, kept by listing it and watching what changes.

What no watch tells, a list does: deletions while nobody watched, versions that are compacted away (410), a watch that
is open and says nothing, or leaves something out. So every list is compared with the copy, watches are short, and a
list is made now and then although nothing asks for it. While the API cannot be asked the copy stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, Generic, TypeVar

import msgspec

from gateway.discovery.kubernetes.api import Api, ApiError, Refused, Status, Unreachable

_log = logging.getLogger(__name__)

T = TypeVar("T")
Parse = Callable[[bytes], T]
"""One object, as JSON, to what is kept of it. Raises msgspec.MsgspecError or ValueError."""

_UNKNOWN: Final = 401
_FORBIDDEN: Final = 403
_ABSENT: Final = 404
_GONE: Final = 410
_PASSING: Final = (408, _GONE, 429)
"""Of the 4xx, those that may be another answer in a moment."""
_ATTEMPTS: Final = 3
"""So many watches that cannot be opened from one version, and it is given up."""


class Timers(msgspec.Struct, frozen=True, kw_only=True):
    """`watch_s`: the API is asked to end a watch after that (up to half as much again); one that lives `overdue_s`
    longer is lost. `relist_s`: the longest time without a list (a fifth more or less). `backoff_s` doubles up to
    `longest_s`. `slow_s`: what is forbidden or not there is asked for again after that.
    """

    watch_s: float = 60.0
    overdue_s: float = 10.0
    relist_s: float = 600.0
    backoff_s: float = 0.1
    longest_s: float = 10.0
    slow_s: float = 15.0
    page: int = 250


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Head(msgspec.Struct):
    metadata: _Meta


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_head = msgspec.json.Decoder(_Head)
_list = msgspec.json.Decoder(_List)
_event = msgspec.json.Decoder(_Event)
_status = msgspec.json.Decoder(Status)


class _Relist(Exception):
    """The version that a watch would go on from is of no use. `at_once`: no fault of anybody."""

    def __init__(self, reason: str, *, at_once: bool = False) -> None:
        super().__init__(reason)
        self.at_once = at_once


class Reflector(Generic[T]):
    """`items` are the objects by name, as `parse` made them. `changed(name)` is called after one came, went, or is
    another, `changed(None)` after each list. `what`: how the collection is called in messages. `optional`: `run` raises
    Refused (404) when the API does not know the collection, and asks no more.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        parse: Parse[T],
        changed: Callable[[str | None], None],
        *,
        what: str,
        labels: str | None = None,
        fields: str | None = None,
        optional: bool = False,
        timers: Timers | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.items: dict[str, T] = {}
        self.synced = False
        """Whether a list was made, with these selectors."""
        self.problem: str | None = None
        self.lists = 0
        self._api = api
        self._path = path
        self._parse = parse
        self._changed = changed
        self._what = what
        self._labels, self._fields = labels, fields
        self._optional = optional
        self._timers = timers or Timers()
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._version: str | None = None
        self._in_pages = True
        self._opened = self._progress = False
        """Whether the watch that just ended was opened at all; whether it told anything."""
        self.unreadable: dict[str, str] = {}
        """Objects that are there and are left out, by name, and why."""

    @property
    def problems(self) -> list[str]:
        """What is wrong with the collection, then with objects of it; for people."""
        return [*([self.problem] if self.problem else ()), *self.unreadable.values()]

    def select(self, labels: str | None) -> None:
        """Others from now on. Not while it runs; what it has stays until the next list."""
        self._labels, self._version, self.synced = labels, None, False

    async def run(self) -> None:
        pause_s, failures = self._timers.backoff_s, 0
        while True:
            self._opened = self._progress = False
            wait_s = 0.0
            try:
                if self._version is None:
                    await self._list()
                await self._watch_on()
            except _Relist as exc:
                _log.debug("%s are listed again: %s", self._what, exc)
                self._version = None
                if exc.at_once:
                    continue
            except ApiError as exc:
                if self._optional and isinstance(exc, Refused) and exc.status == _ABSENT:
                    raise
                if not self._opened:  # One that was cut is opened again, or the next failure is told.
                    self._tell(exc)
                wait_s = self._retry_s(exc)
            if self._progress:
                pause_s, failures = self._timers.backoff_s, 0
            failures += 1
            if failures % _ATTEMPTS == 0:
                self._version = None
            await asyncio.sleep(max(wait_s, pause_s * self._rng.uniform(0.5, 1.5)))
            pause_s = min(2 * pause_s, self._timers.longest_s)

    # ---- lists -------------------------------------------------------------------------------------------------------

    async def _list(self) -> None:
        found: set[str] = set()
        page = self._selectors()
        if self._in_pages:
            page["limit"] = str(self._timers.page)
        while True:
            try:
                answer = _decoded(_list, await self._api.get(self._path, page), "a list")
            except Refused as exc:
                if exc.status != _GONE:
                    raise
                self._in_pages = "continue" not in page
                raise _Relist("its pages are gone") from None
            for raw in answer.items or ():  # Page by page: of thousands of pods all at once would hold up the loop.
                name = _decoded(_head, raw, "an object").metadata.name
                found.add(name)
                self._take(name, raw)
            if not answer.metadata.continue_:
                break
            if page.get("continue") == answer.metadata.continue_:
                raise Unreachable("a list goes on with the same page for ever")
            page["continue"] = answer.metadata.continue_
        for name in [name for name in (*self.items, *self.unreadable) if name not in found]:
            self._drop(name)
        self._version = answer.metadata.resource_version
        self._in_pages = self.synced = True
        self.lists += 1
        self._changed(None)

    # ---- watches -----------------------------------------------------------------------------------------------------

    async def _watch_on(self) -> None:
        """One watch after the other, until the list is too old."""
        loop, timers = asyncio.get_running_loop(), self._timers
        until_s = loop.time() + timers.relist_s * self._rng.uniform(0.8, 1.2)
        while loop.time() < until_s:
            began_s = loop.time()
            if not await self._watch() and loop.time() - began_s < timers.backoff_s:
                raise Unreachable("watches end as soon as they are opened")
        raise _Relist("it is time", at_once=True)

    async def _watch(self) -> bool:
        """Whether it told anything."""
        self._opened = told = False
        watch_s = self._timers.watch_s * self._rng.uniform(1.0, 1.5)
        if watch_s >= 1:
            watch_s = math.ceil(watch_s)
        params = self._selectors() | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": f"{watch_s:g}",
        }
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with aclosing(self._api.watch(self._path, params, watch_s + self._timers.overdue_s)) as lines:
                async for line in lines:
                    if not line:
                        self._open()
                        continue
                    self._apply(_decoded(_event, line, "a watch"))
                    told = self._progress = True
        except Refused as exc:
            if exc.status == _GONE:
                raise _Relist("its version is gone") from None
            raise
        finally:  # One that was cut in the end has done its work.
            self._progress = self._progress or (self._opened and loop.time() - began_s > self._timers.longest_s)
        self._progress = True
        return told

    def _selectors(self) -> dict[str, str]:
        return {k: v for k, v in (("labelSelector", self._labels), ("fieldSelector", self._fields)) if v}

    def _apply(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = _decoded(_status, event.object, "a watch")
            reason = status.message or status.reason or "an error in the watch"
            raise _Relist(reason)
        meta = _decoded(_head, event.object, "an object").metadata
        if event.type in ("ADDED", "MODIFIED"):
            self._take(meta.name, event.object)
        elif event.type == "DELETED":
            self._drop(meta.name)
        if meta.resource_version:
            self._version = meta.resource_version

    # ---- the copy ----------------------------------------------------------------------------------------------------

    def _take(self, name: str, raw: msgspec.Raw) -> None:
        try:
            item = self._parse(bytes(raw))
        except (msgspec.MsgspecError, ValueError) as exc:
            if name not in self.unreadable:
                _log.warning("%s: %s is left out: %s", self._what, name, exc)
            self._drop(name)
            self.unreadable[name] = f"{name} of {self._what} is left out: {exc}"
            return
        self.unreadable.pop(name, None)
        if name not in self.items or self.items[name] != item:
            self.items[name] = item
            self._changed(name)

    def _drop(self, name: str) -> None:
        self.unreadable.pop(name, None)
        if self.items.pop(name, None) is not None:
            self._changed(name)

    # ---- how it goes -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._opened = True
        if self.problem is not None:
            _log.info("%s: the Kubernetes API answers again", self._what)
            self.problem = None

    def _retry_s(self, exc: ApiError) -> float:
        if not isinstance(exc, Refused):
            return 0.0
        if exc.retry_after_s is not None:
            return min(exc.retry_after_s, self._timers.slow_s)
        return self._timers.slow_s if 400 <= exc.status < 500 and exc.status not in _PASSING else 0.0

    def _tell(self, exc: ApiError) -> None:
        status = exc.status if isinstance(exc, Refused) else None
        problem = f"{self._what}: {exc}"
        if status is None:
            problem = f"{self._what}: the Kubernetes API cannot be asked ({exc})"
        elif status == _FORBIDDEN:
            problem += "; give the service account list and watch (deploy/kubernetes/rbac.yaml)"
        elif status == _UNKNOWN:
            problem += "; the API does not take the token"
        if self.items:
            problem += "; what is known stays"
        if problem != self.problem:
            _log.warning("%s", problem)
            self.problem = problem


def _decoded(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw, what: str) -> T:
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as exc:
        raise Unreachable(f"{what} cannot be read: {exc}") from None
