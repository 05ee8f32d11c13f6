"""`warmroute.indexer.v1` on grpc.aio: on a port, on a Unix socket, or on both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
import msgspec

from gateway.errors import UserError
from gateway.extproc.on_grpcio import health_handler
from gateway.indexservice.answers import Answers
from gateway.indexservice.guard import MOST_MATCHES, MOST_WATCHERS, TokenDemanded
from gateway.indexservice.publisher import Publisher, knowledge
from gateway.indexservice.questions import BadQuestion, prompt_of
from gateway.indexservice.wire import sections
from gateway.pb import indexer_pb2 as pb
from gateway.rpc import Context, bind, host_port, question
from indexer import Holder, PrefixIndex

_log = logging.getLogger(__name__)
T = TypeVar("T")

SERVICE = "warmroute.indexer.v1.Indexer"
MOST_MESSAGE_BYTES = 8 << 20
_UPDATE_BYTES = 256 << 10
_SECTION_BLOCKS = 32_768
_HEARTBEAT_S = 1.0
_SNAPSHOTS_AT_ONCE = 2
"""More would not be sooner done, and hold up lookups."""
_TOO_SLOW = "this watcher fell behind what is kept; begin anew"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """port None, socket None: not there. token: what calls to the port must show. write_timeout_s: a watcher that takes
    no message for so long is cut off.
    """

    host: str = "127.0.0.1"
    port: int | None = 0
    socket: str | None = None
    credentials: grpc.ServerCredentials | None = None
    token: str | None = None
    write_timeout_s: float = 30.0


class Counts(msgspec.Struct):
    """watchers: now. cut: watchers that were too slow. refused: questions that were none. turned_away: as
    there were too many at once.
    """

    watchers: int = 0
    watches: int = 0
    resumed: int = 0
    snapshots: int = 0
    cut: int = 0
    matches: int = 0
    refused: int = 0
    turned_away: int = 0
    unauthenticated: int = 0


class IndexServer:
    """In a running event loop: `start`, later `drain` and `close`. `ready` says whether it knows enough to be asked;
    `forget` is told of a worker whose cache was emptied, and says whether it is known.
    """

    def __init__(
        self,
        index: PrefixIndex,
        publisher: Publisher,
        settings: Settings,
        *,
        ready: Callable[[], bool] = lambda: True,
        forget: Callable[[str], bool] = lambda worker: False,
    ) -> None:
        self.counts = Counts()
        self.port = 0
        self.draining = False
        self._index = index
        self._publisher = publisher
        self._answers = Answers(index, publisher)
        self._settings = settings
        self._ready = ready
        self._forgotten = forget
        self._servers: list[grpc.aio.Server] = []
        self._calls = self._copying = 0
        self._ending = asyncio.Event()
        self._reading = asyncio.Semaphore(_SNAPSHOTS_AT_ONCE)
        self._version = version("warmroute")

    async def start(self) -> None:
        """Raises UserError where it cannot listen."""
        settings = self._settings
        if settings.port is not None:
            guards = [] if settings.token is None else [TokenDemanded(settings.token, SERVICE, self._count_stranger)]
            self.port = await self._listen(host_port(settings.host, settings.port), settings.credentials, guards)
        if settings.socket is not None:
            _clear_socket(settings.socket)
            await self._listen(f"unix:{settings.socket}", None, [])
        _log.info("the index is served on port %s, socket %s", self.port or "none", settings.socket or "none")

    def _count_stranger(self) -> None:
        self.counts.unauthenticated += 1

    async def _listen(
        self, address: str, credentials: grpc.ServerCredentials | None, guards: list[TokenDemanded]
    ) -> int:
        server = grpc.aio.server(interceptors=guards, options=_OPTIONS)
        server.add_generic_rpc_handlers([self._handler(), health_handler(self.is_serving)])
        try:
            bound = bind(server, address, credentials)
        except OSError:
            raise UserError(f"cannot listen on {address}: it is in use, or not an address of this machine") from None
        await server.start()
        self._servers.append(server)
        return bound

    def is_serving(self) -> bool:
        return self._ready() and not self.draining

    async def drain(self, least_s: float, most_s: float) -> int:
        """Watchers are told to go elsewhere; questions are answered for `least_s` more. How many watchers are left."""
        self.draining = True
        self._ending.set()
        await asyncio.sleep(min(least_s, most_s))
        return self.counts.watchers

    async def close(self) -> None:
        self.draining = True
        self._ending.set()
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        if self._settings.socket is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._settings.socket)

    def _handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "Match": self._counted(self._match, pb.MatchRequest.FromString),
            "Watch": self._counted(self._watch, pb.WatchRequest.FromString),
            "Snapshot": self._counted(self._snapshot, pb.SnapshotRequest.FromString),
            "Stats": self._counted(self._stats, pb.StatsRequest.FromString),
            "Forget": self._counted(self._forget, pb.ForgetRequest.FromString),
        }
        served: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, served)

    def _counted(
        self, method: Callable[[T, Context], Awaitable[bytes | None]], read: Callable[[bytes], T]
    ) -> Callable[[object, Context], Awaitable[None]]:
        """`method` (None: it has written its answers itself) where not too many run. Strangers and health take no
        place.
        """

        async def serve(_: object, context: Context) -> None:
            most = MOST_WATCHERS + MOST_MATCHES
            if self._calls >= most:
                self.counts.turned_away += 1
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{most} calls run, the most")
            self._calls += 1
            try:
                answer = await method(await question(context, read), context)
                if answer is not None:
                    await context.write(answer)
            finally:
                self._calls -= 1

        return serve

    # ---- questions ---------------------------------------------------------------------------------------------------

    async def _match(self, request: pb.MatchRequest, context: Context) -> bytes:
        self.counts.matches += 1
        await self._refuse_unready(context)
        try:
            prompt = prompt_of(request)
            found = self._index.match(prompt, model=request.model or None, lora=request.lora or None)
        except (BadQuestion, ValueError) as exc:
            self.counts.refused += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        return self._answers.of(found)

    async def _stats(self, request: pb.StatsRequest, context: Context) -> bytes:
        publisher, index = self._publisher, self._index
        held = index.held_tokens()
        digests = await asyncio.to_thread(index.digests)
        answer = pb.StatsResponse(
            instance=publisher.instance,
            sequence=publisher.history.sequence,
            version=self._version,
            index_bytes=index.bytes_used(),
            watchers=self.counts.watchers,
            ready=self.is_serving(),
        )
        for worker, rank in sorted({*held, *publisher.feeds}):
            feed, tokens = publisher.feeds.get((worker, rank)), held.get((worker, rank), {})
            blocks = index.resident_blocks((worker, rank))
            n_keys, keys_sum = digests.get((worker, rank), (0, 0))
            answer.entries += blocks
            answer.holders.add(
                worker=worker,
                rank=rank,
                knowledge=knowledge(feed),
                feed=feed,
                gpu_tokens=tokens.get("gpu", 0),
                cpu_tokens=tokens.get("cpu", 0),
                disk_tokens=tokens.get("disk", 0),
                resident_blocks=blocks,
                digest=pb.Digest(blocks=n_keys, keys_sum=keys_sum),
            )
        return answer.SerializeToString()

    async def _forget(self, request: pb.ForgetRequest, context: Context) -> bytes:
        if not self._forgotten(request.worker):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no worker of that name is followed")
        return pb.ForgetResponse().SerializeToString()

    async def _refuse_unready(self, context: Context) -> None:
        if not self.is_serving():
            why = "this indexer is going down" if self.draining else "this indexer is still catching up"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)

    async def _refuse_more(self, context: Context) -> None:
        if self._copying >= MOST_WATCHERS:
            self.counts.turned_away += 1
            why = f"{MOST_WATCHERS} copies are kept or read, the most"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)

    # ---- copies ------------------------------------------------------------------------------------------------------

    async def _snapshot(self, request: pb.SnapshotRequest, context: Context) -> None:
        await self._refuse_unready(context)
        await self._refuse_more(context)
        self._copying += 1
        try:
            async with aclosing(self._whole(self._publisher.instance)) as whole:
                async for update, _ in whole:
                    await self._write(context, update)
        except (LookupError, TimeoutError):
            self.counts.cut += 1
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, _TOO_SLOW)
        finally:
            self._copying -= 1

    async def _watch(self, request: pb.WatchRequest, context: Context) -> None:
        await self._refuse_unready(context)
        await self._refuse_more(context)
        self._copying += 1
        self.counts.watchers += 1
        self.counts.watches += 1
        try:
            await self._tell(request, context)
        except LookupError:
            self.counts.cut += 1
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, _TOO_SLOW)
        except TimeoutError:
            self.counts.cut += 1
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_SLOW)
        finally:
            self.counts.watchers -= 1
            self._copying -= 1

    async def _tell(self, request: pb.WatchRequest, context: Context) -> None:
        publisher = self._publisher
        history, instance, at = publisher.history, publisher.instance, request.sequence
        if request.instance == instance and history.has_all_after(at):
            self.counts.resumed += 1
            begin = pb.Begin(instance=instance, resumed=True, sequence=at, version=self._version)
            await self._write(context, pb.Update(begin=begin).SerializeToString())
        else:
            async with aclosing(self._whole(instance)) as whole:
                async for update, told in whole:
                    await self._write(context, update)
                    at = told
        while not self._ending.is_set():
            if publisher.instance != instance:
                raise LookupError(at)
            if history.sequence == at:
                await history.wait(at, _HEARTBEAT_S)
            if history.sequence == at:
                update = pb.Update(sequence=at).SerializeToString()
            else:
                update, at = history.after(at, _UPDATE_BYTES)
            await self._write(context, update)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "this indexer is going down")

    async def _whole(self, instance: str) -> AsyncGenerator[tuple[bytes, int], None]:
        """All there is, while it goes on changing: (an update, the delta up to which all were told by then). Raises
        LookupError where it changes faster than it is taken.
        """
        publisher, history = self._publisher, self._publisher.history
        self.counts.snapshots += 1
        publisher.look()
        waiting = [*publisher.flush()]
        waiting += [holder for holder in publisher.feeds if holder not in set(waiting)]
        at = history.sequence
        begin = pb.Begin(instance=instance, sequence=at, version=self._version)
        yield pb.Update(begin=begin).SerializeToString(), at
        told: set[Holder] = set()
        while not await self._may_read():
            yield pb.Update(sequence=at).SerializeToString(), at
        try:
            while waiting:
                for holder in waiting:
                    reading = asyncio.ensure_future(asyncio.to_thread(self._sections, holder))
                    while not (await asyncio.wait({reading}, timeout=_HEARTBEAT_S))[0]:
                        yield pb.Update(sequence=at).SerializeToString(), at
                    for section in reading.result():
                        yield section, at
                    told.add(holder)
                    while history.sequence != at:
                        update, at = history.after(at, _UPDATE_BYTES)
                        yield update, at
                # What is not told of by now came after all that is among the deltas.
                there = publisher.flush()
                waiting = [holder for holder in there if holder not in told]
        finally:
            self._reading.release()
        while history.sequence != at:
            update, at = history.after(at, _UPDATE_BYTES)
            yield update, at
        yield pb.Update(end=pb.End(sequence=at)).SerializeToString(), at

    async def _may_read(self) -> bool:
        """Whether a snapshot may be read by now; else somebody waits for a sign of life."""
        try:
            return await asyncio.wait_for(self._reading.acquire(), _HEARTBEAT_S)
        except TimeoutError:
            return False

    def _sections(self, holder: Holder) -> list[bytes]:
        publisher = self._publisher
        found = sections(
            *holder,
            publisher.journal.read(holder),
            most_blocks=_SECTION_BLOCKS,
            feed=publisher.feeds.get(holder),
            adapters=publisher.journal.adapters_of(holder[0]),
        )
        return [pb.Update(sections=[section]).SerializeToString() for section in found]

    async def _write(self, context: Context, update: bytes) -> None:
        """Raises TimeoutError for a client that takes nothing for too long."""
        await asyncio.wait_for(context.write(update), self._settings.write_timeout_s)


_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]


def _clear_socket(path: str) -> None:
    """A socket that an earlier process left is in the way; anything else is not ours. Raises UserError."""
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
            return
    except FileNotFoundError:
        return
    except OSError as exc:
        raise UserError(f"indexer.socket: {path}: {exc.strerror or exc}") from None
    raise UserError(f"indexer.socket: {path} is there, and no socket")
