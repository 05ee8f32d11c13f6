"""What `gateway/replicas` uses of a Redis client, spoken to the board in the hub."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gateway.processes.frames import MOST_BYTES, frame, read_frame

_TIMES_AS_MANY = 16
"""Entries are kept as a Redis would: processes tell each other more often, so that a second of theirs is more."""


class BoardRefusedError(Exception):
    """The board does not take a command."""


class BoardClient:
    """One connection, made with the first command. After an error it is of no use any more. `timeout_s`: longest wait
    for an answer. Raises OSError and TimeoutError where the hub does not answer.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, commands: Sequence[Sequence[Any]], wait_s: float = 0.0) -> list[Any]:
        """Their answers; the last command may be waited for, for so long."""
        async with asyncio.timeout(self._timeout_s + wait_s):
            if self._writer is None or self._reader is None:
                self._reader, self._writer = await asyncio.open_unix_connection(self._path, limit=MOST_BYTES)
            self._writer.write(frame([wait_s, commands]))
            await self._writer.drain()
            answer: dict[str, Any] = await read_frame(self._reader)
        if "error" in answer:
            raise BoardRefusedError(answer["error"])
        found: list[Any] = answer["found"]
        return found

    async def aclose(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()

    # ---- as redis.asyncio names them ---------------------------------------------------------------------------------

    def pipeline(self, *, transaction: bool = False) -> Pipeline:
        return Pipeline(self)

    async def xrevrange(self, key: str, count: int) -> Any:
        return await self._one("xrevrange", key, count)

    async def xread(self, streams: Mapping[str, bytes], count: int, block: int) -> Any:
        """`block`: for so many milliseconds it is waited for something."""
        ((key, after),) = streams.items()
        entries = (await self.ask([["xread", key, after, count]], block / 1000))[0]
        return [(key, entries)] if entries else []

    async def smembers(self, key: str) -> Any:
        return await self._one("smembers", key)

    async def mget(self, keys: Sequence[str]) -> Any:
        return await self._one("mget", list(keys))

    async def srem(self, key: str, *members: str) -> Any:
        return await self._one("srem", key, *(member.encode() for member in members))

    async def _one(self, *command: Any) -> Any:
        return (await self.ask([command]))[0]


class Pipeline:
    """Commands sent together by `execute`."""

    def __init__(self, client: BoardClient) -> None:
        self._client = client
        self._commands: list[Sequence[Any]] = []

    def xadd(self, key: str, fields: Mapping[bytes, bytes | str], *, maxlen: int, approximate: bool = True) -> None:
        said = {name: value.encode() if isinstance(value, str) else value for name, value in fields.items()}
        self._commands.append(["xadd", key, said, _TIMES_AS_MANY * maxlen])

    def set(self, key: str, value: bytes, *, px: int | None = None, ex: int | None = None) -> None:
        self._commands.append(["set", key, value, ex if px is None else px / 1000])

    def expire(self, key: str, ttl_s: int) -> None:
        self._commands.append(["expire", key, ttl_s])

    def sadd(self, key: str, *members: str) -> None:
        self._commands.append(["sadd", key, *(member.encode() for member in members)])

    def delete(self, *keys: str) -> None:
        self._commands.append(["delete", *keys])

    async def execute(self) -> list[Any]:
        commands, self._commands = self._commands, []
        return await self._client.ask(commands)
