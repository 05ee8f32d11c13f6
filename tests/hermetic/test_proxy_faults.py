"""Workers that fail and clients that leave: who is asked again, what is given back."""

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from gateway.engine.health import State
from tests.support.proxy_world import Call, Stub, World, raw_request, until

pytestmark = pytest.mark.usefixtures("http_plane")

BODY = {"model": "m", "prompt": "hi"}


async def ok(call: Call) -> None:
    await call.ok(b'{"choices":[]}')


async def resets(call: Call) -> None:
    call.reset()


async def stalls(call: Call) -> None:
    await call.wait_hang_up()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def headers_then_reset(call: Call) -> None:
    await call.begin_stream()
    call.reset()


@pytest.mark.parametrize("script", [resets, headers_then_reset])
async def test_no_byte_received_means_one_retry_elsewhere(script: object) -> None:
    async with (
        Stub(script) as bad,  # type: ignore[arg-type]
        Stub(ok) as good,  # type: ignore[arg-type]
        World({"bad": bad.url, "good": good.url}, policy="round-robin") as world,
    ):
        for _ in range(4):
            status, _, headers = await world.post(BODY)
            assert (status, headers["x-warmroute-worker"]) == (200, "good")
        assert world.value("warmroute_retries_total", reason="disconnected") == len(bad.calls) >= 1
        assert world.is_idle()
    assert {call.body for call in bad.calls} <= {call.body for call in good.calls}


async def test_a_refused_connection_means_one_retry_elsewhere() -> None:
    async with (
        Stub(ok) as good,
        World({"bad": f"http://127.0.0.1:{free_port()}", "good": good.url}, policy="round-robin") as world,
    ):
        for _ in range(4):
            assert (await world.post(BODY))[0] == 200
        assert world.value("warmroute_retries_total", reason="connect") >= 1
        assert world.is_idle()


async def test_there_is_only_one_retry() -> None:
    async with (
        Stub(resets) as one,
        Stub(resets) as two,
        Stub(resets) as three,
        World({"a": one.url, "b": two.url, "c": three.url}) as world,
    ):
        status, body, headers = await world.post(BODY)
        assert (status, json.loads(body)["error"]["type"]) == (502, "upstream_error")
        assert "Retry-After" in headers
        assert len(one.calls) + len(two.calls) + len(three.calls) == 2
        assert world.is_idle()


async def test_a_single_worker_is_asked_again_on_a_fresh_connection() -> None:
    async def first_resets(call: Call) -> None:
        if len(stub.calls) == 1:
            call.reset()
        else:
            await call.ok()

    async with Stub(first_resets) as stub, World({"a": stub.url}) as world:
        assert (await world.post(BODY))[0] == 200
        assert stub.connections == 2


async def test_a_single_worker_that_is_gone_is_not_asked_twice() -> None:
    async with World({"a": f"http://127.0.0.1:{free_port()}"}) as world:
        status, body, _ = await world.post(BODY)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unreachable")
        assert world.value("warmroute_retries_total", reason="connect") == 0
        assert world.is_idle()


async def refuses_503(call: Call) -> None:
    await call.ok(b'{"error":{"message":"full"}}', "Retry-After: 3", status="503 Service Unavailable")


async def test_a_503_is_tried_elsewhere() -> None:
    async with (
        Stub(refuses_503) as full,
        Stub(ok) as good,
        World({"full": full.url, "good": good.url}, policy="round-robin") as world,
    ):
        for _ in range(2):
            assert (await world.post(BODY))[0] == 200
        assert world.value("warmroute_retries_total", reason="status_503") == len(full.calls) >= 1
        assert world.is_idle()


async def test_a_503_that_nobody_else_can_better_is_passed_on() -> None:
    async with Stub(refuses_503) as full, World({"full": full.url}) as world:
        status, body, headers = await world.post(BODY)
        assert (status, body, headers["Retry-After"]) == (503, b'{"error":{"message":"full"}}', "3")
        assert len(full.calls) == 1
        assert world.is_idle()


async def test_after_the_first_byte_there_is_no_retry_and_the_client_sees_the_break() -> None:
    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"choices":[{"text":"a"}]}\n\n')
        await call.chunk(b'data: {"cho')
        await asyncio.sleep(0.05)
        call.reset()

    async with (
        Stub(breaks) as bad,
        Stub(ok) as good,
        World({"bad": bad.url, "good": good.url}) as world,
    ):
        world.down.add("good")
        reader, writer = await world.connect()
        writer.write(raw_request(json.dumps({**BODY, "stream": True}).encode()))
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert b'data: {"cho' in answer
        assert not answer.endswith(b"0\r\n\r\n")
        assert b"error" not in answer  # Half an event stays half an event.
        assert good.calls == []
        await until(world.is_idle)
        assert world.value("warmroute_answers_cut_total", reason="upstream_broke") == 1


async def test_a_break_between_two_events_is_told_by_an_event() -> None:
    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"choices":[{"text":"a"}]}\r\n\r')
        await call.chunk(b"\n")
        await asyncio.sleep(0.05)
        call.reset()

    async with Stub(breaks) as bad, World({"bad": bad.url}) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(json.dumps(BODY).encode()))
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert b'data: {"error":{"message":"The worker\'s answer broke off."' in answer
        assert not answer.endswith(b"0\r\n\r\n")


