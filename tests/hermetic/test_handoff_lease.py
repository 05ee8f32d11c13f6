"""Transfer params are good for as long as the prefill worker's lease, and no decode worker sees them after that."""

import asyncio
import json
import time

import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig
from tests.support.gateway_world import Fleet, decode, engine, prefill, until
from tests.support.handoff_world import IDS, ROLES, answers, ask, bodies, is_release, offers, refusing_releases, world
from tests.support.proxy_world import Call, Stub, World

COMPLETION = {"model": "m", "prompt": IDS}
GOOD = {"choices": [{"index": 0, "text": "right", "finish_reason": "length"}]}


def pd(*, lease_s: float, lease_margin_s: float) -> PdConfig:
    return PdConfig(policy="always-remote", lease_s=lease_s, lease_margin_s=lease_margin_s)


async def sleeps(call: Call) -> None:
    await call.wait_hang_up()


def decoder() -> Stub:
    return Stub(refusing_releases(answers(GOOD)))


async def test_when_the_lease_is_over_before_the_request_is_written_the_prompt_is_computed_anew() -> None:
    async with (
        Fleet(pd=pd(lease_s=1.0, lease_margin_s=1.0), p1=prefill(), d1=decode()) as fleet,
        FakeVllm(engine()) as alone,
    ):
        expected = (await ask(fleet.http, alone.url)).text
        told = await ask(fleet.http, fleet.url)
        assert told.text == expected
        assert told.went == ("local", "lease_over")
        assert [seen.leg for seen in fleet.engines["d1"].requests if seen.body.get("prompt") != [0]] == ["plain"]
        await until(lambda: fleet.engines["p1"].held_blocks == 0)
        await until(lambda: not fleet.core.handoffs.releases.stranded.tokens(0.0))
        registry = fleet.core.metrics.registry
        labels = {"prefill": "p1", "decode": "d1", "outcome": "lease_over"}
        assert registry.get_sample_value("warmroute_pd_handoffs_total", labels) == 1


@pytest.mark.parametrize(("told", "went"), [(True, ("local", "lease_over")), (False, ("remote", "policy"))])
async def test_a_shorter_lease_counts_where_the_engine_tells_it(told: bool, went: tuple[str, str]) -> None:
    """A lease of a second that the configuration takes for half a minute."""
    short = prefill(kv_lease_s=1.0, dev_mode=told)
    async with Fleet(pd=pd(lease_s=30.0, lease_margin_s=1.0), p1=short, d1=decode()) as fleet:
        assert (await ask(fleet.http, fleet.url)).went == went


@pytest.mark.parametrize("accepts", [True, False])
async def test_a_decode_worker_that_lives_and_is_slow_to_take_the_request_computes_it_itself(accepts: bool) -> None:
    """It takes connections and no bodies; or only half of a body by the deadline."""
    awake, served = asyncio.Event(), []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"100-continue" in head:
                if accepts:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await awake.wait()
                return
            length = int(next(row for row in head.lower().split(b"\r\n") if b"content-length" in row).split(b":")[1])
            call = Call(head[:-4], await reader.readexactly(length), reader, writer)
            if is_release(json.loads(call.body)):
                await call.ok(status="400 Bad Request")
                return
            served.append(json.loads(call.body))
            await call.ok(json.dumps(GOOD).encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    body = {**COMPLETION, "user": "u" * (12 << 20)}
    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Stub(offers()) as p1, server:
        it = World(
            {"p1": p1.url, "d1": url}, pd=pd(lease_s=0.6, lease_margin_s=0.1), roles=ROLES, max_body_bytes=1 << 26
        )
        async with it:
            told = await asyncio.wait_for(ask(it.http, it.url, body=body), 30)
            assert (told.text, told.went) == ("right", ("local", "lease_over"))
            assert served == [body]
            await until(it.is_idle)
        awake.set()


class Frozen:
    """p1, a d1 that answers nothing at all, and perhaps a d2 that comes up meanwhile."""

    def __init__(self, *, second: bool) -> None:
        self._second, self._config = second, pd(lease_s=0.5, lease_margin_s=0.1)

    async def __aenter__(self) -> "Frozen":
        offer = offers()

        async def lets_d2_in(call: Call) -> None:
            self.world.down.clear()
            await offer(call)

        self.p1, self.d1, self.d2 = Stub(lets_d2_in), Stub(sleeps), decoder()
        for stub in (self.p1, self.d1, self.d2):
            await stub.__aenter__()
        stubs = {"p1": self.p1, "d1": self.d1} | ({"d2": self.d2} if self._second else {})
        self.world = await world(self._config, **stubs).__aenter__()
        self.world.frozen.add("d1")
        self.world.down.add("d2")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.world.__aexit__()
        for stub in (self.p1, self.d1, self.d2):
            await stub.__aexit__()


@pytest.mark.parametrize("asks", [True, False])
async def test_a_frozen_decode_worker_loses_the_request_with_the_lease(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it wakes up it must not fetch what is somebody else's by then."""
    monkeypatch.setattr("gateway.handoff.releases._TIMEOUT_S", 0.2)
    async with Frozen(second=False) as it:
        it.d1.continues = asks
        told = await asyncio.wait_for(ask(it.world.http, it.world.url, body=COMPLETION), 20)
        assert told.status == 504
        assert json.loads(told.body)["error"]["code"] == "upstream_unreachable"
        if asks:  # It had the whole request, and is told to stop.
            await until(lambda: it.d1.calls[0].hung_up.is_set())
        else:
            assert it.d1.calls == [], "it has never had the params"
        await until(it.world.is_idle)


@pytest.mark.parametrize("asks", [True, False])
async def test_another_decode_worker_serves_what_a_frozen_one_does_not(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.handoff.releases._TIMEOUT_S", 0.2)
    async with Frozen(second=True) as it:
        it.d1.continues = asks
        told = await asyncio.wait_for(ask(it.world.http, it.world.url, body=COMPLETION), 20)
        assert told.text == "right"
        assert told.headers["x-warmroute-worker"] == "d2"
        params = [body["kv_transfer_params"]["remote_request_id"] for body in (*bodies(it.d1), *bodies(it.d2))]
        assert len(set(params)) == len(params), "each offer once"
        await until(it.world.is_idle)


async def test_a_slow_decode_worker_that_lives_keeps_the_request() -> None:
    """It has renewed the lease: queued for longer than that is fine."""
    go_on = asyncio.Event()

    async def slow(call: Call) -> None:
        await go_on.wait()
        await call.ok(json.dumps(GOOD).encode())

    class Frozen(set[str]):
        """Nobody is; remembers when it was last asked."""

        asked_s = 0.0

        def __contains__(self, name: object) -> bool:
            self.asked_s = time.monotonic()
            return False

    async with Stub(offers()) as p1, Stub(slow) as d1, world(pd(lease_s=0.3, lease_margin_s=0.01), p1=p1, d1=d1) as it:
        it.frozen = frozen = Frozen()
        began_s = time.monotonic()
        asked = asyncio.create_task(ask(it.http, it.url, body=COMPLETION))
        await until(lambda: frozen.asked_s > began_s + 0.3)
        assert not asked.done()
        go_on.set()
        told = await asked
        assert (told.text, told.went) == ("right", ("remote", "policy"))
