"""Requests of low priority that give their places up to ones of higher priority, at the gateway."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.config.schema import PdConfig, QueueConfig
from scorer.types import Role
from tests.support.proxy_world import Call, Stub, World, until

pytestmark = pytest.mark.usefixtures("http_plane")

BOUND = 2
SETTINGS = QueueConfig(waiting_per_worker=BOUND, evict_after_s=0.05)
Answered = asyncio.Task[tuple[int, bytes, Any]]


class Full:
    """Workers that answer only when `go_on` is set."""

    def __init__(self, world: World, stubs: dict[str, Stub]) -> None:
        self.world = world
        self.stubs = stubs
        self.sent: list[Answered] = []
        self.go_on = asyncio.Event()

    def post(self, user: str, priority: int, **fields: Any) -> Answered:
        headers = fields.pop("headers", {})
        body = {"model": "m", "prompt": "hi", "user": user, "priority": priority, **fields}
        task = asyncio.create_task(self.world.post(body, **headers))
        self.sent.append(task)
        return task

    async def send(self, user: str, priority: int, **fields: Any) -> Answered:
        """One that is with a worker when this returns."""
        n = len(self.arrived)
        task = self.post(user, priority, **fields)
        await until(lambda: len(self.arrived) > n)
        return task

    @property
    def arrived(self) -> list[str]:
        """Whose requests are with workers. Others on this machine may ask a port that was theirs before."""
        calls = [call for stub in self.stubs.values() for call in stub.calls]
        return [json.loads(call.body)["user"] for call in calls if call.body]

    def full(self, *names: str) -> None:
        """The engines say that as many wait inside as may."""
        for name in names or tuple(self.stubs):
            self.world.say(name, waiting=BOUND)


@asynccontextmanager
async def full(settings: QueueConfig = SETTINGS, workers: str = "a", **options: Any) -> AsyncIterator[Full]:
    held: list[Full] = []

    async def answer(call: Call) -> None:
        hang_up = asyncio.create_task(call.wait_hang_up())
        go_on = asyncio.create_task(held[0].go_on.wait())
        await asyncio.wait({hang_up, go_on}, return_when=asyncio.FIRST_COMPLETED)
        if not call.hung_up.is_set():
            hang_up.cancel()
            await asyncio.gather(hang_up, return_exceptions=True)
            await call.ok(b'{"choices":[]}')
        go_on.cancel()

    stubs = {name: Stub(answer) for name in workers}
    for stub in stubs.values():
        await stub.__aenter__()
    async with World({name: stub.url for name, stub in stubs.items()}, queue=settings, **options) as world:
        world_full = Full(world, stubs)
        held.append(world_full)
        yield world_full
        world_full.go_on.set()
        for name in stubs:
            world.say(name, waiting=0, running=0)
        await asyncio.gather(*world_full.sent, return_exceptions=True)
        await until(world.is_idle)
        assert not world.queue.evictables.going
        assert not len(world.queue.evictables)
    for stub in stubs.values():
        await stub.__aexit__()


async def evicted(task: Answered) -> dict[str, Any]:
    """The error of one that was."""
    status, body, headers = await task
    error = json.loads(body)["error"]
    assert (status, error["code"], headers["x-warmroute-shed"]) == (429, "evicted", "evicted"), body
    assert 1 <= int(headers["Retry-After"]) <= 60
    assert isinstance(error, dict)
    return error


async def test_a_request_of_higher_priority_takes_the_place_of_one_without_an_answer() -> None:
    async with full() as world:
        low = await world.send("low", 1)
        await world.send("usual", 0)
        world.full()
        high = world.post("high", -1)
        error = await evicted(low)
        assert error["message"].startswith("request evicted by flow control")
        assert error["type"] == "rate_limit_error"
        await until(lambda: "high" in world.arrived)
        (left,) = [call for call in world.stubs["a"].calls if b'"low"' in call.body]
        await until(left.hung_up.is_set)  # Which is what stops an engine.
        assert world.world.load() == {"a": 2}
        assert world.world.value("warmroute_requests_rejected_total", reason="evicted") == 1
        world.go_on.set()
        assert (await high)[0] == 200
        records = {record.get("error", ""): record for record in await world.world.records()}
        record = records["evicted"]
        assert (record["status"], record["cut"], record["worker"]) == (429, "evicted", "a")
        assert world.world.queue.lanes["m"].sheds["evicted"] == 1
        assert not world.world.value("warmroute_ejections_total", worker="a")
        shown = [(each.record.cut, each.record.status) for each in world.world.parts.decisions.last(9)]
        assert ("evicted", 429) in shown


async def test_off_it_waits_as_ever() -> None:
    async with full(QueueConfig(waiting_per_worker=BOUND)) as world:
        low = await world.send("low", 9)
        await world.send("usual", 0)
        world.full()
        high = world.post("high", -1)
        await until(lambda: world.world.queue.n_waiting)
        await asyncio.sleep(0.2)
        assert not low.done()
        assert not high.done()
        assert world.world.queue.n_waiting == 1


@pytest.mark.parametrize(("there", "comes"), [(0, -5), (-1, -5), (3, 3), (2, 3)])
async def test_only_what_is_below_the_usual_and_below_who_comes_goes(there: int, comes: int) -> None:
    async with full() as world:
        low = await world.send("there", there)
        await world.send("there too", there)
        world.full()
        world.post("comes", comes)
        await until(lambda: world.world.queue.n_waiting)
        await asyncio.sleep(0.2)
        assert not low.done()
        assert world.world.queue.n_waiting == 1


async def test_the_lowest_goes_first_and_of_these_who_was_sent_last() -> None:
    async with full() as world:
        old = await world.send("low, long ago", 5)
        better = await world.send("better", 4)
        new = await world.send("low, just now", 5)
        world.full()
        world.post("high", 0)
        await evicted(new)
        assert not old.done()
        assert not better.done()
        await until(lambda: "high" in world.arrived)
        world.post("higher", -1)
        await evicted(old)
        await until(lambda: "higher" in world.arrived)
        assert not better.done()


async def test_a_burst_takes_one_place_each_and_no_more() -> None:
    async with full() as world:
        low = [await world.send(f"low{i}", 1) for i in range(8)]
        world.full()
        for i in range(3):
            world.post(f"high{i}", 0)
        await until(lambda: sum(user.startswith("high") for user in world.arrived) == 3)
        await asyncio.sleep(0.2)
        assert [task.done() for task in low] == [False] * 5 + [True] * 3
        assert world.world.value("warmroute_requests_rejected_total", reason="evicted") == 3


async def test_an_answer_that_has_begun_is_not_taken_back() -> None:
    begun = asyncio.Event()
    end = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"choices":[{"text":"a"}]}\n\n')
        begun.set()
        await end.wait()
        await call.end_stream()

    async with Stub(answer) as stub, World({"a": stub.url}, queue=SETTINGS) as world:
        body = {"model": "m", "prompt": "hi", "priority": 5, "stream": True}
        low = [asyncio.create_task(world.post(body)) for _ in range(2)]
        await until(lambda: sum(load.streams for load in world.fleet.workers["a"].loads.values()) == 2)
        world.say("a", waiting=BOUND)
        high = asyncio.create_task(world.post({**body, "priority": -1}))
        await until(lambda: world.queue.n_waiting)
        assert not len(world.queue.evictables)
        await asyncio.sleep(0.2)
        assert world.queue.n_waiting == 1
        world.say("a", waiting=0)
        end.set()
        for task in (*low, high):
            assert (await task)[0] == 200
        await until(world.is_idle)


async def test_nobody_goes_where_that_makes_no_place() -> None:
    """Others than ours fill the engine: without its one request it would be as full."""
    async with full() as world:
        low = await world.send("low", 1)
        world.world.say("a", waiting=BOUND + 5)
        world.post("high", 0)
        await until(lambda: world.world.queue.n_waiting)
        await asyncio.sleep(0.2)
        assert not low.done()


async def test_two_may_go_for_one_place() -> None:
    async with full() as world:
        low = [await world.send(f"low{i}", 1) for i in range(3)]
        world.world.say("a", waiting=BOUND + 1)
        world.post("high", 0)
        for task in low[1:]:
            await evicted(task)
        await until(lambda: "high" in world.arrived)
        assert not low[0].done()


async def test_with_an_objective_half_of_it_is_long_enough() -> None:
    async with full(QueueConfig(waiting_per_worker=BOUND, evict_after_s=600)) as world:
        low = await world.send("low", 1)
        await world.send("low too", 1)
        world.full()
        world.post("patient", -1)
        await until(lambda: world.world.queue.n_waiting)
        began_s = time.monotonic()
        world.post("urgent", -2, headers={"x-slo-ttft-ms": "400"})
        await until(lambda: "urgent" in world.arrived)
        assert time.monotonic() - began_s >= 0.2
        assert world.world.queue.n_waiting == 1
        assert not low.done()


async def test_only_workers_that_could_serve_it_are_looked_at() -> None:
    async with full(workers="ab") as world:
        world.world.fleet.set_capabilities("b", models=["other"], ranks=range(1))
        low = await world.send("low", 9, model="other")
        await world.send("usual", 0)
        await world.send("usual too", 0)
        world.full()
        world.post("high", -1)
        await until(lambda: world.world.queue.n_waiting)
        await asyncio.sleep(0.2)
        assert not low.done()


async def test_who_waited_longest_keeps_the_place_it_got_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scorer.queue.AGEING", 1)
    async with full() as world:
        await world.send("usual", 0)
        await world.send("usual too", 0)
        world.full()
        low = world.post("low", 9)
        await until(lambda: world.world.queue.n_waiting == 1)
        world.post("high", -1)
        await until(lambda: world.world.queue.n_waiting == 2)
        world.world.say("a", waiting=BOUND - 1)
        await until(lambda: "low" in world.arrived)
        world.full()
        await asyncio.sleep(0.2)
        assert not low.done()
        assert world.world.queue.n_waiting == 1


async def test_a_client_that_leaves_just_then_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full() as world:
        await world.send("low", 1)
        await world.send("usual", 0)
        world.full()
        low = world.sent[0]
        world.post("high", -1)
        low.cancel()
        await until(lambda: "high" in world.arrived)


async def test_a_prompt_that_is_computed_elsewhere_is_taken_back_there_too() -> None:
    roles = {"p": Role.PREFILL, "a": Role.DECODE}
    async with full(workers="pa", pd=PdConfig(policy="always-remote"), roles=roles) as world:
        world.world.fleet.workers["a"].publishes_events = True
        low = world.post("low", 1)
        await until(lambda: world.arrived)
        usual = world.post("usual", 0)
        await until(lambda: len(world.arrived) == 2)
        world.world.say("a", waiting=BOUND)
        world.post("high", -1)
        await evicted(low)
        assert not usual.done()
        await until(lambda: world.world.queue.n_waiting == 0)
