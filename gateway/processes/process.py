"""One process of a gateway, from its start to its end, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import os
import site
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from gateway.processes import control as words
from gateway.processes.assignment import Assignment, encode
from gateway.processes.control import Control

State = Literal["starting", "serving", "draining", "gone"]
_MODULE: Final = "gateway.processes.child"


class Process:
    """`start` once. `started` and `ready` are set when it says so, `gone` when it has ended."""

    def __init__(self, assignment: Assignment, sock: socket.socket) -> None:
        """`sock` is our end of its control."""
        self.assignment = assignment
        self.state: State = "starting"
        self.pid = 0
        self.code: int | None = None
        """As `asyncio.subprocess.Process.returncode`."""
        self.began_s = time.monotonic()
        self.started, self.ready, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.handed_over = asyncio.Event()
        self._sock = sock
        self._control: Control | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def life(self) -> str:
        """Of all processes of this gateway, this one: its place, `/`, and its pid."""
        return f"{self.label}/{self.pid}"

    @property
    def label(self) -> str:
        it = self.assignment
        return "hub" if it.kind == "hub" else str(it.number)

    async def start(self, args: Sequence[str], fds: Sequence[int]) -> None:
        """Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", _MODULE, encode(self.assignment), *args,
            stdin=asyncio.subprocess.DEVNULL, pass_fds=fds, env=environment(os.environ), start_new_session=True,
        )  # fmt: skip
        self.pid = process.pid
        self._control = await Control.of(self._sock)
        self._tasks = [asyncio.create_task(self._listen(self._control)), asyncio.create_task(self._wait(process))]

    def say(self, word: str) -> None:
        if word in (words.DRAIN, words.LEAVE) and self.state != "gone":
            self.state = "draining"
        elif word == words.ACCEPT and self.state == "starting":
            self.state = "serving"
        if self._control is not None:
            self._control.say(word)

    def kill(self) -> None:
        if not self.gone.is_set():
            os.kill(self.pid, 9)  # It is ours until it is waited for.

    async def _listen(self, control: Control) -> None:
        async for word in control.words():
            if word == words.STARTED:
                self.started.set()
            elif word == words.READY:
                self.ready.set()
            elif word == words.HANDED_OVER:
                self.handed_over.set()

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        self.code = await process.wait()
        self.state = "gone"
        if self._control is not None:
            self._control.close()
        self.gone.set()


def how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by signal {-code}"
    return f"ended with code {code}"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """In which `python -m` finds this very package without looking into the current folder."""
    root = str(Path(__file__).resolve().parents[2])
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    found = given.get("PYTHONPATH", "")
    if root in installed or root in found.split(os.pathsep):
        return dict(given)
    return {**given, "PYTHONPATH": os.pathsep.join(filter(None, [root, found]))}
