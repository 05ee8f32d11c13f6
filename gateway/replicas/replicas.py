"""The tasks that share with other replicas, from start to close. None holds up a request, whatever Redis does."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.config.schema import RedisConfig
from gateway.engine.subscriber import EventIngest
from gateway.errors import UserError
from gateway.replicas.counts import Counts
from gateway.replicas.link import FAILURES, Client, Link, clients, failure
from gateway.replicas.publisher import Publisher
from gateway.replicas.reader import Reader
from gateway.replicas.schema import Keys
from gateway.replicas.snapshots import Snapshots
from gateway.stored import StoredResponses
from indexer import SavedRank
from scorer.planner import Planner

_log = logging.getLogger(__name__)
_READ_AT_ONCE = 4
_LONGEST_READ_S = 3.0
"""So long may what others have kept of a worker take to read."""
_LONGEST_WAIT_S = 30.0
"""So long at most the events of a worker are not followed because others are read before it. To replay them all, as is
done then, takes longer where so many wait.
"""
_HUB_PATIENCE = 4
"""So many attempts, over 2 to 4 s, may find no hub: it starts beside its processes, and is succeeded by another."""
_HUB_FAILURES = {
    "unreachable": "no connection: it is started again by itself; the log says why it ended",
    "slow": "no answer in a second: the machine, or its core, has too much to do",
    "misread": "unexpected: the gateway's log has it",
}


class Replicas:
    """Create it with `redis.url` set; raises UserError for what cannot work. `start` in a running event loop."""

    def __init__(
        self,
        config: RedisConfig,
        planner: Planner,
        stored: StoredResponses,
        registry: CollectorRegistry,
        rng: random.Random,
        env: Mapping[str, str] = os.environ,
        *,
        ingest: EventIngest | None,
        session_idle_s: float = 3600.0,
        hub: Callable[[float], Any] | None = None,
    ) -> None:
        """`hub`: makes clients, which do as Redis's, of what stands in its place (gateway/processes)."""
        self.writer = secrets.token_hex(8)
        """Another one for each life of a process, so that nobody mixes up two of them."""
        self._config = config
        self._planner = planner
        self._rng = rng
        self._is_hub = hub is not None
        self._connect = clients(config, _password(config, env)) if hub is None else hub
        self.counts = Counts(registry)
        keys = Keys(config.prefix, config.fleet)
        self.publisher = Publisher(self.writer, keys, planner, self.counts, config.ttl_s, session_idle_s)
        self._op_timeout_s = config.op_timeout_ms / 1000
        self.reader = Reader(
            self.writer, keys, planner, stored, self.counts, ttl_s=config.ttl_s, op_timeout_s=self._op_timeout_s
        )
        patience = 0 if hub is None else _HUB_PATIENCE
        self._telling = Link("telling other replicas", config.mode, self.counts.failed, patience)
        self._hearing = Link("hearing other replicas", config.mode, self.counts.failed, patience)
        self._keeping = Link("keeping what is cached where for replicas that start", config.mode, self.counts.failed)
        self.snapshots = None if ingest is None else Snapshots(self.writer, keys, ingest, self.counts)
        """None where an indexer follows the engines, which has its own."""
        self._reading = asyncio.Semaphore(_READ_AT_ONCE)
        self._stored = stored
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def is_shared(self) -> bool:
        """Whether both ways work now."""
        return self._telling.is_up and self._hearing.is_up

    def start(self) -> None:
        self._planner.tell(self.publisher.journal)
        self._stored.tell = self.publisher.response
        loop = asyncio.get_running_loop()
        interval_s = self._config.interval_ms / 1000
        telling = self._run(self._telling, self._op_timeout_s, self._tell, self._untold, lambda: interval_s)
        hearing = self._run(self._hearing, self.reader.longest_s, self._hear, self.reader.lost, lambda: interval_s / 2)
        coroutines = [telling, hearing, self._watch()]
        snapshots = self.snapshots
        if snapshots is not None:
            coroutines.append(
                self._run(self._keeping, self._op_timeout_s, snapshots.turn, lambda: None, lambda: snapshots.pause_s)
            )
        self._tasks = [loop.create_task(each, name="replicas") for each in coroutines]

    async def close(self) -> None:
        """Say good-bye, if Redis lets us."""
        self._planner.tell(None)
        self._stored.tell = None
        self._closing = True
        running = set(self._tasks)
        while running:  # One that is told in the middle of an answer may take it for the answer's end.
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.1)
        if self._tasks and self._telling.is_up:
            with suppress(Exception):
                async with asyncio.timeout(self._op_timeout_s + self._config.connect_timeout_s):
                    client = self._connect(self._op_timeout_s)
                    try:
                        await self.publisher.leave(client)
                    finally:
                        await client.aclose()
        self._tasks = []

    def _is_lost(self) -> bool:
        return self._hearing.problem is not None

    async def saved(self, worker: str, ranks: list[int]) -> dict[int, SavedRank]:
        """What is kept of a worker's ranks; nothing if that cannot be had soon."""
        if self.snapshots is None or self._is_lost():
            return {}
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                await self._reading.acquire()
        except TimeoutError:
            self.counts.failed("slow")
            return {}
        try:
            if self._is_lost():  # Which those before it have waited for.
                return {}
            async with asyncio.timeout(_LONGEST_READ_S):
                client = self._connect(_LONGEST_READ_S)  # While much is replayed, this process may be what is slow.
                try:
                    return await self.snapshots.read(client, worker, ranks)
                finally:
                    await client.aclose()
        except Exception as exc:
            self.counts.failed(failure(exc, self._config.mode))
            return {}
        finally:
            self._reading.release()

    def degraded(self) -> Iterator[tuple[str, str]]:
        """(kind, what is wrong and what to do)"""
        for link in (self._telling, self._hearing, self._keeping):
            if link.problem is not None:
                yield "replicas_apart", self._told(link.name, link.problem)
        if self.reader.hears_other_version:
            yield "replicas_apart", "a replica of another version is there, whose load is not understood: update it"
        if strangers := self.reader.strangers:
            names = ", ".join(strangers[:3]) + (", ..." if strangers[3:] else "")
            yield (
                "replicas_apart",
                f"others use workers that are not here ({names}): name the same ones alike everywhere",
            )

    def _told(self, what: str, problem: str) -> str:
        if self._is_hub:
            return f"the hub, for {what}: {_HUB_FAILURES.get(problem, _HUB_FAILURES['misread'])}"
        return f"Redis, for {what}: {FAILURES[problem].format(password_env=self._config.password_env)}"

    async def _run(
        self,
        link: Link,
        timeout_s: float,
        turn: Callable[[Client], Awaitable[None]],
        failed: Callable[[], None],
        pause_s: Callable[[], float],
    ) -> None:
        """`turn` with a client, over and over, with pauses; a new client after a failure."""
        wait_s = 0.0
        while not self._closing:
            client = self._connect(timeout_s)
            try:
                while not self._closing:
                    await turn(client)
                    link.works()
                    await asyncio.sleep(pause_s())
            except Exception as exc:
                wait_s = link.fails(exc, self._rng)
                failed()
            finally:
                with suppress(Exception):
                    async with asyncio.timeout(1.0):
                        await client.aclose()
            await asyncio.sleep(wait_s)

    async def _tell(self, client: Client) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.publisher.due_in_s()):
                await self.publisher.wanted.wait()
        async with asyncio.timeout(self._longest_s(self._op_timeout_s)):
            await self.publisher.send(client)

    def _untold(self) -> None:
        self.publisher.drop()

    async def _hear(self, client: Client) -> None:
        async with asyncio.timeout(self._longest_s(self.reader.longest_s)):
            await self.reader.turn(client)

    def _longest_s(self, answer_s: float) -> float:
        """However the client counts, a turn is over by then: connecting, also by way of others, and some answers."""
        return 2 * self._config.connect_timeout_s + 4 * answer_s

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.ttl_s / 10)
            try:
                self.reader.expire()
                if not self._telling.is_up:
                    self.publisher.drop()
                self.counts.up.set(self.is_shared)
            except Exception:
                _log.exception("unexpected; going on")


def _password(config: RedisConfig, env: Mapping[str, str]) -> Callable[[], str | None]:
    """Reads it anew each time. Raises UserError for a file that cannot be read."""

    def read() -> str | None:
        if config.password_file is None:
            return env.get(config.password_env) or None
        try:
            with open(config.password_file, encoding="utf-8") as file:
                return file.read(4096).strip() or None
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "no text"
            raise UserError(f"redis.password_file: {config.password_file}: {reason}") from None

    read()
    return read
