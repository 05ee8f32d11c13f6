"""Requests that wait here while every engine has enough waiting inside."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.config.schema import QueueConfig, TenancyConfig
from gateway.sidecar.hints import Hints
from scorer.lateness import MIN_SAMPLES
from scorer.types import EngineStats, RequestFacts
from tests.support.proxy_world import Call, Stub, World, until

BOUND = 2
SETTINGS = QueueConfig(waiting_per_worker=BOUND)
TENANTS = TenancyConfig(header="x-tenant")
Answered = asyncio.Task[tuple[int, bytes, Any]]


class Line:
    """A worker that is said to be full, and requests that wait for it in this order."""

    def __init__(self, world: World, stub: Stub, go_on: asyncio.Event) -> None:
        self.world = world
        self.stub = stub
        self.go_on = go_on
        self.sent: list[Answered] = []

    async def send(self, name: str, prompt: str = "hi", **headers: str) -> Answered:
        """One more, which waits when this returns."""
        before = self.world.queue.n_waiting
        priority = int(headers.pop("priority", "0"))
        body = {"model": "m", "prompt": prompt, "user": name, "priority": priority}
        task = asyncio.create_task(self.world.post(body, **headers))
        self.sent.append(task)
        await until(lambda: self.world.queue.n_waiting > before or task.done())
        return task

    async def let_one_go(self) -> str:
        """The name of who left."""
        n = len(self.stub.calls)
        self.world.say("a", waiting=BOUND - 1)
        await until(lambda: len(self.stub.calls) > n)
        user = json.loads(self.stub.calls[-1].body)["user"]
        assert isinstance(user, str)
        return user

    async def order(self) -> list[str]:
        return [await self.let_one_go() for _ in range(self.world.queue.n_waiting)]


@asynccontextmanager
async def full_line(settings: QueueConfig = SETTINGS, **options: Any) -> AsyncIterator[Line]:
    go_on = asyncio.Event()

    async def answer(call: Call) -> None:
        await go_on.wait()
        await call.ok(b'{"choices":[]}')

    async with Stub(answer) as stub, World({"a": stub.url}, queue=settings, **options) as world:
        world.say("a", waiting=BOUND)
        line = Line(world, stub, go_on)
        yield line
        go_on.set()
        world.say("a", waiting=0, running=0)
        await asyncio.gather(*line.sent, return_exceptions=True)
        await until(world.is_idle)


async def shed(answer: Awaitable[tuple[int, bytes, Any]]) -> tuple[int, str, int]:
    """(status, reason, Retry-After), said everywhere alike."""
    status, body, headers = await answer
    reason = json.loads(body)["error"]["code"]
    assert headers["x-warmroute-shed"] == reason
    return status, reason, int(headers["Retry-After"])


# ---- waiting ---------------------------------------------------------------------------------------------------------


async def test_with_room_nobody_waits() -> None:
    async with full_line() as line:
        line.world.say("a", waiting=0)
        line.go_on.set()
        assert (await (await line.send("one")))[0] == 200
        (record,) = await line.world.records()
        assert "queued_ms" not in record
        assert line.world.value("warmroute_queue_wait_seconds_count") == 0
        assert line.world.queue.lanes.get("m") is None or not line.world.queue.lanes["m"].held


async def test_a_request_waits_until_there_is_room_and_is_planned_then() -> None:
    async with full_line() as line:
        task = await line.send("one")
        await asyncio.sleep(0.06)
        assert not task.done()
        assert line.stub.calls == []
        assert line.world.load() == {"a": 0}
        assert await line.let_one_go() == "one"
        assert line.world.load() == {"a": 1}
        line.go_on.set()
        assert (await task)[0] == 200
        (record,) = await line.world.records()
        assert record["queued_ms"] >= 50
        assert record["overhead_ms"] < record["queued_ms"]


async def test_a_worker_with_room_is_enough() -> None:
    async with full_line() as line, Stub(line.stub.script) as other:
        line.world.add("b", other.url)
        line.world.say("b", waiting=0)
        line.go_on.set()
        assert (await (await line.send("one")))[0] == 200
        assert line.world.queue.lanes.get("m") is None or not line.world.queue.lanes["m"].held


async def test_an_ended_request_makes_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.queue.queue._LOOK_S", 60.0)
    async with full_line() as line:
        world = line.world
        world.say("a", waiting=0)
        first = asyncio.create_task(world.post({"model": "m", "prompt": "hi", "user": "first"}))
        await until(lambda: line.stub.calls)
        world.say("a", waiting=BOUND)  # It is the one that waits inside.
        await line.send("second")
        assert world.queue.n_waiting == 1
        line.go_on.set()
        assert (await first)[0] == 200
        await until(lambda: len(line.stub.calls) == 2)


async def test_freed_places_are_given_one_by_one() -> None:
    async with full_line() as line:
        for i in range(6):
            await line.send(str(i))
        line.world.say("a", waiting=BOUND - 2)
        await until(lambda: len(line.stub.calls) == 2)
        await asyncio.sleep(0.06)
        assert len(line.stub.calls) == 2
        assert line.world.queue.n_waiting == 4


async def test_it_can_be_turned_off_and_hints_are_not_held() -> None:
    async with full_line(QueueConfig(enabled=False, waiting_per_worker=BOUND)) as line:
        line.go_on.set()
        assert (await (await line.send("one")))[0] == 200
    async with full_line() as line:
        line.world.hints = Hints(decode=frozenset({"a"}))
        line.go_on.set()
        assert (await (await line.send("one")))[0] == 200


async def test_what_does_not_run_the_model_does_not_wait() -> None:
    async with full_line() as line:
        line.go_on.set()
        status, _, _ = await line.world.post({"model": "m", "prompt": "hi"}, path="/tokenize")
        assert status == 200


async def test_models_with_workers_of_their_own_do_not_wait_for_each_other() -> None:
    async with full_line() as line, Stub(line.stub.script) as other:
        await line.send("held")
        line.world.add("b", other.url, model="n")
        line.world.say("b", waiting=0, running=0)
        tasks = [asyncio.create_task(line.world.post({"model": "n", "prompt": "hi"})) for _ in range(20)]
        await until(lambda: len(other.calls) == 20)
        assert line.world.queue.n_waiting == 1
        line.go_on.set()
        assert {(await task)[0] for task in tasks} == {200}


async def test_adapters_take_turns_with_the_model_whose_workers_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.queue.queue._LOOK_S", 60.0)
    async with full_line() as line:
        line.world.fleet.set_capabilities("a", models=["m"], adapters=["lora"])
        await line.send("base")
        adapter = {"model": "lora", "prompt": "hi", "user": "adapter"}
        # There is room, and who comes now is the first to see it.
        line.world.fleet.set_stats("a", EngineStats(scraped_at_s=time.monotonic() + 60, running=1, waiting=BOUND - 1))
        line.sent.append(asyncio.create_task(line.world.post(adapter)))
        await until(lambda: len(line.stub.calls) == 1)
        assert json.loads(line.stub.calls[0].body)["user"] == "base"
        await until(lambda: line.world.queue.n_waiting == 1)
        assert await line.order() == ["adapter"]


async def test_s13_stale_figures_are_no_saturation() -> None:
    """S13: every engine stops answering scrapes while requests wait. They are let go as if there were no queue."""
    async with full_line() as line:
        for i in range(10):
            await line.send(str(i))
        assert line.stub.calls == []
        line.world.say("a", waiting=500, age_s=5.1)
        await until(lambda: len(line.stub.calls) == 10)


async def test_o12_1500_callers_are_held_or_refused_in_bounds() -> None:
    """O12: 1,500 callers at a full fleet. What may wait waits, the others know at once, all is given back."""
    settings = QueueConfig(waiting_per_worker=BOUND, max_requests=100)
    async with full_line(settings, max_concurrency=4096) as line:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def call(i: int) -> int:
                body = {"model": "m", "prompt": f"hi {i}", "user": str(i)}
                async with http.post(line.world.url + "/v1/completions", json=body) as response:
                    await response.read()
                    return response.status

            tasks = [asyncio.create_task(call(i)) for i in range(1500)]
            await until(lambda: sum(task.done() for task in tasks) == 1400, within_s=60)
            assert {task.result() for task in tasks if task.done()} == {429}
            assert line.world.queue.n_waiting == 100
            line.go_on.set()
            line.world.say("a", waiting=0, running=0)
            assert [await task for task in tasks].count(200) == 100


# ---- the order -------------------------------------------------------------------------------------------------------


async def test_by_priority_body_or_header_which_go_on_unchanged() -> None:
    async with full_line() as line:
        await line.send("low", priority="5")
        await line.send("usual")
        await line.send("high", priority="-1")
        await line.send("header", priority="7", **{"X-Vllm-Priority": "-3"})
        assert await line.order() == ["header", "high", "usual", "low"]
        assert json.loads(line.stub.calls[-1].body)["priority"] == 5
        assert line.stub.calls[0].header("x-vllm-priority") == "-3"


async def test_a_flooding_tenant_does_not_hold_up_another() -> None:
    async with full_line(tenancy=TENANTS) as line:
        for i in range(8):
            await line.send(f"flood{i}", **{"x-tenant": "flood"})
        await line.send("few0", **{"x-tenant": "few"})
        await line.send("few1", **{"x-tenant": "few"})
        assert [name[:3] for name in await line.order()][:4] == ["flo", "few", "flo", "few"]


async def test_by_deadline_then_as_they_came() -> None:
    async with full_line() as line:
        await line.send("first")
        await line.send("second")
        await line.send("urgent", **{"x-slo-ttft-ms": "500"})
        assert await line.order() == ["urgent", "first", "second"]


# ---- bounds ----------------------------------------------------------------------------------------------------------


async def test_too_many_requests_are_429_with_a_time_to_come_back() -> None:
    async with full_line(QueueConfig(waiting_per_worker=BOUND, max_requests=2)) as line:
        await line.send("one")
        await line.send("two")
        assert await shed(await line.send("three")) == (429, "queue_full", 60)
        assert line.world.value("warmroute_requests_rejected_total", reason="queue_full") == 1
        assert await line.order() == ["one", "two"]
        assert line.world.queue.lanes["m"].sheds["queue_full"] == 1


async def test_the_time_to_come_back_is_that_of_those_who_wait() -> None:
    async with full_line(QueueConfig(waiting_per_worker=BOUND, max_requests=3)) as line:
        for i in range(3):
            await line.send(str(i))
        await asyncio.sleep(0.25)
        await line.let_one_go()
        await line.send("3")
        status, _, retry_after_s = await shed(await line.send("4"))
        assert status == 429
        assert 1 <= retry_after_s <= 10  # One left within half a second, three wait.


async def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    async with full_line(QueueConfig(waiting_per_worker=BOUND, max_requests=2)) as line:
        await line.send("one", priority="1")
        last = await line.send("two", priority="1")
        task = asyncio.create_task(line.world.post({"model": "m", "prompt": "x", "user": "high"}))
        line.sent.append(task)
        assert (await shed(last))[:2] == (429, "queue_full")
        assert (await shed(await line.send("low", priority="1")))[:2] == (429, "queue_full")
        assert await line.order() == ["high", "one"]


async def test_too_many_prompt_tokens_are_429_but_a_lone_request_is_not() -> None:
    async with full_line(QueueConfig(waiting_per_worker=BOUND, max_tokens=50)) as line:
        await line.send("huge", prompt="word " * 500)
        assert line.world.queue.n_waiting == 1
        assert (await shed(await line.send("small")))[:2] == (429, "queue_full")


async def test_one_tenant_cannot_fill_it() -> None:
    settings = QueueConfig(waiting_per_worker=BOUND, max_requests=4, tenant_share=0.5)
    async with full_line(settings, tenancy=TENANTS) as line:
        for i in range(2):
            await line.send(str(i), **{"x-tenant": "flood"})
        assert (await shed(await line.send("3", **{"x-tenant": "flood"})))[:2] == (429, "tenant_queue_full")
        await line.send("other", **{"x-tenant": "other"})
        assert line.world.queue.n_waiting == 3


async def test_who_waits_too_long_is_429() -> None:
    async with full_line(QueueConfig(waiting_per_worker=BOUND, max_wait_s=0.15)) as line:
        began_s = time.monotonic()
        task = await line.send("one")
        assert (await shed(task))[:2] == (429, "queue_timeout")
        assert time.monotonic() - began_s >= 0.15
        assert line.stub.calls == []
        (record,) = await line.world.records()
        assert (record["status"], record["error"]) == (429, "queue_timeout")
        assert record["queued_ms"] >= 150


# ---- leaving ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_its_place_at_once() -> None:
    async with full_line(QueueConfig(waiting_per_worker=BOUND, max_requests=1)) as line:
        task = await line.send("one")
        task.cancel()
        await until(lambda: line.world.queue.n_waiting == 0)
        await line.send("two")
        assert await line.order() == ["two"]


async def test_a_gateway_that_closes_answers_who_waits() -> None:
    async with full_line() as line:
        task = await line.send("one")
        line.world.queue.close()
        assert await shed(task) == (503, "draining", 1)
        assert (await shed(await line.send("two")))[:2] == (503, "draining")
        line.world.say("a", waiting=0)
        line.go_on.set()
        assert (await (await line.send("three")))[0] == 200


async def test_without_a_worker_left_the_answer_comes_at_once() -> None:
    async with full_line() as line:
        tasks = [await line.send("one"), await line.send("two")]
        line.world.down.add("a")
        assert {(await task)[0] for task in tasks} == {503}
        line.world.down.clear()
        line.world.say("a", waiting=BOUND)
        task = await line.send("three")
        line.world.fleet.set_capabilities("a", models=["other"])
        assert (await task)[0] == 404
        assert (await (await line.send("four")))[0] == 404


# ---- refusing what would be late -------------------------------------------------------------------------------------

LATE = {"x-slo-ttft-ms": "1", "x-warmroute-shed": "late"}


def arm(line: Line, *, error: float = 0.1, samples: int = MIN_SAMPLES) -> None:
    lane = line.world.queue._lane("m")
    for _ in range(samples):
        lane.lateness.note(1 + error, 1.0, time.monotonic())


@asynccontextmanager
async def busy_line(shed_late: Any = "asked", age_s: float = -60.0) -> AsyncIterator[Line]:
    """With room, and something running."""
    async with full_line(QueueConfig(waiting_per_worker=BOUND, shed_late=shed_late)) as line:
        line.world.say("a", waiting=0, running=3, age_s=age_s)
        line.go_on.set()
        yield line


async def test_what_will_be_late_is_refused_when_it_asks_to_be() -> None:
    async with busy_line() as line:
        arm(line)
        status, reason, retry_after_s = await shed(await line.send("late", **LATE))
        assert (status, reason) == (429, "predicted_late")
        assert retry_after_s == 1
        assert line.stub.calls == []
        assert (await (await line.send("in time", **{**LATE, "x-slo-ttft-ms": "60000"})))[0] == 200
        assert (await (await line.send("did not ask", **{"x-slo-ttft-ms": "1"})))[0] == 200


@pytest.mark.parametrize(("samples", "error"), [(MIN_SAMPLES - 1, 0.1), (MIN_SAMPLES, 0.31), (0, 0.0)])
async def test_nothing_is_refused_by_predictions_that_are_few_or_wrong(samples: int, error: float) -> None:
    async with busy_line("objective") as line:
        arm(line, samples=samples, error=error)
        assert (await (await line.send("late", **LATE)))[0] == 200


async def test_nothing_is_refused_because_figures_are_old_or_by_an_idle_worker_or_when_it_is_off() -> None:
    async with busy_line("objective", age_s=60.0) as line:
        arm(line)
        assert (await (await line.send("late", **LATE)))[0] == 200
    async with busy_line("objective") as line:
        arm(line)
        line.world.say("a", waiting=0, running=0)
        assert (await (await line.send("late", **LATE)))[0] == 200
    async with busy_line("never") as line:
        arm(line)
        assert (await (await line.send("late", **LATE)))[0] == 200


async def test_late_is_what_is_late_by_more_than_predictions_are_off() -> None:
    async with busy_line() as line:
        arm(line, error=0.2)
        facts = RequestFacts(request_id="x", model="m", prompt_tokens=1)
        world = line.world
        ttft_s = world.planner.explain(facts, None, time.monotonic(), world.parts.rng).chosen.price.ttft_s
        for share, status in ((0.9, 200), (0.7, 429)):
            headers = {**LATE, "x-slo-ttft-ms": str(ttft_s * 1000 * share)}
            assert (await (await line.send("one", **headers)))[0] == status


async def test_with_an_operators_word_all_objectives_count() -> None:
    async with busy_line("objective") as line:
        arm(line)
        assert (await shed(await line.send("late", **{"x-slo-ttft-ms": "1"})))[:2] == (429, "predicted_late")


async def test_who_became_late_while_it_waited_is_refused_too() -> None:
    async with full_line() as line:
        arm(line)
        task = await line.send("late", **{**LATE, "x-slo-ttft-ms": "400"})
        await asyncio.sleep(0.5)
        line.world.say("a", waiting=BOUND - 1)
        assert (await shed(task))[:2] == (429, "predicted_late")
        assert line.stub.calls == []


async def test_streams_tell_how_good_predictions_are() -> None:
    async def stream(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"choices":[{"text":"x"}]}\n\n')
        await call.end_stream()

    async with Stub(stream) as stub, World({"a": stub.url}, queue=SETTINGS) as world:
        for _ in range(3):
            assert (await world.post({"model": "m", "prompt": "hi", "stream": True}))[0] == 200
        lateness = world.queue.lanes["m"].lateness
        await until(lambda: lateness.samples(time.monotonic()) == 3)
        assert lateness.error(time.monotonic()) is not None
