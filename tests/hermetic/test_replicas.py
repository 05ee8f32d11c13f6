"""Several gateways that share through a real Redis and a real Valkey what they have in flight."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.config.schema import ScorerConfig
from gateway.replicas.schema import NEWS_ENTRIES
from scorer.calibrate import Part
from tests.support.gateway_world import engine, until
from tests.support.redis_server import KINDS, Kind, RedisServer, binary
from tests.support.replica_world import ReplicatedFleet, sharing

pytestmark = pytest.mark.hermetic
UNIT_S = {"s": 1, "min": 60, "hour": 3_600, "day": 86_400}
NAMES = ("a", "b", "c", "d", "e", "f")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if binary(kind) is None:
        pytest.skip(f"no {kind}-server here")
    return kind


@pytest.fixture
async def server(kind: Kind) -> AsyncIterator[RedisServer]:
    async with RedisServer(kind) as server:
        yield server


def words(n: int, seed: int) -> list[int]:
    """A prompt of so many token ids that begins like no other."""
    return [5 + (seed * 7919 + i * 31) % 200 for i in range(n)]


async def kept_anew(fleet: ReplicatedFleet) -> None:
    """What outlives a replica is written again, which is due every few seconds."""
    publisher = fleet.gateways[0].core.replicas.publisher
    publisher._kept_at_s = 0.0
    await until(lambda: publisher._kept_at_s)


async def spread(fleet: ReplicatedFleet) -> Counter[str]:
    """Where six requests go that come one after the other to three replicas, each slow to be answered."""
    for gateway in fleet.gateways:
        gateway.core.rng.seed(1)  # So that alone all choose alike.
    for server in fleet.engines.values():
        server.faults.headers_delay_s = 4.0
    tasks = []
    for i in range(6):
        tasks.append(asyncio.create_task(fleet.complete(i % 3, words(64, i))))
        await until(lambda i=i: sum(g.core.planner.in_flight() for g in fleet.gateways) == i + 1)
        if fleet.redis.url is not None:
            await until(
                lambda i=i: all(
                    sum(fleet.others_at(j, name) for name in NAMES)
                    == i + 1 - fleet.gateways[j].core.planner.in_flight()
                    for j in range(3)
                )
            )
    return Counter(await asyncio.gather(*tasks))


async def test_replicas_do_not_all_pick_the_same_idle_worker(server: RedisServer) -> None:
    engines = {name: engine() for name in NAMES}
    async with ReplicatedFleet(3, sharing(server), scrape_interval_s=5.0, **engines) as fleet:
        shared = await spread(fleet)
        await until(lambda: all(fleet.others_at(i, name) == 0 for i in range(3) for name in NAMES))
    assert shared == Counter(NAMES)


async def test_without_sharing_they_do() -> None:
    async with ReplicatedFleet(3, scrape_interval_s=5.0, **{name: engine() for name in NAMES}) as fleet:
        alone = await spread(fleet)
    assert max(alone.values()) == 3


async def test_a_prefix_goes_where_another_replica_has_just_sent_it(server: RedisServer) -> None:
    """Before any event can have told: the engine has not begun with it."""
    async with ReplicatedFleet(2, sharing(server), **{name: engine() for name in NAMES}) as fleet:
        for each in fleet.engines.values():
            each.faults.headers_delay_s = 1.0
        for seed in range(3):
            prompt = words(8000, seed)
            first = asyncio.create_task(fleet.complete(0, prompt))
            reader = fleet.gateways[1].core.replicas.reader
            await until(lambda reader=reader: reader._arrivals)
            loads = [each.loads[0] for each in fleet.gateways[1].core.fleet.workers.values()]
            # By then it is thought to be computed: to wait longer than to compute it again would pay nowhere.
            await until(lambda loads=loads: sum(it.prefill_backlog_s(time.monotonic()) for it in loads) < 0.01)
            second = asyncio.create_task(fleet.complete(1, [*prompt, 9, 9, 9]))
            assert await first == await second
            await until(lambda reader=reader: not reader._arrivals)


async def test_what_was_given_up_is_not_looked_for(server: RedisServer) -> None:
    async with ReplicatedFleet(2, sharing(server), a=engine(), b=engine()) as fleet:
        for each in fleet.engines.values():
            each.faults.headers_delay_s = 60.0
        task = asyncio.create_task(fleet.complete(0, words(640, 1)))
        holdings = fleet.gateways[1].core.planner.holdings
        await until(lambda: holdings.assumed_blocks("a") + holdings.assumed_blocks("b"))
        task.cancel()
        await until(lambda: holdings.assumed_blocks("a") == holdings.assumed_blocks("b") == 0, within_s=30.0)


async def test_a_session_stays_whichever_replica_gets_it(server: RedisServer) -> None:
    scorer = ScorerConfig(session_affinity="strict")
    async with ReplicatedFleet(2, sharing(server), scorer, **{name: engine() for name in NAMES}) as fleet:
        first = await fleet.complete(0, words(64, 1), **{"x-session-id": "s"})
        sessions = fleet.gateways[1].core.planner.sessions
        await until(lambda: len(sessions) == 1)
        assert [await fleet.complete(1, words(64, i), **{"x-session-id": "s"}) for i in range(2, 5)] == [first] * 3
        await kept_anew(fleet)
        late = await fleet.join()
        await until(lambda: len(late.core.planner.sessions) == 1)
        assert await fleet.complete(2, words(64, 9), **{"x-session-id": "s"}) == first


async def test_a_stored_response_is_found_by_all(server: RedisServer) -> None:
    engines = {name: engine(store_responses=True) for name in ("a", "b")}
    async with ReplicatedFleet(2, sharing(server), **engines) as fleet:
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 2}
        status, answer, worker = await fleet.post(0, "/v1/responses", body)
        assert status == 200, answer
        stored = fleet.gateways[1].core.stored
        await until(lambda: len(stored) == 1)
        place = stored.find(answer["id"], asyncio.get_running_loop().time())
        assert place is not None
        assert place.worker == worker


async def test_a_replica_that_leaves_says_so(server: RedisServer) -> None:
    redis = sharing(server, ttl_s=30.0)
    async with ReplicatedFleet(2, redis, a=engine()) as fleet:
        await fleet.gateways[1].close()
        await until(lambda: fleet.hears(fleet.gateways[0]) == 0)


async def test_what_was_learned_is_there_for_a_new_replica(server: RedisServer) -> None:
    async with ReplicatedFleet(1, sharing(server), a=engine()) as fleet:
        calibration = fleet.gateways[0].core.planner.calibration
        for _ in range(40):
            calibration.add(Part.WORK, "a", 1.0, 2.0)
        await kept_anew(fleet)
        late = await fleet.join()
        await until(lambda: late.core.planner.calibration.value(Part.WORK, "a") == pytest.approx(2.0))
        assert late.core.fleet.workers["a"].work_factor == pytest.approx(2.0)


async def test_whose_factors_are_kept_is_not_pruned(server: RedisServer) -> None:
    """Who starts later would not know where to look for them."""
    async with ReplicatedFleet(2, sharing(server), a=engine()) as fleet:
        gone, left = (gateway.core.replicas for gateway in fleet.gateways)
        await fleet.gateways[0].close()
        await until(lambda: fleet.hears(fleet.gateways[1]) == 0)
        await server.command("SADD", "{warmroute:default}:writers", "dead")
        left.reader._prune_at_s = 0.0
        writers = {b"dead"}
        async with asyncio.timeout(60):
            while b"dead" in writers:
                writers = await server.command("SMEMBERS", "{warmroute:default}:writers")
                await asyncio.sleep(0.02)
        assert gone.writer.encode() in writers


async def test_nobody_takes_itself_for_another(server: RedisServer) -> None:
    async with ReplicatedFleet(1, sharing(server), a=engine()) as fleet:
        reader = fleet.gateways[0].core.replicas.reader
        await fleet.complete(0, words(64, 1))
        await server.command("XADD", "{warmroute:default}:news", "*", "the", "last")
        ((last, _),) = await server.command("XREVRANGE", "{warmroute:default}:news", "+", "-", "COUNT", "1")
        await until(lambda: _number(reader._after) >= _number(last))
        assert not reader.elsewhere.writers


def _number(entry: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry.split(b"-")))


async def test_what_was_emptied_is_kept_again(server: RedisServer) -> None:
    """Though nothing of it has changed: that it is there is no matter of what was written before."""
    async with ReplicatedFleet(1, sharing(server), a=engine()) as fleet:
        publisher = fleet.gateways[0].core.replicas.publisher
        await until(lambda: publisher._kept)
        (key,) = publisher._kept
        await server.command("FLUSHALL")
        publisher._kept_at_s = 0.0  # It is due every few seconds.
        async with asyncio.timeout(60):
            while not await server.command("EXISTS", key):  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.02)


async def test_keys_are_those_of_the_table(server: RedisServer) -> None:
    page = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\{p:f\}:(\w+).*?` .*?\| (string|stream|set).*?\| .*?(\d+) (s|min|hour|day)\b", page, re.M)
    documented = {name: (kind, int(n) * UNIT_S[unit]) for name, kind, n, unit in rows}
    assert len(documented) == 7
    idle_s = 600.0
    scorer = ScorerConfig(session_affinity="prefer", session_idle_s=idle_s)
    async with ReplicatedFleet(2, sharing(server), scorer, a=engine(), b=engine()) as fleet:
        for i in range(4):
            await fleet.complete(i % 2, words(64, i), **{"x-session-id": str(i)})
        await kept_anew(fleet)
        found: dict[bytes, str] = {}
        async with asyncio.timeout(60):
            while set(found.values()) != set(documented):
                keys = await server.command("KEYS", "*")
                found = {key: key.decode().removeprefix("{warmroute:default}:").split(":")[0] for key in keys}
                await asyncio.sleep(0.02)
        for key, name in found.items():
            kind, most_s = documented[name]
            if name == "sessions":
                most_s = idle_s
            left_ms = await server.command("PTTL", key)
            assert left_ms != -1, f"{name} does not expire"
            assert left_ms <= most_s * 1000, name
            if left_ms != -2:  # It may be over by now.
                assert await server.command("TYPE", key) == kind.encode()


async def test_the_stream_is_bounded(server: RedisServer) -> None:
    news = "{warmroute:default}:news"
    async with ReplicatedFleet(1, sharing(server), a=engine()) as fleet:
        fill = "for i = 1, 3000 do redis.call('XADD', KEYS[1], '*', 'nothing', 'known') end"
        await server.command("EVAL", fill, 1, news)
        await fleet.complete(0, words(64, 1))
        async with asyncio.timeout(60):
            while await server.command("XLEN", news) > 2 * NEWS_ENTRIES:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.02)