async def test_a_short_body_is_not_passed_off_as_whole() -> None:
    async def short(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 40)
        call.writer.close()

    async with Stub(short) as bad, World({"bad": bad.url}) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(json.dumps(BODY).encode()))
        head, _, rest = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
        writer.close()
        assert b"content-length: 100" in head.lower()
        assert rest == b"x" * 40
        await until(world.is_idle)


async def test_an_answer_that_never_comes_ends_in_504() -> None:
    async with (
        Stub(stalls) as hung,
        Stub(ok) as other,
        World({"hung": hung.url, "other": other.url}, request_timeout_s=1.0) as world,
    ):
        world.down.add("other")
        status, body, _ = await world.post(BODY)
        assert (status, json.loads(body)["error"]["code"]) == (504, "upstream_timeout")
        await until(lambda: hung.calls[0].hung_up.is_set())
        assert world.is_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_worker(stream: bool) -> None:
    async def talks(call: Call) -> None:
        if stream:
            await call.begin_stream()
            await call.chunk(b'data: {"a":1}\n\n')
        await call.wait_hang_up()

    async with Stub(talks) as stub, World({"a": stub.url}) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(json.dumps({**BODY, "stream": stream}).encode()))
        if stream:
            await reader.readuntil(b'{"a":1}\n\n')
        await until(lambda: stub.calls)
        assert world.load() == {"a": 1}
        writer.close()
        await until(lambda: stub.calls[0].hung_up.is_set(), within_s=30)
        await until(world.is_idle)
        (record,) = await world.records()
        assert record["cut"] == "client_left"
        assert record["status"] == (200 if stream else 499)
        assert world.health.state("a").state is State.HEALTHY


async def test_a_client_that_leaves_while_it_sends_costs_nothing() -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        _, writer = await world.connect()
        writer.write(raw_request(json.dumps(BODY).encode())[:-5])
        await writer.drain()
        await until(lambda: world.plane.in_flight == 1)
        writer.close()
        await until(world.is_idle)
        assert stub.calls == []


async def test_a_worker_removed_while_it_answers_may_end() -> None:
    go_on = asyncio.Event()

    async def talks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await go_on.wait()
        await call.chunk(b"data: 2\n\n")
        await call.end_stream()
        await call.wait_hang_up()

    async with Stub(talks) as stub, World({"a": stub.url}) as world:
        async with world.http.post(world.url + "/v1/completions", json=BODY) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            world.fleet.workers.pop("a")
            world.upstreams.remove("a")
            go_on.set()
            assert await response.content.read() == b"data: 2\n\n"
        await until(lambda: stub.calls[0].hung_up.is_set())


async def test_a_stalling_worker_is_ejected_within_seconds_and_the_fleet_serves_on() -> None:
    async with (
        Stub(stalls) as hung,
        Stub(ok) as good,
        World({"hung": hung.url, "good": good.url}, policy="round-robin") as world,
    ):
        asked: list[asyncio.Task[Any]] = []
        deadline_s = time.monotonic() + 15
        while world.health.state("hung").state is not State.EJECTED:
            assert time.monotonic() < deadline_s
            asked.append(asyncio.create_task(world.post({**BODY, "stream": True})))
            await asyncio.sleep(0.1)
            world.health.tick(time.monotonic())
        assert world.health.state("good").state is State.HEALTHY
        for _ in range(4):
            status, _, headers = await world.post(BODY)
            assert (status, headers["x-warmroute-worker"]) == (200, "good")
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_no_worker_at_all_and_none_for_the_model() -> None:
    async with World({}) as world:
        status, body, headers = await world.post(BODY)
        assert (status, json.loads(body)["error"]["code"], headers["Retry-After"]) == (503, "no_worker", "1")
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        status, body, _ = await world.post({"model": "nope", "prompt": "x"})
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        world.down.add("a")
        status, body, headers = await world.post(BODY)
        assert (status, json.loads(body)["error"]["code"], headers["Retry-After"]) == (503, "no_worker", "1")
        assert world.value("warmroute_requests_rejected_total", reason="no_worker") == 1


async def test_a_fault_of_our_own_is_a_500_in_openais_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        monkeypatch.setattr(world.planner.index, "match", None)
        status, body, _ = await world.post({"model": "m", "prompt": [1] * 64})
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal")
        assert "unexpected" in caplog.text
        monkeypatch.undo()
        assert (await world.post(BODY))[0] == 200
        assert world.is_idle()


async def test_broken_answers_and_clients_that_leave_are_no_errors_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        call.reset()

    async with Stub(breaks) as stub, World({"a": stub.url}) as world:
        for leave_early in (False, True):
            reader, writer = await world.connect()
            writer.write(raw_request(json.dumps(BODY).encode()))
            await (until(lambda: len(stub.calls) == 2) if leave_early else reader.read())
            writer.transport.abort()
        await until(world.is_idle)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_requests_with_one_id_do_not_disturb_each_other() -> None:
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await go_on.wait()
        await call.ok()

    async with Stub(waits) as stub, World({"a": stub.url}) as world:
        tasks = [asyncio.create_task(world.post(BODY, **{"X-Request-Id": "same"})) for _ in range(5)]
        await until(lambda: len(stub.calls) == 5)
        assert world.load() == {"a": 5}
        go_on.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 5
        assert world.is_idle()
