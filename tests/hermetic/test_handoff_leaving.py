"""Clients that leave in the middle of a handoff, workers that restart in it: nothing stays booked or held."""

import asyncio
import json
import random
import time
from typing import Any, Literal

import aiohttp
import pytest

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig
from scorer.pairs import FAILURES
from tests.support.gateway_world import Fleet, decode, engine, prefill, until
from tests.support.handoff_world import (
    BODIES,
    IDS,
    LONG,
    answers,
    ask,
    bodies,
    offers,
    refusing_releases,
    releases,
    world,
)
from tests.support.proxy_world import Call, Stub, World, raw_request

REMOTE = PdConfig(policy="always-remote")
COMPLETION = {"model": "m", "prompt": IDS}
RAW = json.dumps(COMPLETION).encode()


async def hangs(call: Call) -> None:
    await call.wait_hang_up()


async def connect(it: World, data: bytes) -> asyncio.StreamWriter:
    _, writer = await it.connect()
    writer.write(data)
    return writer


async def at_rest(it: World) -> None:
    await until(it.is_idle)
    await until(lambda: not it.handoffs.releases._tasks)
    assert not [names for names, pair in it.planner.pairs.pairs.items() if pair.probing]
    assert it.handoffs.releases.stranded.tokens(time.monotonic()) == {}


def probing(it: World) -> None:
    """Make the next handoff the pair's probe."""
    for _ in range(FAILURES):
        it.planner.pairs.start(("p1", "d1"))
        it.planner.pairs.broke(("p1", "d1"), -1000.0)


# ---- a client leaves -------------------------------------------------------------------------------------------------


async def test_before_the_prefill() -> None:
    async with Stub(offers()) as p1, Stub(answers()) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        writer = await connect(it, raw_request(RAW)[:-10])
        await until(lambda: it.plane.in_flight == 1)
        writer.transport.abort()
        await at_rest(it)
        assert p1.calls == d1.calls == []


async def test_during_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine stops with the connection, and holds nothing then."""
    monkeypatch.setattr("gateway.handoff.handoff._LINGER_S", 0.1)
    async with Stub(hangs) as p1, Stub(answers()) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        probing(it)
        writer = await connect(it, raw_request(RAW))
        await until(lambda: len(p1.calls) == 1)
        assert it.load() == {"p1": 1, "d1": 1}
        assert it.planner.pairs.pairs["p1", "d1"].probing
        writer.transport.abort()
        await until(lambda: p1.calls[0].hung_up.is_set())
        await at_rest(it)
        assert d1.calls == []


async def test_just_before_the_prefill_worker_answers() -> None:
    """What it has computed is given back."""
    offer, gone = offers(), asyncio.Event()

    async def answers_late(call: Call) -> None:
        await gone.wait()
        await offer(call)

    async with Stub(answers_late) as p1, Stub(refusing_releases(answers())) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        writer = await connect(it, raw_request(RAW, "Authorization: Bearer sk"))
        await until(lambda: len(p1.calls) == 1)
        writer.transport.abort()
        await until(lambda: it.plane.in_flight == 0)
        gone.set()
        await until(lambda: it.value("warmroute_pd_releases_total", outcome="ok") == 1)
        await at_rest(it)
        assert bodies(d1) == []
        assert len(releases(d1)) == 1
        assert d1.calls[0].header("Authorization") == "Bearer sk"
        assert it.handoffs.releases.stranded.total_tokens == 64


async def test_between_the_legs() -> None:
    """The decode worker has not asked for the body yet: it never gets it, and gives the blocks back."""
    async with Stub(offers()) as p1, Stub(refusing_releases(answers())) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        d1.continues = False
        writer = await connect(it, raw_request(RAW))
        await until(lambda: d1.connections == 1)
        writer.transport.abort()
        await until(lambda: len(releases(d1)) == 1)
        await at_rest(it)
        assert bodies(d1) == []


async def test_before_the_decode_workers_first_byte() -> None:
    """It has the request: with the connection it drops that and lets the prefill worker know."""
    async with Stub(offers()) as p1, Stub(hangs) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        probing(it)
        writer = await connect(it, raw_request(RAW))
        await until(lambda: len(d1.calls) == 1)
        await until(lambda: it.load() == {"p1": 0, "d1": 1})
        writer.transport.abort()
        await until(lambda: d1.calls[0].hung_up.is_set())
        await at_rest(it)
        assert it.planner.pairs.pairs["p1", "d1"].state(0.0) == "half_open", "it has shown nothing"


async def test_after_the_decode_workers_first_byte() -> None:
    async def begins(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n')
        await call.wait_hang_up()

    async with Stub(offers()) as p1, Stub(begins) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        probing(it)
        reader, writer = await it.connect()
        writer.write(raw_request(RAW))
        await reader.readuntil(b'"text":"a"')
        writer.transport.abort()
        await until(lambda: d1.calls[0].hung_up.is_set())
        await at_rest(it)
        assert it.planner.pairs.pairs["p1", "d1"].state(0.0) == "closed", "the KV was there"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway, the engines and their clients share one loop here, which a busy machine holds up for seconds."""
    monkeypatch.setattr("gateway.handoff.handoff._LINGER_S", 60.0)
    monkeypatch.setattr("gateway.handoff.releases._TIMEOUT_S", 60.0)


