"""A gateway that starts knows what the caches hold from the snapshots of another, as far as the engines confirm it."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec
import pytest

from gateway.replicas import replicas as replicas_module
from gateway.replicas import snapshots
from gateway.replicas.schema import Keys
from gateway.run import Gateway
from indexer import Holder, Prompt
from tests.support.gateway_world import engine, until
from tests.support.redis_server import KINDS, Kind, RedisServer, binary
from tests.support.replica_world import ReplicatedFleet, sharing

pytestmark = pytest.mark.hermetic
OLD = [5 + i % 200 for i in range(640)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if binary(kind) is None:
        pytest.skip(f"no {kind}-server here")
    return kind


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "ROUND_S", 0.1)
    monkeypatch.setattr(snapshots, "_LEAST_S", 0.05)


def known_tokens(gateway: Gateway) -> int:
    """Of the old prompt, at worker a, by events alone."""
    found = gateway.core.index.match(Prompt(array("I", OLD).tobytes()), model="tiny").get(("a", 0))
    return 0 if found is None else found.reach_tokens


async def fill(fleet: ReplicatedFleet, begin: int) -> None:
    """More batches than the engine keeps."""
    for i in range(20):
        await fleet.complete(0, [(begin + i) % 200 + 5] * 32)


async def written(server: RedisServer, fleet: ReplicatedFleet) -> None:
    """A snapshot of now is there: of the batch that the gateway has seen last."""
    key = "{warmroute:default}:index:a:0"
    await server.command("DEL", key)
    heads: set[bytes] = set()
    async with server.client() as client, asyncio.timeout(20):
        while len(heads) < 2:  # The first may have been under way.
            if (head := await client.get(key)) is not None:
                heads.add(head)
            await asyncio.sleep(0.01)


async def test_a_new_gateway_goes_on_from_a_snapshot(kind: Kind) -> None:
    async with (
        RedisServer(kind) as server,
        ReplicatedFleet(1, sharing(server), a=engine(buffer_steps=10)) as fleet,
    ):
        await fleet.complete(0, OLD)
        await fill(fleet, 0)
        await until(lambda: known_tokens(fleet.gateways[0]) == len(OLD))
        await written(server, fleet)
        late = await fleet.join()
        assert late.core.ingest.status()["a", 0].counters["snapshots_resumed"] == 1
        await until(lambda: known_tokens(late) == len(OLD))
        assert not late.core.ingest.status()["a", 0].partial
        # It follows what comes from then on, removals too.
        assert await fleet.complete(1, [7] * 320) == "a"
        await fleet.http.post(fleet.engines["a"].url + "/reset_prefix_cache")
        await fleet.complete(0, [9] * 64)
        await until(lambda: known_tokens(late) == 0)
        # Without it, only what the engine still has to tell is known.
        cold = await fleet.join(sharing(server, fleet="other"))
        assert cold.core.ingest.status()["a", 0].partial or known_tokens(cold) == 0


async def test_a_snapshot_from_before_the_engines_history_is_not_believed(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        RedisServer(kind) as server,
        ReplicatedFleet(1, sharing(server), a=engine(buffer_steps=10)) as fleet,
    ):
        await fleet.complete(0, OLD)
        await until(lambda: known_tokens(fleet.gateways[0]) == len(OLD))
        await written(server, fleet)
        await server.command("SET", "{warmroute:default}:lease", "somebody")  # Nobody writes any more.
        fleet.gateways[0].core.replicas.snapshots._left = 0
        await fill(fleet, 0)
        late = await fleet.join()
        await until(lambda: late.core.ingest.status()["a", 0].phase == "live")
        status = late.core.ingest.status()["a", 0]
        assert status.counters["snapshots_resumed"] == 1
        assert status.counters["clears"] == 1
        assert status.partial
        assert known_tokens(late) == 0


async def test_a_snapshot_that_is_being_written_anew_is_read_when_it_is_whole(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of the next one is there before its head; who did not wait would begin with nothing."""
    async with (
        RedisServer(kind) as server,
        ReplicatedFleet(1, sharing(server), a=engine(buffer_steps=10)) as fleet,
    ):
        await fleet.complete(0, OLD)
        await until(lambda: known_tokens(fleet.gateways[0]) == len(OLD))
        await written(server, fleet)
        replicas = fleet.gateways[0].core.replicas
        keys = Keys("warmroute", "default")
        piece_key = keys.piece(("copy", 0), 0)
        tried = asyncio.Event()
        read = snapshots.Snapshots._read

        async def reads(self: snapshots.Snapshots, client: Any, holder: Holder) -> bytes | None:
            try:
                return await read(self, client, holder)
            finally:
                tried.set()

        monkeypatch.setattr(snapshots.Snapshots, "_read", reads)
        async with server.client() as client:
            await server.command("SET", keys.lease, "somebody")
            data = msgspec.msgpack.encode(await replicas.snapshots._saved(("a", 0)))
            head = snapshots._HEAD + msgspec.msgpack.encode((b"12345678", len(data)))
            await client.set(keys.snapshot(("copy", 0)), head)
            await client.set(piece_key, b"another." + bytes(len(data)))
            reading = asyncio.create_task(replicas.saved("copy", [0]))
            await tried.wait()
            await client.set(piece_key, b"12345678" + data)
            assert (await reading).keys() == {0}


async def test_workers_in_line_for_their_snapshots_do_not_lose_them_for_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 500 workers most wait longer than one reading may take."""
    monkeypatch.setattr(replicas_module, "_LONGEST_READ_S", 60.0)
    reading = asyncio.Semaphore(1)
    at_once: list[str] = []

    async def read(self: snapshots.Snapshots, client: Any, worker: str, ranks: list[int]) -> dict[int, str]:
        at_once.append(worker)
        if worker == "stuck":
            await asyncio.Event().wait()
        await reading.acquire()
        return {} if worker == "a" else {0: worker}

    monkeypatch.setattr(snapshots.Snapshots, "read", read)
    async with RedisServer("redis") as server, ReplicatedFleet(1, sharing(server), a=engine()) as fleet:
        replicas = fleet.gateways[0].core.replicas
        assert at_once == ["a"]
        at_once.clear()
        asked = [asyncio.create_task(replicas.saved(f"w{i}", [0])) for i in range(12)]
        await until(lambda: len(at_once) == 4)
        for _ in asked:
            reading.release()
        assert [(await each)[0] for each in asked] == [f"w{i}" for i in range(12)]
        # Whoever waits for one that is stuck does so once; nobody asks a Redis that others have found lost.
        monkeypatch.setattr(replicas_module, "_LONGEST_READ_S", 0.2)
        assert await replicas.saved("stuck", [0]) == {}
        server.kill()
        await until(lambda: replicas._hearing.problem is not None)
        n = len(at_once)
        assert await replicas.saved("w1", [0]) == {}
        assert len(at_once) == n
