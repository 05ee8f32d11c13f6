"""The board on a Unix socket. A writer whose last connection is gone has nothing in flight any more: the others hear so
at once, whatever became of its process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gateway.processes.board import Board, BoardError
from gateway.processes.frames import MOST_BYTES, frame, read_frame
from gateway.replicas import codec
from gateway.replicas.schema import FIELD_NEWS, FIELD_WRITER, NEWS_ENTRIES, Keys

_log = logging.getLogger(__name__)
_SWEEP_S = 10.0
_LONGEST_WAIT_S = 60.0


class BoardServer:
    """In a running event loop: `start`, later `close`."""

    def __init__(self, path: str, keys: Keys) -> None:
        self.board = Board()
        self._path = path
        self._keys = keys
        self._news = asyncio.Event()
        self._connections: Counter[str] = Counter()
        """Of each writer."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def start(self) -> None:
        """Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=MOST_BYTES)
        self._keep(asyncio.create_task(self._sweep(), name="board"))

    async def close(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.board.sweep(time.monotonic())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._keep(task)
        name: str | None = None
        answer: dict[str, Any]
        try:
            while True:
                wait_s, commands = await read_frame(reader)
                if name is None and (name := _writer_in(commands)) is not None:
                    self._connections[name] += 1
                try:
                    answer = {"found": await self._run(commands, min(float(wait_s), _LONGEST_WAIT_S))}
                except BoardError as exc:
                    answer = {"error": str(exc)}
                writer.write(frame(answer))
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass  # It went, or we do.
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            _log.warning("a message to the board that made no sense; its connection is closed")
        finally:
            writer.close()
            if name is not None:
                self._left(name)

    async def _run(self, commands: Sequence[Sequence[Any]], wait_s: float) -> list[Any]:
        found = [self._now(command) for command in commands]
        if wait_s and commands and commands[-1][0] == "xread" and not found[-1]:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not found[-1]:
                        await self._news.wait()
                        found[-1] = self._now(commands[-1])
        return found

    def _now(self, command: Sequence[Any]) -> Any:
        found = self.board.run(command, time.monotonic(), time.time_ns() // 1_000_000)
        if command[0] == "xadd":
            self._news.set()
            self._news = asyncio.Event()
        return found

    def _left(self, name: str) -> None:
        self._connections[name] -= 1
        if self._connections[name] > 0 or self._closing:
            return
        del self._connections[name]
        bye = codec.news(codec.News(number=0, bye=True))
        self._now(["xadd", self._keys.news, {FIELD_WRITER: name.encode(), FIELD_NEWS: bye}, NEWS_ENTRIES])
        self._now(["delete", self._keys.load(name)])


def _writer_in(commands: Sequence[Sequence[Any]]) -> str | None:
    """Who says it, where something is told."""
    for name, *args in commands:
        if name == "xadd":
            told: bytes = args[1][FIELD_WRITER]
            return told.decode("utf-8", "replace")
    return None
