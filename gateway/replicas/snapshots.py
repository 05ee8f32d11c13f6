"""What is known of each rank's blocks, kept in Redis for a gateway that starts: it goes on from there instead of from
nothing, where the engine's own history confirms that nothing is missing between (`indexer/saved_rank.py`).

One replica writes, whoever has the lease; two that write after a failover only overwrite each other's. One rank at a
time, in pieces, so that neither Redis nor the event loop stands still for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gateway.engine.subscriber import EventIngest
from gateway.replicas import codec
from gateway.replicas.counts import Counts
from gateway.replicas.link import Client
from gateway.replicas.schema import LEASE_TTL_S, SNAPSHOT_TTL_S, Keys
from indexer import Holder, SavedRank

_log = logging.getLogger(__name__)
ROUND_S = 60.0
"""All ranks are written once in so long, where writing takes no more than `_SHARE` of the time."""
_LEAST_S = 1.0
"""Between two looks at whether there is something to write."""
_SHARE = 0.2
_ROUNDS_KEPT = 3
_PIECE_BYTES = 256 << 10
_MOST_BYTES = 64 << 20
_ID_BYTES = 8
_SAVE_S = 10.0
_TRIES = 10
_TRY_AGAIN_S = 0.1


class _WrittenAnewError(Exception):
    """While it was read."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    name: bytes
    n_bytes: int


_head = msgspec.msgpack.Decoder(_Head)
_rank = msgspec.msgpack.Decoder(SavedRank)
_HEAD = bytes([codec.VERSION])


class Snapshots:
    """`turn` again and again writes, if it is ours to; `read` once for a worker before its events are followed."""

    def __init__(
        self, writer: str, keys: Keys, ingest: EventIngest, counts: Counts, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = writer.encode()
        self._keys = keys
        self._ingest = ingest
        self._counts = counts
        self._round: Iterator[Holder] = iter(())
        self._left = 0
        self._n_ranks = 0
        self._now = now
        self._ttl_s = SNAPSHOT_TTL_S
        self.pause_s = _LEAST_S
        """Until the next turn."""

    async def turn(self, client: Client) -> None:
        """One rank. Raises what the client raises."""
        self.pause_s = _LEAST_S
        if await self._leads(client):
            if not self._left:
                ranks = sorted(self._ingest.status())
                self._round, self._left = iter(ranks), len(ranks)
                self._n_ranks = len(ranks)
            if self._left:
                self._left -= 1
                began_s = self._now()
                await self._write(client, next(self._round))
                self._pace(self._now() - began_s)

    def _pace(self, took_s: float) -> None:
        """A large fleet is written as often as a small one, or else is kept for longer."""
        self.pause_s = max(ROUND_S / self._n_ranks, took_s * (1 / _SHARE - 1))
        round_s = self._n_ranks * (self.pause_s + took_s)
        self._ttl_s = max(SNAPSHOT_TTL_S, math.ceil(_ROUNDS_KEPT * round_s))

    async def read(self, client: Client, worker: str, ranks: list[int]) -> dict[int, SavedRank]:
        """What there is of it. Raises what the client raises."""
        found: dict[int, SavedRank] = {}
        for rank in ranks:
            data = await self._read_whole(client, (worker, rank))
            if data is None:
                continue
            try:
                found[rank] = await asyncio.to_thread(_rank.decode, data)
            except msgspec.DecodeError:
                self._counts.ignored("malformed")
        return found

    async def _leads(self, client: Client) -> bool:
        ask: Any = client
        if await ask.set(self._keys.lease, self._name, nx=True, ex=LEASE_TTL_S):
            return True
        (holder,) = await ask.mget([self._keys.lease])
        if holder == self._name:
            await ask.expire(self._keys.lease, LEASE_TTL_S)
        return bool(holder == self._name)

    async def _write(self, client: Client, holder: Holder) -> None:
        saved = await self._saved(holder)
        if saved is None or not saved.n_blocks:
            return
        data = await asyncio.to_thread(msgspec.msgpack.encode, saved)
        if len(data) > _MOST_BYTES:
            return
        ask: Any = client
        name = secrets.token_bytes(_ID_BYTES)
        for i, start in enumerate(range(0, len(data), _PIECE_BYTES)):
            piece = name + data[start : start + _PIECE_BYTES]
            await ask.set(self._keys.piece(holder, i), piece, ex=self._ttl_s)
            self._counts.sent(len(piece))
        head = _HEAD + msgspec.msgpack.encode(_Head(name, len(data)))
        await ask.set(self._keys.snapshot(holder), head, ex=self._ttl_s)

    async def _saved(self, holder: Holder) -> SavedRank | None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[SavedRank | None] = loop.create_future()

        def tell(saved: SavedRank | None) -> None:
            if not done.done():
                done.set_result(saved)

        def told(saved: SavedRank | None) -> None:
            loop.call_soon_threadsafe(tell, saved)

        self._ingest.save(*holder, told)
        try:
            async with asyncio.timeout(_SAVE_S):
                return await done
        except TimeoutError:
            return None  # Events have its thread; the next round is soon.

    async def _read_whole(self, client: Client, holder: Holder) -> bytes | None:
        for _ in range(_TRIES):
            with contextlib.suppress(_WrittenAnewError):
                return await self._read(client, holder)
            await asyncio.sleep(_TRY_AGAIN_S)
        return None

    async def _read(self, client: Client, holder: Holder) -> bytes | None:
        ask: Any = client
        (head,) = await ask.mget([self._keys.snapshot(holder)])
        if head is None or head[:1] != _HEAD:
            return None
        try:
            it = _head.decode(head[1:])
        except msgspec.DecodeError:
            self._counts.ignored("malformed")
            return None
        if not 0 < it.n_bytes <= _MOST_BYTES:
            return None
        out = bytearray()
        for i in range(-(-it.n_bytes // _PIECE_BYTES)):
            (piece,) = await ask.mget([self._keys.piece(holder, i)])
            if piece is None:
                return None
            if piece[:_ID_BYTES] != it.name:
                raise _WrittenAnewError
            self._counts.received(len(piece))
            out += piece[_ID_BYTES:]
        return bytes(out) if len(out) == it.n_bytes else None
