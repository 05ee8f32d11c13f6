"""A workers file (YAML, JSON or plain lines), read again whenever it changes.

A file may be seen half written, and half a list of workers is a valid list. So a file counts only once it was left
alone for a poll: it was last written longer ago than that, or is the same as at the look before. A bad file changes
nothing: the last good list stays, and the problem is told once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from gateway.config.load import load_workers
from gateway.config.schema import Worker
from gateway.discovery.base import Source, by_name, differences
from gateway.discovery.lines import is_lines, read_lines
from gateway.errors import UserError
from scorer.types import ChangeKind, WorkerChange

log = logging.getLogger(__name__)

_Version = tuple[int, bytes]
"""(time of the last write in ns, content)"""


class FileDiscovery:
    """Looks at `path` every `poll_s`. A worker that leaves the list is DRAINING, or REMOVED with `drain` False."""

    source = Source.FILE

    def __init__(self, path: str, *, poll_s: float = 1.0, drain: bool = True) -> None:
        self.problem: str | None = None
        self._path = path
        self._poll_s = poll_s
        self._vanished = ChangeKind.DRAINING if drain else ChangeKind.REMOVED
        self._workers: dict[str, Worker] = {}
        self._taken: _Version | None = None
        self._seen: _Version | None = None

    async def changes(self) -> AsyncIterator[WorkerChange]:
        """Never ends."""
        while True:
            found = await asyncio.to_thread(self._look)
            if found is not None:
                before, self._workers = self._workers, found
                for each in differences(before, found, self._vanished):
                    yield each
            await asyncio.sleep(self._poll_s)

    def _look(self) -> dict[str, Worker] | None:
        """The new list; None if there is none, or none that can be used."""
        try:
            version = self._read()
            if version == self._taken:
                self._seen = version
                self._told(None)
                return None
            settled = version == self._seen or time.time() - version[0] / 1e9 > self._poll_s
            self._seen = version
            if not settled:
                return None
            workers = self._parse(version[1])
            if self._read() != version:  # parsing read the file again
                return None
        except OSError as error:
            self._told(f"{self._path}: {error.strerror or error}")
            return None
        except (UserError, ValueError, RecursionError) as error:
            self._told(f"{self._path}: {error}" if not isinstance(error, UserError) else str(error))
            return None
        self._taken = version
        self._told(None)
        return workers

    def _read(self) -> _Version:
        with open(self._path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()

    def _parse(self, content: bytes) -> dict[str, Worker]:
        text = content.decode(errors="replace")
        if not text.strip():
            raise UserError(f"{self._path}: is empty; write [] for no workers")
        return by_name(read_lines(text, self._path) if is_lines(text) else load_workers(self._path))

    def _told(self, problem: str | None) -> None:
        if problem == self.problem:
            return
        if problem is not None:
            log.warning("the workers file is not used, the last good list stays: %s", problem)
        else:
            log.info("the workers file %s is good again", Path(self._path).name)
        self.problem = problem