SLOW_PULL = decode(kv_pull_base_s=0.3)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("p1", "d1", "reached"),
    [
        (prefill(), decode(), "prefill"),
        (prefill(), SLOW_PULL, "decode"),
        (prefill(), decode(), "decode"),
    ],
    ids=["with_the_prefill", "while_the_kv_is_fetched", "while_it_is_answered"],
)
async def test_engines_hold_nothing_for_clients_that_left(p1: FakeVllmConfig, d1: FakeVllmConfig, reached: str) -> None:
    async with Fleet(pd=REMOTE, p1=p1, d1=d1) as fleet:
        server = fleet.engines["p1" if reached == "prefill" else "d1"]
        for path in BODIES:
            seen = len(server.requests)
            body = {**BODIES[path], "stream": True, "max_tokens": 4000, "max_output_tokens": 4000}
            asked = asyncio.create_task(ask(fleet.http, fleet.url, path, body))
            await until(lambda seen=seen: len(server.requests) > seen)  # type: ignore[misc]
            asked.cancel()
            await idle(fleet)


async def idle(fleet: Fleet, within_s: float = 60.0) -> None:
    """Nothing runs, is booked or held anywhere."""
    core = fleet.core
    await until(lambda: core.planner.in_flight() == 0, within_s)
    await until(lambda: not core.handoffs.releases._tasks, within_s)
    await until(lambda: all(server.held_blocks == 0 for server in fleet.engines.values()), within_s)
    for server in fleet.engines.values():
        await until(lambda s=server: all(x.running + x.waiting == 0 for x in s.stats()), within_s)  # type: ignore[misc]
    for worker in core.fleet.workers.values():
        assert [(load.requests, load.kv_tokens) for load in worker.loads.values()] == [(0, 0)]
    assert not [names for names, pair in core.planner.pairs.pairs.items() if pair.probing]
    assert core.handoffs.releases.stranded.tokens(time.monotonic()) == {}


@pytest.mark.usefixtures("patient")
async def test_200_concurrent_requests_with_aborts_leave_nothing_behind() -> None:
    rng = random.Random(7)
    lasting = {"kv_lease_s": 600.0}  # No lease ends by itself.
    engines = {"p1": prefill(**lasting), "p2": prefill(**lasting), "d1": decode(), "d2": decode()}

    async def one(i: int, url: str, http: aiohttp.ClientSession) -> str | None:
        path = rng.choice(list(BODIES))
        body = {**BODIES[path], "stream": rng.random() < 0.5}
        if "prompt" in body:
            body["prompt"] = f"{i % 20} " + LONG
        if i % 5 == 0:
            asked = asyncio.create_task(ask(http, url, path, body))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            await asyncio.wait([asked], timeout=rng.choice([0.0, 0.005, 0.02, 0.1]))
            asked.cancel()
            return None
        return (await ask(http, url, path, body)).text

    async with Fleet(pd=PdConfig(policy="always-remote", lease_s=600), **engines) as fleet, FakeVllm(engine()) as alone:
        expected = {path: (await ask(fleet.http, alone.url, path)).text for path in BODIES}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            texts = await asyncio.gather(*(one(i, fleet.url, http) for i in range(200)))
        assert sum(text is None for text in texts) == 40
        assert all(texts[i] for i in range(200) if i % 5)
        await idle(fleet)
        assert not any(server.dead for server in fleet.engines.values())
        for path, text in expected.items():
            assert (await ask(fleet.http, fleet.url, path)).text == text, "no cache was poisoned"


