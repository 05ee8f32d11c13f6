"""`python -m gateway.processes.child ASSIGNMENT ARGUMENT ...`: a process of a gateway, started by its supervisor with
the arguments that was given. It ends when it is told to, and when the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from gateway.cli import report_user_errors
from gateway.config import Config
from gateway.errors import UserError
from gateway.processes import control as words
from gateway.processes.assignment import VERSION, Assignment, decode
from gateway.processes.control import Control
from gateway.processes.data import DataPlaneProcess
from gateway.processes.derived import has_index, of_data, of_hub
from gateway.processes.hub import HubProcess, board_of
from gateway.processes.seats import OtherLayoutError, Table
from gateway.processes.sockets import remove_folder
from gateway.reload import Source
from gateway.run import configuration
from gateway.service import set_up_process

_log = logging.getLogger(__name__)
_CUT_S = 0.5


class _Life:
    """How one process goes: what it was told so far."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.accept = asyncio.Event()
        self.end = asyncio.Event()
        self.cut = asyncio.Event()
        self.leaves = False
        self.is_orphan = False
        self.reload: Callable[[], None] = lambda: None
        self.hand_over, self.take_over = asyncio.Event(), asyncio.Event()

    async def listen(self) -> None:
        async for word in self.control.words():
            self.take(word)
        self.is_orphan = not self.end.is_set()  # The supervisor is gone without a word.
        self.end.set()

    def take(self, word: str) -> None:
        if word == words.ACCEPT:
            self.accept.set()
        elif word == words.RELOAD:
            self.reload()
        elif word == words.HAND_OVER:
            self.hand_over.set()
        elif word == words.TAKE_OVER:
            self.take_over.set()
        elif word in (words.DRAIN, words.LEAVE):
            self.leaves = self.leaves or (word == words.LEAVE and not self.end.is_set())
            self.end.set()
        elif word == words.CUT:
            self.cut.set()
            self.end.set()

    async def whichever(self, work: Awaitable[object]) -> None:
        """`work`, unless it is cut short."""
        task, cut = asyncio.ensure_future(work), asyncio.ensure_future(self.cut.wait())
        await asyncio.wait({task, cut}, return_when=asyncio.FIRST_COMPLETED)
        for each in (task, cut):
            each.cancel()
        await asyncio.gather(task, cut, return_exceptions=True)


def main(argv: Sequence[str]) -> int:
    """Exit code 2 for what is wrong with the configuration, 3 for another version than the supervisor's."""
    try:
        it = decode(argv[0])
        if it.version != VERSION:
            raise OtherLayoutError
        table = Table(it.table_fd)
    except (IndexError, msgspec.MsgspecError, OtherLayoutError):
        print("warmroute: this version cannot join processes that another one has started: restart them all",
              file=sys.stderr)  # fmt: skip
        return 3
    return report_user_errors(lambda: _run(it, table, argv[1:]))


def _run(it: Assignment, table: Table, args: Sequence[str]) -> int:
    given, source = configuration(args)
    derive = of_data if it.kind == "data" else of_hub
    config = derive(given, it)
    set_up_process(config, it.name)
    import uvloop

    mine = Source(read=lambda: derive(source.read(), it), file=source.file)
    return uvloop.run(_live(it, table, given, config, mine))


async def _live(it: Assignment, table: Table, given: Config, config: Config, source: Source) -> int:
    life = _Life(await Control.of(socket.socket(fileno=it.control_fd)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # Of an operator, or of a service manager that tells them all.
        loop.add_signal_handler(number, life.take, words.DRAIN)
    loop.add_signal_handler(signal.SIGHUP, life.take, words.RELOAD)
    loop.add_signal_handler(signal.SIGUSR2, lambda: None)
    listening = loop.create_task(life.listen(), name="control")
    try:
        if it.kind == "data":
            await _data(life, DataPlaneProcess(config, given, it, table), config, source, it)
        elif has_index(given):
            await _hub(life, HubProcess(config, given, it), config, source, it)
        else:
            await _board(life, given, it)
    finally:
        if life.is_orphan and it.kind == "hub":
            remove_folder(it.folder)  # Who made it cannot.
        listening.cancel()
        life.control.close()
    return 0


async def _data(life: _Life, service: DataPlaneProcess, config: Config, source: Source, it: Assignment) -> None:
    async with service:
        _follow(life, service, config, source)
        life.control.say(words.STARTED)
        tasks = [asyncio.create_task(_accept(life, service)), asyncio.create_task(_tell_ready(life, service))]
        await life.end.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        timeout_s = service.config.gateway.drain_timeout_s
        await life.whichever(service.leave(timeout_s) if life.leaves else service.drain(timeout_s))
        _write(it, await service.last_metrics())


async def _accept(life: _Life, service: DataPlaneProcess) -> None:
    await life.accept.wait()
    await service.accept()


async def _tell_ready(life: _Life, service: DataPlaneProcess) -> None:
    await service.settled()
    life.control.say(words.READY)


async def _hub(life: _Life, service: HubProcess, config: Config, source: Source, it: Assignment) -> None:
    async with service:
        _follow(life, service, config, source)
        life.control.say(words.STARTED)
        tasks = [asyncio.create_task(_take_over(life, service)), asyncio.create_task(_hand_over(life, service))]
        ending = asyncio.create_task(life.end.wait())
        while not service.is_ready and not ending.done():
            await asyncio.wait({ending}, timeout=0.05)
        life.control.say(words.READY)
        await ending
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if life.leaves:  # Else nobody is left who would ask.
            await life.whichever(service.drain(_CUT_S))
        _write(it, await service.last_metrics())


async def _take_over(life: _Life, service: HubProcess) -> None:
    await life.take_over.wait()
    await service.take_over()


async def _hand_over(life: _Life, service: HubProcess) -> None:
    await life.hand_over.wait()
    try:
        await service.hand_over()
    finally:
        life.control.say(words.HANDED_OVER)


async def _board(life: _Life, given: Config, it: Assignment) -> None:
    board = board_of(given, it)
    if board is None:
        raise UserError("with redis.url and index.source service there is no hub")
    await board.start()
    life.control.say(words.STARTED)
    life.control.say(words.READY)
    await life.end.wait()
    await board.close()


def _follow(life: _Life, service: DataPlaneProcess | HubProcess, config: Config, source: Source) -> None:
    service.follow_config(config, source)
    life.reload = service.reload


def _write(it: Assignment, metrics: bytes) -> None:
    """Where the supervisor finds it, whole or not at all."""
    with contextlib.suppress(OSError):
        with open(it.last_metrics_path + ".part", "wb") as file:
            file.write(metrics)
        os.replace(it.last_metrics_path + ".part", it.last_metrics_path)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
