"""What was learned of the fleet, kept in a file from one life of the process to the next."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gateway.config.schema import LearningConfig
from scorer.calibrate import Calibration

_log = logging.getLogger(__name__)
VERSION = 1
_VERSION_KEY = "warmroute_learned_version"
_OURS = re.compile(rb'\s*\{\s*"%s"' % _VERSION_KEY.encode())
"""How a file of ours begins, whatever became of the rest. Others are never written over."""
_SAVE_S = 120.0
_MOST_BYTES = 16 << 20
_LOST = "what is learned is lost at a restart"


class _Unusable(Exception):
    """The file cannot be used, as the text says. `ours`: it may be written over."""

    def __init__(self, why: str, *, ours: bool) -> None:
        super().__init__(why)
        self.ours = ours


class LearnedFile:
    """Read once by `start`, written every two minutes and by `close` if anything changed. `path` None: never. Whatever
    is wrong with the file is a warning and `problem`, and what is learned then lasts as long as the process.
    """

    def __init__(self, path: str | None, calibration: Calibration) -> None:
        self.path = path
        self.problem: str | None = None
        self.loaded = 0
        """Factors taken over from the file."""
        self._calibration = calibration
        self._kept = _content(Calibration())
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """In a running event loop."""
        if self.path is None:
            _log.info("%s; learning.file names a file that keeps it", _LOST)
            return
        try:
            self._load(self.path)
        except _Unusable as exc:
            if not exc.ours:
                self._told(f"{self.path} {exc}. It stays as it is, and {_LOST}: move it away, or name another file")
                return
            self._told(f"{self.path} {exc}. All is learned anew, and the file written anew")
        else:
            folder = os.path.dirname(os.path.realpath(self.path))
            try:
                _try_writing(folder)
            except OSError as exc:
                self._told(
                    f"{folder} cannot be written to ({exc.strerror or exc}), so {_LOST}: mend it or name another"
                )
        self._task = asyncio.get_running_loop().create_task(self._keep(self.path), name="learned")

    async def close(self) -> None:
        """Write what there is."""
        self._stop.set()
        if self._task is not None:
            await self._task

    async def _keep(self, path: str) -> None:
        stopping = False
        while not stopping:
            with suppress(TimeoutError):
                stopping = await asyncio.wait_for(self._stop.wait(), _SAVE_S)
            try:
                await self._save(path)
            except Exception:
                _log.exception("unexpected; going on")

    async def _save(self, path: str) -> None:
        content = _content(self._calibration)
        if content == self._kept:
            return
        try:
            await asyncio.to_thread(_write, path, content)
        except OSError as exc:
            self._told(f"{path} cannot be written ({exc.strerror or exc}), so {_LOST}")
        else:
            self._kept = content
            self._told(None)

    def _load(self, path: str) -> None:
        """Raises _Unusable."""
        content = _read(path)
        if not content.strip():
            return
        try:
            state: Any = msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError):
            if _OURS.match(content):
                raise _Unusable("is damaged", ours=True) from None
            state = None
        if not isinstance(state, dict) or _VERSION_KEY not in state:
            raise _Unusable("is no file of learned factors", ours=False)
        if (version := state[_VERSION_KEY]) != VERSION:
            newer = isinstance(version, int) and version > VERSION  # A downgrade that is taken back finds its file.
            raise _Unusable(f"is of another format ({version!r:.20}) than {VERSION}", ours=not newer)
        bad = self._calibration.load(state)
        self.loaded = len(self._calibration.factors())
        self._kept = content
        _log.info("took over %d learned factors from %s", self.loaded, path)
        if bad:
            _log.warning("%s: %d entries could not be read and are left out", path, bad)

    def _told(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            _log.warning("%s", problem)
        self.problem = problem


def learned_path(learning: LearningConfig, env: Mapping[str, str]) -> str | None:
    """Where to keep it, given the process environment."""
    if learning.file is not None:
        return learning.file
    folder = env.get("STATE_DIRECTORY", "").partition(":")[0]  # Absolute paths, separated by colons: systemd.exec(5).
    return str(Path(folder, "learned.json")) if folder else None


def _content(calibration: Calibration) -> bytes:
    return msgspec.json.encode({_VERSION_KEY: VERSION, **calibration.state()}) + b"\n"


def _read(path: str) -> bytes:
    """Empty if there is none. Raises _Unusable."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _Unusable("is no regular file", ours=False)
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return b""
    except OSError as exc:
        raise _Unusable(f"cannot be read ({exc.strerror or exc})", ours=False) from None
    if len(content) > _MOST_BYTES:
        raise _Unusable("is too large for a file of learned factors", ours=False)
    return content


def _try_writing(folder: str) -> None:
    """Raises OSError. Permissions alone do not tell: a file system may be read-only."""
    handle, temporary = tempfile.mkstemp(dir=folder)
    os.close(handle)
    os.unlink(temporary)


def _write(path: str, content: bytes) -> None:
    """All of it or nothing, readable by us alone. Raises OSError."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(target)}.", dir=folder)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