# ---- workers that restart, break or do not fit -----------------------------------------------------------------------


async def test_a_restarted_prefill_workers_old_engine_id_is_never_used() -> None:
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as fleet:
        p1, d1 = fleet.engines["p1"], fleet.engines["d1"]
        first = await ask(fleet.http, fleet.url)
        assert first.went == ("remote", "policy")
        old = d1.requests[-1].body["kv_transfer_params"]["remote_engine_id"]
        answered_s = time.monotonic()
        await until(lambda: fleet.core.heard_since("p1", answered_s))
        await p1.restart()
        again = await ask(fleet.http, fleet.url)  # Before anybody has noticed.
        assert again.text == first.text
        await until(lambda: fleet.core.scraper.counters["restarts"] == 1)
        assert fleet.core.handoffs.engine_ids.accept("p1", old, "any", time.monotonic()) is not None
        last = await ask(fleet.http, fleet.url)
        assert (last.text, last.went) == (first.text, ("remote", "policy"))
        used = [seen.body["kv_transfer_params"]["remote_engine_id"] for seen in d1.requests if seen.leg == "decode"]
        assert used.count(old) == 1
        assert p1.nixl[0].engine_id in used


async def test_a_pair_that_fails_is_left_alone_until_a_probe_works() -> None:
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as fleet:
        p1, d1 = fleet.engines["p1"], fleet.engines["d1"]
        pairs = fleet.core.planner.pairs

        async def went(start: int) -> tuple[str, str]:
            told = await ask(fleet.http, fleet.url, body={**BODIES["/v1/completions"], "prompt": f"{start} " + LONG})
            assert told.text
            return told.went

        p1.faults.offer = {"remote_engine_id": "another-life"}
        assert [await went(i) for i in range(FAILURES)] == [("local", "kv_load_failed")] * FAILURES
        prefills = len(p1.requests)
        assert await went(10) == ("local", "pair_broken")
        assert len(p1.requests) == prefills, "nothing is computed in vain"
        status, text = await fleet.get(fleet.admin + "/metrics")
        assert status == 200
        assert 'warmroute_pd_pair_broken{decode="d1",prefill="p1"} 1.0' in text
        pairs.pairs["p1", "d1"].retry_at_s = time.monotonic()  # The back-off is over.
        assert await went(20) == ("local", "kv_load_failed")
        assert await went(21) == ("local", "pair_broken"), "the probe has failed"
        p1.faults.offer = None
        pairs.pairs["p1", "d1"].retry_at_s = time.monotonic()
        assert await went(30) == ("remote", "policy")
        assert await went(31) == ("remote", "policy")
        assert pairs.pairs["p1", "d1"].state(time.monotonic()) == "closed"
        assert not d1.dead


async def test_a_prefill_server_that_holds_nothing_for_others_is_found_out() -> None:
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as fleet:
        fleet.engines["p1"].faults.offer = lambda _: None
        went = [(await ask(fleet.http, fleet.url)).went for _ in range(FAILURES + 1)]
        assert went == [("local", "no_params")] * FAILURES + [("local", "pair_broken")]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
async def test_a_server_without_a_connector_takes_no_part(role: Literal["kv_producer", "kv_consumer"]) -> None:
    """A prefill server would hold nothing; a decode server takes no notice of the params, and strands what is held."""
    plain = engine(kv_role=role)
    engines = {"p1": prefill(), "d1": decode()} | {"p1" if role == "kv_producer" else "d1": plain}
    async with Fleet(pd=REMOTE, **engines) as fleet, FakeVllm(engine()) as alone:
        told = await ask(fleet.http, fleet.url)
        assert told.went == ("local", "pair_incompatible")
        assert told.text == (await ask(fleet.http, alone.url)).text
        assert not any(seen.leg == "prefill" for seen in fleet.engines["p1"].requests)


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({"version": "0.31.0"}, False),
        ({"root": "/models/other"}, False),
        ({"dtype": "torch.float16"}, False),
        ({}, True),
    ],
)
async def test_servers_that_would_refuse_each_other_are_not_tried(changed: dict[str, Any], fits: bool) -> None:
    async with Fleet(pd=REMOTE, p1=prefill(**changed), d1=decode()) as fleet:
        told = await ask(fleet.http, fleet.url)
        assert told.went == (("remote", "policy") if fits else ("local", "pair_incompatible"))
        assert told.text
        assert len(fleet.engines["p1"].requests) == fits
