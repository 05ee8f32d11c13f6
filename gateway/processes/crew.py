"""The processes of a gateway: which there are, how one comes, how it is succeeded, and what follows when it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from gateway.processes import control as words
from gateway.processes import families
from gateway.processes.assignment import BOARD_SOCKET, INDEX_SOCKET, Assignment
from gateway.processes.books import Books
from gateway.processes.merge import Totals
from gateway.processes.process import Process, how_it_ended
from gateway.processes.seats import Table
from gateway.processes.sockets import link

_log = logging.getLogger(__name__)
_SETTLED_S: Final = 10.0
"""A process that lived so long did not fail for how it was started."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_MOST_FAILED_STARTS: Final = 5
_JOIN_S: Final = 5.0
"""So long one that takes a killed one's place may learn what there is to know before it serves."""
_READY_S: Final = 60.0
"""And so long a successor, whose predecessor serves meanwhile."""
_OF_HUB: Final = (INDEX_SOCKET, BOARD_SOCKET)
_HAND_OVER_S: Final = 60.0
"""What a hub knows of engines that connect to it may be much."""
_END_S: Final = 10.0
"""Beyond its time to drain."""


class RestartFailedError(Exception):
    """A successor does not serve; its predecessor goes on."""


class Place:
    """Of a data plane, by its number, or of the hub. `process` is who has it now."""

    def __init__(self, kind: Literal["data", "hub"], number: int) -> None:
        self.kind = kind
        self.number = number
        self.process: Process | None = None
        self.succeeded = asyncio.Event()
        """Set when another process has it, while who had it may still be there."""
        self.failures = 0
        self.failed_starts = 0

    @property
    def name(self) -> str:
        return "the hub" if self.kind == "hub" else f"process {self.number}"


