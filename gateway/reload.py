"""The configuration read again, on SIGHUP or when its file has changed.

A configuration that cannot be used changes nothing, and is told until it is mended. Of a good one the keys marked
`live` in the schema are put in force; others that differ are named as waiting for a restart. A file counts once it was
the same at two looks, so that one half written is not taken; so does its absence. An empty one is a write that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from gateway.config import Config
from gateway.config.keys import dotted, leaves
from gateway.config.read import file_content
from gateway.debug.metrics import Metrics
from gateway.errors import UserError

_log = logging.getLogger(__name__)

KeyPath = tuple[str, ...]
REJECTED, PENDING = "config_rejected", "config_needs_restart"
LIVE = frozenset(path for path, key in leaves() if key.is_live)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a configuration came from: `read` does it once more and raises UserError; `file` None: from no file."""

    read: Callable[[], Config]
    file: str | None


class Reloading:
    """`given` is the configuration as it was read; `take(new, changed live keys)` puts it in force, or raises UserError
    and changes nothing. Sections in `foreign` are of no matter to this process.
    """

    def __init__(
        self,
        given: Config,
        source: Source,
        take: Callable[[Config, frozenset[KeyPath]], None],
        metrics: Metrics,
        *,
        foreign: Collection[str] = (),
    ) -> None:
        self.problem: str | None = None
        """Why the configuration last read is not in force."""
        self.pending: list[str] = []
        """Keys that differ from what is in force, until a restart."""
        self._first = self._given = given
        self._source = source
        self._take = take
        self._metrics = metrics
        self._foreign = frozenset(foreign)
        self._reading = asyncio.Lock()
        self._taken = self._seen = self._content()

    async def look(self) -> None:
        """Read it again if the file has changed; call it every few seconds."""
        content = await asyncio.to_thread(self._content)
        settled, self._seen = content == self._seen, content
        if settled and content != self._taken:
            await self.reload()

    async def reload(self) -> None:
        """Read it again: in a thread, as a thousand workers take a second in which answers must go on."""
        async with self._reading:
            try:
                self._apply(await asyncio.to_thread(self._read))
            except UserError as exc:
                self._refuse(str(exc))
            except Exception as exc:
                _log.exception("unexpected; the configuration before stays in force")
                self._refuse(f"{type(exc).__name__}, see the log")

    def _read(self) -> Config:
        self._taken = self._content()
        if self._source.file is not None:
            try:
                if not file_content(self._source.file).strip():
                    raise UserError(f"{self._source.file}: is empty; write {{}} for the defaults")
            except OSError as exc:
                raise UserError(f"{self._source.file}: {exc.strerror or exc}") from None
        return self._source.read()

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        self._metrics.reloaded("rejected")
        _log.error("the configuration is not taken, the one before stays in force: %s", problem)

    def _apply(self, new: Config) -> None:
        changed = frozenset(path for path in _changed(self._given, new) if path[0] not in self._foreign)
        self._take(new, changed & LIVE)
        self._given = new
        self.problem = None
        # Against what was there at the start, since that is what those keys still have.
        waiting = [path for path in _changed(self._first, new) if path[0] not in self._foreign and path not in LIVE]
        self.pending = sorted(map(dotted, waiting))
        self._metrics.reloaded("taken")
        _log.info("configuration read again; now in force: %s", ", ".join(sorted(map(dotted, changed & LIVE))) or "-")
        if self.pending:
            _log.warning("these keys need a restart: %s", ", ".join(self.pending))

    def degraded(self) -> Iterator[tuple[str, str]]:
        """(kind, detail)"""
        if self.problem is not None:
            yield REJECTED, f"the configuration as it is now cannot be used, an earlier one is in force: {self.problem}"
        if self.pending:
            yield PENDING, f"changed, and in force after a restart: {', '.join(self.pending)}"

    def _content(self) -> bytes | None:
        if self._source.file is None:
            return None
        try:
            return file_content(self._source.file)
        except OSError:
            return None  # On its way to be replaced, or gone.


def with_keys(config: Config, new: Config, paths: Collection[KeyPath]) -> Config:
    """`config` with the values that `new` has at `paths`."""
    for path in paths:
        config = _with(config, path, _at(new, path))
    return config


def _changed(before: Config, after: Config) -> Iterator[KeyPath]:
    return (path for path, _ in leaves() if _at(before, path) != _at(after, path))


def _at(value: Any, path: KeyPath) -> Any:
    for name in path:
        value = getattr(value, name)
    return value


def _with(struct: Any, path: KeyPath, value: Any) -> Any:
    name, *rest = path
    inner = _with(getattr(struct, name), tuple(rest), value) if rest else value
    return msgspec.structs.replace(struct, **{name: inner})
