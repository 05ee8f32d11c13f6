"""Stored responses: each is in the memory of one worker, and whatever is about it goes there."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from yarl import URL

from bench.engine.config import FakeVllmConfig
from bench.engine.timing import preset
from gateway.discovery import Source
from gateway.engine.health import End, State
from gateway.proxy import holders
from gateway.stored import Place
from scorer.types import ChangeKind, WorkerChange
from tests.support.gateway_world import Fleet, engine, until
from tests.support.proxy_world import Call, Stub, World

NAMES = ("a", "b", "c")
BODY = {"model": "tiny", "input": "tell me of the sea", "max_output_tokens": 3}


def keeping(**changes: Any) -> FakeVllmConfig:
    return engine(store_responses=True, **changes)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(**{name: keeping() for name in NAMES}) as started:
        yield started


async def create(fleet: Fleet, **fields: Any) -> tuple[str, dict[str, Any]]:
    """(worker, response)"""
    status, answer, headers = await fleet.post(fleet.url + "/v1/responses", {**BODY, **fields})
    assert status == 200, answer
    return headers["x-warmroute-worker"], answer


def asked(fleet: Fleet, name: str) -> int:
    return len(fleet.engines[name].requests)


async def test_a_follow_up_goes_to_the_worker_that_holds_what_it_follows(fleet: Fleet) -> None:
    for _ in range(3):
        worker, first = await create(fleet)
        last = first["id"]
        for _ in range(3):
            other, answer = await create(fleet, previous_response_id=last)
            assert (other, answer["previous_response_id"]) == (worker, last)
            assert answer["usage"]["input_tokens"] > first["usage"]["input_tokens"]
            last = answer["id"]
    assert fleet.core.planner.in_flight() == 0


async def test_a_follow_up_is_priced_and_booked_like_any_request(fleet: Fleet) -> None:
    worker, first = await create(fleet)
    _, page, _ = await fleet.post(fleet.admin + "/debug/explain", {**BODY, "previous_response_id": first["id"]})
    assert [row["decode"][0] for row in page["considered"]] == [worker]
    assert page["considered"][0]["price"]["total_s"] > 0
    assert page["pd_reason"] == "stored_response"


async def test_it_is_read_and_cancelled_where_it_is(fleet: Fleet) -> None:
    for _ in range(4):
        worker, made = await create(fleet)
        before = asked(fleet, worker)
        assert await fleet.get(f"{fleet.url}/v1/responses/{made['id']}") == (200, made)
        status, answer, _ = await fleet.post(f"{fleet.url}/v1/responses/{made['id']}/cancel")
        assert (status, answer["error"]["message"]) == (400, "Cannot cancel a synchronous response.")
        assert asked(fleet, worker) == before + 1


async def test_a_streamed_one_is_known_too(fleet: Fleet) -> None:
    async with fleet.http.post(fleet.url + "/v1/responses", json={**BODY, "stream": True}) as response:
        worker, text = response.headers["x-warmroute-worker"], await response.text()
    made = json.loads(text.split("data: ")[-1])["response"]
    assert fleet.core.stored.find(made["id"], 0.0) == Place(worker, 0)
    status, answer = await fleet.get(f"{fleet.url}/v1/responses/{made['id']}")
    assert (status, answer["id"]) == (200, made["id"])


async def test_one_in_the_background_can_be_followed_from_where_one_left(fleet: Fleet) -> None:
    worker, queued = await create(fleet, background=True)
    url = f"{fleet.url}/v1/responses/{queued['id']}"
    assert queued["status"] == "queued"
    await until(lambda: not fleet.engines[worker].store.tasks)
    assert (await fleet.get(url))[1]["status"] == "incomplete"
    async with fleet.http.post(fleet.url + "/v1/responses", json={**BODY, "background": True, "stream": True}) as first:
        events = (await first.read()).split(b"\n\n")
        worker = first.headers["x-warmroute-worker"]
    made = json.loads(events[0].partition(b"data: ")[2])["response"]["id"]
    async with fleet.http.get(f"{fleet.url}/v1/responses/{made}?stream=true&starting_after=2") as again:
        assert again.headers["Content-Type"].startswith("text/event-stream")
        assert (await again.read()).split(b"\n\n") == events[3:]
    assert fleet.core.stored.find(made, 0.0) == Place(worker, 0)


async def test_one_that_runs_can_be_cancelled() -> None:
    slow = keeping().with_engine(timing=preset("cpu-fast"), max_model_len=16_384)
    async with Fleet(a=slow, b=slow, c=slow) as fleet:
        worker, queued = await create(fleet, background=True, max_output_tokens=10_000)
        status, answer, headers = await fleet.post(f"{fleet.url}/v1/responses/{queued['id']}/cancel")
        assert (status, answer["status"]) == (200, "cancelled")
        assert headers["Server"] == "uvicorn"
        assert not fleet.engines[worker].store.tasks


async def test_where_one_ends_is_told_while_it_is_streamed_from_a_slow_worker() -> None:
    """Its reader leaves: the worker is told at once."""
    slow = keeping().with_engine(timing=preset("cpu-fast"), max_model_len=16_384)
    async with Fleet(a=slow, b=slow) as fleet:
        body = {**BODY, "background": True, "stream": True, "max_output_tokens": 10_000}
        async with fleet.http.post(fleet.url + "/v1/responses", json=body) as first:
            head = await first.content.readuntil(b"\n\n")
        made = json.loads(head.partition(b"data: ")[2])["response"]["id"]
        async with fleet.http.get(f"{fleet.url}/v1/responses/{made}?stream=true") as again:
            await again.content.readuntil(b"\n\n")
            assert fleet.gateway.plane.in_flight == 1
        await until(lambda: fleet.gateway.plane.in_flight == 0)


async def test_a_restarted_workers_responses_are_gone_and_it_is_said(fleet: Fleet) -> None:
    worker, made = await create(fleet)
    await fleet.engines[worker].restart()
    await until(lambda: not isinstance(fleet.core.stored.find(made["id"], 0.0), Place))
    for status, answer in (
        await fleet.get(f"{fleet.url}/v1/responses/{made['id']}"),
        (await fleet.post(fleet.url + "/v1/responses", {**BODY, "previous_response_id": made["id"]}))[:2],
        (await fleet.post(f"{fleet.url}/v1/responses/{made['id']}/cancel"))[:2],
    ):
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (404, "response_not_found", "response_id")
        assert f"worker {worker}, which held it, is gone or was restarted" in error["message"]


async def test_responses_of_a_worker_that_was_away_from_us_only_are_found_again(fleet: Fleet) -> None:
    worker, made = await create(fleet)
    url = fleet.engines[worker].url
    fleet.core.take(Source.STATIC, WorkerChange(kind=ChangeKind.REMOVED, worker=worker))
    status, answer = await fleet.get(f"{fleet.url}/v1/responses/{made['id']}")
    assert (status, answer["error"]["code"]) == (404, "response_not_found")
    fleet.core.take(Source.STATIC, WorkerChange(kind=ChangeKind.ADDED, worker=worker, url=url))
    await until(lambda: fleet.core.scraper.reachable(worker) is True)
    assert await fleet.get(f"{fleet.url}/v1/responses/{made['id']}") == (200, made)
    assert (await create(fleet, previous_response_id=made["id"]))[0] == worker


async def test_a_holder_that_is_ejected_and_works_is_asked_all_the_same(fleet: Fleet) -> None:
    """Its back-off is for requests that others can serve; this one only it can."""
    worker, made = await create(fleet)
    health, other = fleet.core.health, next(name for name in NAMES if name != worker)
    for _ in range(2):
        health.request_ended(health.request_started(worker, time.monotonic()), End.CONNECT, time.monotonic())
    health.checked(other, True, time.monotonic())
    health._workers[worker].backoff_s = 600.0
    await until(lambda: health.state(worker).state is State.EJECTED)
    await until(lambda: health.works(worker))
    assert not health.available(worker)
    assert (await create(fleet, previous_response_id=made["id"]))[0] == worker
    assert (await create(fleet))[0] != worker


async def test_ids_that_no_engine_makes_are_not_found(fleet: Fleet) -> None:
    for status, answer in (
        await fleet.get(URL(f"{fleet.url}/v1/responses/%ff", encoded=True)),
        (await fleet.post(URL(f"{fleet.url}/v1/responses/%ff/cancel", encoded=True)))[:2],
        (await fleet.post(fleet.url + "/v1/responses", {**BODY, "previous_response_id": "\ud800"}))[:2],
    ):
        assert (status, answer["error"]["code"]) == (404, "response_not_found")


async def test_what_a_gateway_forgot_is_found_by_asking(fleet: Fleet) -> None:
    for _ in range(3):
        worker, made = await create(fleet)
        fleet.core.stored._entries.clear()
        assert (await create(fleet, previous_response_id=made["id"]))[0] == worker
        assert fleet.core.stored.find(made["id"], 0.0) == Place(worker, None)
        fleet.core.stored._entries.clear()
        assert await fleet.get(f"{fleet.url}/v1/responses/{made['id']}") == (200, made)


async def test_what_nobody_has_is_not_found(fleet: Fleet) -> None:
    for _ in range(2):
        status, answer = await fleet.get(fleet.url + "/v1/responses/resp_none")
        assert (status, answer["error"]["code"]) == (404, "response_not_found")
        assert answer["error"]["message"] == "Response with id 'resp_none' not found."
    status, answer, _ = await fleet.post(fleet.url + "/v1/responses", {**BODY, "previous_response_id": "resp_none"})
    assert (status, answer["error"]["code"]) == (404, "response_not_found")


async def test_one_that_is_not_to_be_stored_is_not_remembered(fleet: Fleet) -> None:
    _, made = await create(fleet, store=False)
    assert fleet.core.stored.find(made["id"], 0.0) is None
    assert (await fleet.get(f"{fleet.url}/v1/responses/{made['id']}"))[0] == 404


async def test_of_ranks_the_one_that_computed_it_is_asked_again() -> None:
    async with Fleet(a=keeping(data_parallel_size=4), b=keeping(data_parallel_size=4)) as fleet:
        for _ in range(4):
            worker, first = await create(fleet)
            rank = fleet.engines[worker].requests[-1].headers["X-data-parallel-rank"]
            for _ in range(3):
                assert (await create(fleet, previous_response_id=first["id"]))[0] == worker
                assert fleet.engines[worker].requests[-1].headers["X-data-parallel-rank"] == rank


async def test_lookups_are_counted(fleet: Fleet) -> None:
    _, made = await create(fleet)
    await fleet.get(f"{fleet.url}/v1/responses/{made['id']}")
    await fleet.get(fleet.url + "/v1/responses/resp_none")
    _, page = await fleet.get(fleet.url + "/metrics")
    assert "warmroute_stored_responses 1.0" in page
    for outcome, n in (("known", 1), ("not_found", 1), ("found", 0), ("gone", 0), ("unsure", 0)):
        assert f'warmroute_stored_response_lookups_total{{outcome="{outcome}"}} {n}.0' in page


async def test_wrong_methods_and_paths(fleet: Fleet) -> None:
    for method, path, status, allow in (
        ("DELETE", "/v1/responses/x", 405, "GET, OPTIONS"),
        ("POST", "/v1/responses/x", 405, "GET, OPTIONS"),
        ("GET", "/v1/responses/x/cancel", 405, "OPTIONS, POST"),
        ("GET", "/v1/responses/x/input_items", 404, None),
        ("GET", "/v1/responses/", 404, None),
        ("GET", "/v1/responses/a%2Fcancel", 404, None),
    ):
        async with fleet.http.request(method, fleet.url + path) as response:
            assert (response.status, response.headers.get("Allow")) == (status, allow), (method, path)
            assert "error" in await response.json()


# ---- workers that a test scripts -------------------------------------------------------------------------------------


def answers(*held: str, status: str = "404 Not Found") -> Any:
    """A worker that holds these ids."""

    async def script(call: Call) -> None:
        name = call.line.split(" ")[1].rpartition("/")[2].partition("?")[0]
        if name in held or call.line.startswith("POST"):
            await call.ok(json.dumps({"id": f"made-{len(held)}", "x": "\u00e9"}).encode())
        else:
            await call.ok(b'{"error": {}}', status=status)

    return script


async def test_credentials_and_query_go_along_and_nothing_else_is_asked() -> None:
    b_is_asked = asyncio.Event()

    async def first_answers_second(call: Call) -> None:
        await b_is_asked.wait()
        await answers("r1")(call)

    async def second(call: Call) -> None:
        b_is_asked.set()
        await answers()(call)

    async with Stub(first_answers_second) as a, Stub(second) as b, World({"a": a.url, "b": b.url}) as world:
        async with world.http.get(
            world.url + "/v1/responses/r1?include=x", headers={"Authorization": "Bearer k"}
        ) as response:
            assert response.status == 200
        assert [call.line for call in b.calls] == ["GET /v1/responses/r1 HTTP/1.1"]
        assert [call.line for call in a.calls] == [
            "GET /v1/responses/r1 HTTP/1.1",
            "GET /v1/responses/r1?include=x HTTP/1.1",
        ]
        assert {call.header("authorization") for call in a.calls + b.calls} == {"Bearer k"}
        record = (await world.records())[0]
        assert (record["path"], record["worker"], record["status"]) == ("/v1/responses/r1", "a", 200)
        assert world.value("warmroute_requests_total", worker="a", status="200") == 1
        assert world.is_idle()


async def test_while_a_worker_cannot_be_asked_nothing_is_said_not_to_be_there() -> None:
    async with (
        Stub(answers()) as a,
        World({"a": a.url, "b": "http://127.0.0.1:9"}) as world,
        world.http.get(world.url + "/v1/responses/r1") as response,
    ):
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_worker")
        assert response.headers["Retry-After"] == "1"


async def test_with_more_workers_than_are_asked_nothing_is_said_not_to_be_there(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "_MOST_ASKED", len(NAMES))
    assert (await fleet.get(fleet.url + "/v1/responses/resp_nowhere"))[0] == 404
    monkeypatch.setattr(holders, "_MOST_ASKED", len(NAMES) - 1)
    assert (await fleet.get(fleet.url + "/v1/responses/resp_nowhere_else"))[0] == 503


async def test_a_worker_that_hangs_does_not_hide_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_TIMEOUT_S", 60.0)
    a_is_asked = asyncio.Event()

    async def hangs(call: Call) -> None:
        a_is_asked.set()
        await call.wait_hang_up()

    async def holds(call: Call) -> None:
        await a_is_asked.wait()
        await answers("r1")(call)

    async with Stub(hangs) as a, Stub(holds) as b, World({"a": a.url, "b": b.url}) as world:
        async with asyncio.timeout(30), world.http.get(world.url + "/v1/responses/r1") as response:
            assert response.status == 200
        await until(lambda: a.calls[0].hung_up.is_set())


async def test_a_wrong_key_is_told_by_a_worker() -> None:
    no = answers(status="401 Unauthorized")
    async with Stub(no) as a, Stub(no) as b, World({"a": a.url, "b": b.url}) as world:
        async with world.http.get(world.url + "/v1/responses/r1") as response:
            assert (response.status, await response.read()) == (401, b'{"error": {}}')
        assert len(world.stored) == 0


async def test_unknown_ids_are_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_UNKNOWN_S", 60.0)
    async with Stub(answers()) as a, Stub(answers()) as b, World({"a": a.url, "b": b.url}) as world:
        for _ in range(5):
            async with world.http.get(world.url + "/v1/responses/r1") as response:
                assert response.status == 404
        async with world.http.get(world.url + "/v1/responses/" + "x" * 300) as response:
            assert response.status == 404
        assert (len(a.calls), len(b.calls)) == (1, 1)


async def test_a_follow_up_for_a_model_that_its_holder_does_not_serve_is_refused() -> None:
    async with Stub(answers()) as a, Stub(answers()) as b, World({"a": a.url}) as world:
        world.add("b", b.url, model="other")
        world.stored.remember("r1", Place("a", 0), time.monotonic())
        status, answer, _ = await world.post(
            {"model": "other", "input": "x", "previous_response_id": "r1"}, "/v1/responses"
        )
        assert (status, json.loads(answer)["error"]["param"]) == (400, "previous_response_id")
        body = {"model": "nobodys", "input": "x", "previous_response_id": "r1"}
        status, answer, _ = await world.post(body, "/v1/responses")
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("previous", [5, None, "", ["r1"]])
async def test_what_is_no_id_is_the_engines_business(previous: Any) -> None:
    async with Stub(answers()) as a, Stub(answers()) as b, World({"a": a.url, "b": b.url}) as world:
        body = {"model": "m", "input": "x", "previous_response_id": previous}
        assert (await world.post(body, "/v1/responses"))[0] == 200
        assert len(a.calls) + len(b.calls) == 1


async def test_a_large_follow_up_is_pinned_too() -> None:
    async with Stub(answers()) as a, Stub(answers()) as b, World({"a": a.url, "b": b.url}) as world:
        world.stored.remember("r1", Place("b", 0), time.monotonic())
        for _ in range(3):
            body = {"model": "m", "input": "x" * 300_000, "previous_response_id": "r1"}
            assert (await world.post(body, "/v1/responses"))[2]["x-warmroute-worker"] == "b"
        assert a.calls == []


async def test_a_connection_closed_as_idle_is_tried_anew() -> None:
    async def hangs_up(call: Call) -> None:
        if len(a.calls) == 2:
            call.writer.close()
        else:
            await answers("r1")(call)

    async with Stub(hangs_up) as a, World({"a": a.url}) as world:
        for _ in range(2):
            async with world.http.get(world.url + "/v1/responses/r1") as response:
                assert response.status == 200
        assert len(a.calls) == 3