class Crew:
    """`sockets` are listened on by all; `greet(process)` is done before one serves, and may take a moment.
    `hub_answers`: the hub has pages.
    """

    def __init__(
        self,
        *,
        n_data: int,
        has_hub: bool,
        hub_answers: bool,
        args: Sequence[str],
        folder: str,
        table: Table,
        sockets: Sequence[socket.socket],
        drain_timeout_s: Callable[[], float],
        greet: Callable[[Process], Awaitable[None]],
    ) -> None:
        self.data = [Place("data", number) for number in range(n_data)]
        self.hub = Place("hub", 0) if has_hub else None
        self._hub_answers = hub_answers
        self.totals = Totals()
        self.stopping = False
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it cannot go on, if that is so."""
        self.ends: Counter[str] = Counter()
        """Processes that ended, by why."""
        self._args = args
        self._folder = folder
        self._table = table
        self._books = Books(table, 0)
        self._sockets = sockets
        self._drain_timeout_s = drain_timeout_s
        self._greet = greet
        self._give, self._take = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._keepers: list[asyncio.Task[None]] = []
        self._alive: set[Process] = set()
        self._restarting = asyncio.Lock()

    @property
    def places(self) -> list[Place]:
        return [*self.data, *([] if self.hub is None else [self.hub])]

    @property
    def alive(self) -> list[Process]:
        """Those that leave included."""
        return sorted(self._alive, key=lambda each: each.assignment.seat)

    @property
    def answering(self) -> list[Process]:
        """Those of them that can be asked for pages."""
        return [each for each in self.alive if each.started.is_set() and self.answers(each)]

    def answers(self, process: Process) -> bool:
        return process.assignment.kind == "data" or self._hub_answers

    @property
    def links(self) -> list[str]:
        """By which the hub is found."""
        process = None if self.hub is None else self.hub.process
        if process is None:
            return []
        return [process.assignment.shared(name) for name in _OF_HUB]

    def serving(self) -> Iterator[Process]:
        """Data planes that take requests, by their number."""
        for place in self.data:
            if place.process is not None and place.process.state == "serving":
                yield place.process

    # ---- from start to end -------------------------------------------------------------------------------------------

    async def start(self) -> int | None:
        """Start all. The exit code of the first if it does not even start, which it has told why."""
        first = [*([] if self.hub is None else [self.hub]), self.data[0]]
        for place in first:
            place.process = await self._spawn(place)
        for place in first:
            if not await self._has_started(place):
                assert place.process is not None  # noqa: S101 - set above
                return place.process.code or 1
            await self._install(place)
        others = self.data[1:]
        for place in others:
            place.process = await self._spawn(place)
        for place in others:
            if await self._has_started(place):
                await self._install(place)
        self._keepers = [asyncio.create_task(self._keep(place), name=place.name) for place in self.places]
        return None

    async def stop(self, cut: asyncio.Event) -> None:
        """Drain all; `cut` ends what still runs."""
        self.stopping = True
        data = [each for each in self._alive if each.assignment.kind == "data"]
        for process in data:
            process.say(words.DRAIN)
        await self._all_gone(data, cut)
        rest = list(self._alive)
        for process in rest:
            process.say(words.CUT)
        await self._all_gone(rest, cut)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._give.close()
        self._take.close()

    async def _all_gone(self, processes: Sequence[Process], cut: asyncio.Event) -> None:
        gone: asyncio.Future[Any] = asyncio.gather(*(each.gone.wait() for each in processes))
        cutting: asyncio.Future[Any] = asyncio.ensure_future(cut.wait())
        await asyncio.wait({gone, cutting}, timeout=self._longest_s(), return_when=asyncio.FIRST_COMPLETED)
        cutting.cancel()
        if not gone.done():
            for process in processes:
                process.say(words.CUT)
            await asyncio.wait({gone}, timeout=_END_S)
        for process in processes:
            process.kill()
        await gone

    def _longest_s(self) -> float:
        return self._drain_timeout_s() + _END_S

    def say(self, word: str) -> None:
        """To all there are."""
        for process in self._alive:
            process.say(word)

    # ---- one process -------------------------------------------------------------------------------------------------

    async def _spawn(self, place: Place) -> Process:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            is_data = place.kind == "data"
            listen = tuple(each.fileno() for each in self._sockets) if is_data else ()
            seat = self._table.take_seat()
            it = Assignment(
                kind=place.kind,
                number=place.number,
                of=len(self.data),
                seat=seat,
                folder=self._folder,
                control_fd=theirs.fileno(),
                table_fd=self._table.fd,
                listen_fds=listen,
                give_fd=self._give.fileno() if is_data else -1,
                take_fd=self._take.fileno() if is_data else -1,
            )
            process = Process(it, ours)
            given = (it.give_fd, it.take_fd) if is_data else ()
            try:
                await process.start(self._args, (it.control_fd, it.table_fd, *listen, *given))
            except OSError:
                self._table.clear_seat(seat)
                raise
        self._alive.add(process)
        if place.kind == "hub" and (place.process is None or place.process.gone.is_set()):
            _lead_to(it)  # There is none that could be asked until it listens.
            process.say(words.TAKE_OVER)
        return process

    async def _has_started(self, place: Place) -> bool:
        process = place.process
        assert process is not None  # noqa: S101 - it was spawned
        await _first(process.started, process.gone)
        return process.started.is_set() and not process.gone.is_set()

    async def _install(self, place: Place) -> None:
        """From now on it is the one that has its place."""
        process = place.process
        assert process is not None  # noqa: S101 - it was spawned
        if place.kind == "hub":
            _lead_to(process.assignment)
        try:
            await self._greet(process)
        except Exception as exc:
            _log.warning("%s was not told what has been changed: %s", place.name, exc)
        process.say(words.ACCEPT)

    async def _keep(self, place: Place) -> None:
        """Have somebody there, always."""
        while True:
            place.succeeded.clear()
            process = place.process
            assert process is not None  # noqa: S101 - there is always one, if only of late
            await _first(process.gone, place.succeeded)
            if process is not place.process:
                continue  # It was succeeded.
            if process in self._alive:
                self._bury(process, "stopped" if self.stopping else "ended")
                if not self.stopping:
                    self._note_failure(place, process)
            if self.stopping:
                return
            if await self._is_over_after(_wait_s(place.failures)):
                return
            try:
                place.process = await self._spawn(place)
            except OSError as exc:
                _log.error("%s cannot be started: %s", place.name, exc.strerror or exc)
                place.failures += 1
                continue
            if await self._has_started(place):
                place.failed_starts = 0
                if place.kind == "data":  # The board of a hub is missed at once.
                    await _first(place.process.ready, place.process.gone, timeout_s=_JOIN_S)
                await self._install(place)

    async def _is_over_after(self, wait_s: float) -> bool:
        await asyncio.sleep(wait_s)
        return self.stopping

    def _note_failure(self, place: Place, process: Process) -> None:
        lived_s = time.monotonic() - process.began_s
        place.failures = 1 if lived_s > _SETTLED_S else place.failures + 1
        if not process.started.is_set():
            place.failed_starts += 1
        _log.error("%s %s after %.1f s; it is started again", place.name, how_it_ended(process.code), lived_s)
        if place.failed_starts >= _MOST_FAILED_STARTS and not any(self.serving()) and not self.failed.done():
            self.failed.set_result(
                f"{place.name} has ended {place.failed_starts} times while it was started, and no process serves; "
                "what it said is above"
            )

    def _bury(self, process: Process, why: str) -> None:
        """What it had is nobody's any more; what it counted stays counted."""
        self._alive.discard(process)
        it = process.assignment
        with suppress(OSError, msgspec.MsgspecError):
            last = Path(it.last_metrics_path)
            self.totals.heard(process.life, families.decode(last.read_bytes()))
            last.unlink()
        self.totals.gone(process.life)
        self._table.clear_seat(it.seat)
        self._books.clear_seat(it.seat)
        self.ends[why] += 1
        for path in (it.admin_path, it.own(INDEX_SOCKET), it.own(BOARD_SOCKET)):
            Path(path).unlink(missing_ok=True)

    # ---- all of them, one after the other ----------------------------------------------------------------------------

    @property
    def is_restarting(self) -> bool:
        return self._restarting.locked()

    async def restart(self) -> None:
        """Each in its turn gets a successor, and leaves when that serves. Raises RestartFailedError; those that were
        succeeded by then are.
        """
        async with self._restarting:
            places = [*([] if self.hub is None else [self.hub]), *self.data]
            for place in places:
                if self.stopping:
                    return
                await self._succeed(place)
            _log.info("all processes are new ones")

    async def _succeed(self, place: Place) -> None:
        old = place.process
        if old is None or old.gone.is_set():
            return  # It is started anew anyway.
        try:
            new = await self._spawn(place)
        except (OSError, RuntimeError) as exc:
            raise RestartFailedError(f"{place.name} cannot be started: {exc}") from None
        await _first(new.ready, new.gone, timeout_s=_READY_S)
        if not new.ready.is_set() or new.gone.is_set():
            how = how_it_ended(new.code) if new.gone.is_set() else f"is not ready after {_READY_S:.0f} s"
            new.kill()
            await new.gone.wait()
            self._bury(new, "unfit")
            raise RestartFailedError(f"the new {place.name.removeprefix('the ')} {how}; the old one goes on")
        if place.process is not old or self.stopping:  # It fell meanwhile, and has been replaced.
            new.kill()
            await new.gone.wait()
            self._bury(new, "unfit")
            return
        if place.kind == "hub" and self._hub_answers:
            old.say(words.HAND_OVER)
            await _first(old.handed_over, old.gone, timeout_s=_HAND_OVER_S)
            new.say(words.TAKE_OVER)
        place.process = new
        place.succeeded.set()
        place.failures = place.failed_starts = 0
        await self._install(place)
        old.say(words.LEAVE)
        await _first(old.gone, timeout_s=self._longest_s())
        old.kill()
        await old.gone.wait()
        self._bury(old, "succeeded")
        _log.info("%s is a new one", place.name)


def _lead_to(hub: Assignment) -> None:
    """Whoever looks for the hub finds this one."""
    for name in _OF_HUB:
        link(hub.own(name), hub.shared(name))


async def _first(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Until one of them is set, or the time is over."""
    tasks = [asyncio.ensure_future(each.wait()) for each in events]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _wait_s(failures: int) -> float:
    """At once the first time."""
    if failures <= 1:
        return 0.0
    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (failures - 2)))
