"""Where keys come from: a file that is followed, and a variable of the environment.

A file counts once it was the same at two looks, so that half of one is not taken. One that cannot be used changes
nothing and is told until it is mended; so does one that is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway.auth.door import Door, MakeAccount, own_account
from gateway.auth.keys import Key, KeysError, keys_of_variable, read_keys
from gateway.config.schema import AuthConfig
from gateway.errors import UserError

_log = logging.getLogger(__name__)
REJECTED = "keys_rejected"


class KeySource:
    """`door` has its keys from here."""

    def __init__(
        self,
        settings: AuthConfig,
        environment: Mapping[str, str],
        registry: CollectorRegistry,
        engine_key: str,
        account: MakeAccount = own_account,
    ) -> None:
        """Raises UserError."""
        self.problem: str | None = None
        """Why the file as it is now is not in force."""
        self._file = settings.keys_file
        self._unread = ""
        self._given: tuple[Key, ...] = ()
        if settings.keys_env is not None:
            self._given = keys_of_variable(environment.get(settings.keys_env, ""), settings.keys_env)
        content = self._content()
        if self._file is not None and content is None:
            raise UserError(f"auth.keys_file: {self._unread}")
        self._taken = self._seen = content
        self.door = Door(self._keys(content), registry, engine_key=engine_key, account=account)

    @classmethod
    def of(
        cls,
        settings: AuthConfig,
        environment: Mapping[str, str],
        registry: CollectorRegistry,
        engine_key: str,
        account: MakeAccount = own_account,
    ) -> KeySource | None:
        """None: requests need no key. Raises UserError."""
        if settings.keys_file is None and settings.keys_env is None:
            return None
        return cls(settings, environment, registry, engine_key, account)

    async def look(self) -> None:
        """Read the file again if it has changed; call it every few seconds."""
        if self._file is None:
            return
        content = await asyncio.to_thread(self._content)
        settled, self._seen = content == self._seen, content
        if content is None and settled:
            self._told(self._unread)
        elif settled and content != self._taken:
            self._take(content)

    def reload(self) -> None:
        """Read it again at once."""
        if self._file is not None:
            self._take(self._content())

    def degraded(self) -> Iterator[tuple[str, str]]:
        """(kind, detail)"""
        if self.problem is not None:
            yield REJECTED, f"API keys as they were before are in force: {self.problem}"

    def _take(self, content: bytes | None) -> None:
        self._taken = content
        if content is None:
            self._told(self._unread)
            return
        try:
            self.door.replace(self._keys(content))
        except UserError as exc:
            self._told(str(exc))
            return
        self._told(None)
        _log.info("%d API keys are in force", len(self.door))

    def _keys(self, content: bytes | None) -> tuple[Key, ...]:
        if content is None or self._file is None:
            return self._given
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise KeysError(f"{self._file}: is not UTF-8 text") from None
        keys = read_keys(text, self._file)
        known = {digest for key in self._given for digest in key.digests}
        names = {(key.tenant, key.name) for key in self._given}
        for key in keys:
            if known.intersection(key.digests) or (key.tenant, key.name) in names:
                raise KeysError(f"{self._file}: the key {key.name} of {key.tenant} is in the environment too")
        return (*self._given, *keys)

    def _content(self) -> bytes | None:
        if self._file is None:
            return None
        try:
            return Path(self._file).read_bytes()
        except OSError as exc:
            self._unread = f"{self._file} cannot be read ({exc.strerror or exc})"
            return None

    def _told(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            _log.error("the API keys are not taken, those before stay in force: %s", problem)
        self.problem = problem
