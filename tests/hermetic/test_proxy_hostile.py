"""Requests made to harm: what they cost, what they leave behind, and what is told about them."""

import asyncio
import contextlib
import json
import logging
import time

import pytest

from gateway.engine.health import State
from gateway.large import LARGE_BYTES
from gateway.proxy import body as body_module
from gateway.proxy import handler, relay, server
from scorer.types import Role
from tests.support.proxy_world import Call, Stub, World, raw_request, until

pytestmark = pytest.mark.usefixtures("http_plane")

BODY = {"model": "m", "prompt": "hi"}


async def ok(call: Call) -> None:
    await call.ok(b'{"choices":[]}')


async def floods(call: Call) -> None:
    await call.begin_stream()
    try:
        for _ in range(4000):
            await call.chunk(b"data: " + b"x" * 65_000 + b"\n\n")
    except ConnectionError:
        call.hung_up.set()


async def answer_of(world: World, request: bytes) -> tuple[bytes, bytes]:
    """(head, body) of an exchange that ends with the connection."""
    reader, writer = await world.connect()
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head, rest


async def test_a_number_no_float_can_hold_leaves_no_load_behind() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_completion_tokens":%b}' % (b"9" * 400)
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        for _ in range(3):
            assert (await world.post(raw, "/v1/chat/completions"))[0] == 200
        assert stub.calls[0].body == raw
        await until(world.is_idle)


@pytest.mark.parametrize("attempt", [1, 2])
async def test_a_failure_between_booking_and_sending_gives_the_booking_back(
    monkeypatch: pytest.MonkeyPatch, attempt: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuses(call: Call) -> None:
        await call.ok(status="503 Service Unavailable")

    async with Stub(refuses) as one, Stub(refuses) as two, World({"a": one.url, "b": two.url}) as world:
        started, calls = world.health.request_started, 0

        def fails(name: str, now_s: float, quiet_s: float = 0.0) -> object:
            nonlocal calls
            calls += 1
            if calls == attempt:
                raise OverflowError("secret".upper())
            return started(name, now_s, quiet_s)

        monkeypatch.setattr(world.health, "request_started", fails)
        status, answer, _ = await world.post(BODY)
        assert (status, json.loads(answer)["error"]["code"]) == (500, "internal")
        await until(world.is_idle)
    assert "OverflowError" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    "request_bytes",
    [
        raw_request(b"secret prompt", "Authorization: Bearer sk-secret\x00"),
        raw_request(b"secret prompt", "Authoriza tion: Bearer sk-secret"),
        b"GET /secret HTTP/9.9.9\r\n\r\n",
        b"\x16\x03\x01 secret\r\n\r\n",
        raw_request(b"", "Content-Length: secret", length=False),
        raw_request(b"zz secret\r\n", "Transfer-Encoding: chunked", length=False),
    ],
)
async def test_malformed_requests_are_told_of_without_their_bytes(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        head, rest = await answer_of(world, request_bytes)
        assert head.split(b" ")[1] == b"400"
        assert json.loads(rest)["error"]["type"] == "invalid_request_error"
        assert b"aiohttp" not in head
        assert b"Python" not in head
        assert stub.calls == []
        assert (await world.post(BODY))[0] == 200
    shown = caplog.text + world.log.getvalue() + rest.decode()
    assert "secret" not in shown
    assert "Traceback" not in shown
    assert not [row for row in caplog.records if row.levelno >= logging.ERROR]


async def test_an_unexpected_failure_of_a_page_is_a_500_without_request_data(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks(request: object) -> object:
        raise RuntimeError("secret".upper())

    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        world.plane.pages = {"/x": breaks}  # type: ignore[dict-item]
        head, rest = await answer_of(world, raw_request(b"", line="GET /x HTTP/1.1"))
        assert head.startswith(b"HTTP/1.1 500")
        assert json.loads(rest)["error"]["code"] == "internal"
    assert "RuntimeError" in caplog.text
    assert "in breaks" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(("model", "shown"), [(r"\ud800", "`?`"), ("y" * 5000, "`" + "y" * 200 + "...`")])
async def test_a_model_name_is_repeated_clean_and_short(model: str, shown: str) -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        status, answer, headers = await world.post(b'{"prompt":"x","model":"' + model.encode() + b'"}')
        assert (status, headers["Content-Type"]) == (404, "application/json")
        assert shown in json.loads(answer)["error"]["message"]
        assert len(answer) < 500
        await until(world.is_idle)
        assert len(await world.records()) == 1


async def test_a_reader_that_stops_is_no_stall_of_its_worker() -> None:
    async with Stub(floods) as stub, Stub(ok) as other, World({"a": stub.url, "b": other.url}) as world:
        world.down.add("b")
        _, writer = await world.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(raw_request(json.dumps({**BODY, "stream": True}).encode()))
        await until(lambda: stub.calls)
        (ticket,) = next(iter(world.health._workers.values())).tickets
        await until(lambda: ticket.due_s == float("inf"))
        now_s = time.monotonic() + 20
        world.health.checked("b", True, now_s)
        world.health.tick(now_s)
        assert world.health.state("a").state is State.HEALTHY
        writer.transport.abort()
        await until(world.is_idle)


@pytest.mark.parametrize("limit", ["stall", "request_timeout_s"])
async def test_a_reader_that_stops_is_cut(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    if limit == "stall":
        monkeypatch.setattr(relay, "WRITE_STALL_S", 0.2)
    async with (
        Stub(floods) as stub,
        World({"a": stub.url}, request_timeout_s=30.0 if limit == "stall" else 0.5) as world,
    ):
        _, writer = await world.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(raw_request(json.dumps({**BODY, "stream": True}).encode()))
        await until(lambda: world.value("warmroute_answers_cut_total", reason="client_stalled") == 1)
        await until(world.is_idle)
        assert world.health.state("a").state is State.HEALTHY
        await until(stub.calls[0].hung_up.is_set)
        writer.transport.abort()


async def test_a_slow_reader_that_goes_on_reading_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "WRITE_STALL_S", 1.0)
    size = 24 << 20

    async def large(call: Call) -> None:
        await call.ok(b"x" * size)

    async with Stub(large) as stub, World({"a": stub.url}) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(json.dumps(BODY).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        left = size
        while left:
            left -= len(await reader.read(1 << 20))
            await asyncio.sleep(0.05)
        writer.close()
        await until(world.is_idle)
        assert (await world.records())[0].get("cut") is None


async def test_who_sends_no_body_takes_nobodys_place() -> None:
    async with Stub(ok) as stub, World({"a": stub.url}, max_concurrency=2) as world:
        idle = [await world.connect() for _ in range(7)]
        for _, writer in idle:
            writer.write(raw_request(b"", "Content-Length: 50", length=False))
        await until(lambda: world.plane.in_flight == 7)
        assert (await world.post(BODY))[0] == 200
        more = await world.connect()
        more[1].write(raw_request(b"", "Content-Length: 50", length=False))
        await until(lambda: world.plane.in_flight == 8)
        assert (await world.post(BODY))[0] == 503
        for _, writer in [*idle, more]:
            writer.transport.abort()
        await until(world.is_idle)


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", "Content-Length: 50"])
async def test_a_preflight_is_answered_without_its_body(framing: str) -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        line = "OPTIONS /v1/completions HTTP/1.1"
        head, _ = await answer_of(world, raw_request(b"", framing, "Expect: 100-continue", line=line, length=False))
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head.lower()
        assert [call.body for call in stub.calls] == [b""]


async def test_preflights_take_nobodys_place_and_have_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_PREFLIGHTS", 8)

    async def answers_posts(call: Call) -> None:
        if call.line.startswith("OPTIONS"):
            await call.wait_hang_up()
        else:
            await ok(call)

    async with Stub(answers_posts) as stub, World({"a": stub.url}, max_concurrency=1) as world:
        waiting = [await world.connect() for _ in range(8)]
        for _, writer in waiting:
            writer.write(raw_request(b"", line="OPTIONS /v1/completions HTTP/1.1"))
        await until(lambda: len(stub.calls) == 8)
        assert (await world.post(BODY))[0] == 200
        async with world.http.options(world.url + "/v1/completions") as response:
            assert response.status == 503
        for _, writer in waiting:
            writer.transport.abort()
        await until(world.is_idle)
        stub.script = ok
        async with world.http.options(world.url + "/v1/completions") as response:
            assert response.status == 200


async def test_an_engine_that_answers_no_preflight_is_waited_for_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_PREFLIGHT_S", 0.2)

    async def silent(call: Call) -> None:
        await call.wait_hang_up()

    async with Stub(silent) as stub, World({"a": stub.url}) as world:
        async with world.http.options(world.url + "/v1/completions") as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "upstream_timeout"
        await asyncio.wait_for(stub.calls[0].hung_up.wait(), 10)


async def test_a_body_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_GRACE_S", 0.3)
    raw = json.dumps({**BODY, "prompt": "x" * 5000}).encode()
    async with Stub(ok) as stub, World({"a": stub.url}, min_body_bytes_per_s=10_000) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(b"", f"Content-Length: {len(raw)}", length=False))
        answer = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
        for byte in raw:
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        assert (await answer).startswith(b"HTTP/1.1 408")
        assert world.value("warmroute_requests_rejected_total", reason="body_timeout") == 1
        writer.close()
        assert stub.calls == []


async def test_a_body_may_pause_that_came_fast_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_GRACE_S", 1.0)
    raw = json.dumps({**BODY, "prompt": "x" * 50_000}).encode()
    async with Stub(ok) as stub, World({"a": stub.url}, min_body_bytes_per_s=5_000) as world:
        reader, writer = await world.connect()
        writer.write(raw_request(raw[:-1], f"Content-Length: {len(raw)}", length=False))
        await asyncio.sleep(1.5)  # What is tried is that nothing ends it.
        writer.write(raw[-1:])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_body_that_pauses_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_SILENCE_S", 0.3)
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        head, rest = await answer_of(world, raw_request(b'{"mo', "Content-Length: 50", length=False))
        assert head.startswith(b"HTTP/1.1 408")
        assert json.loads(rest)["error"]["code"] == "timeout"
        assert world.value("warmroute_requests_rejected_total", reason="body_timeout") == 1
        raw = json.dumps(BODY).encode()
        reader, writer = await world.connect()
        writer.write(raw_request(b"", f"Content-Length: {len(raw)}", length=False))
        for i in range(0, len(raw), 4):  # Longer than a silence, in all.
            writer.write(raw[i : i + 4])
            await asyncio.sleep(0.06)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_body_that_is_too_large_is_counted() -> None:
    async with Stub(ok) as stub, World({"a": stub.url}, max_body_bytes=100) as world:
        assert (await world.post(b"x" * 200))[0] == 413
        assert world.value("warmroute_requests_rejected_total", reason="body_too_large") == 1


@pytest.mark.parametrize("status", ["101 Switching Protocols", "099 Odd"])
async def test_what_is_no_final_answer_is_not_relayed(status: str) -> None:
    async def odd(call: Call) -> None:
        await call.send(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    async with Stub(odd) as stub, World({"a": stub.url}) as world:
        assert (await world.post(BODY))[0] == 502
        await until(world.is_idle)


async def test_requests_without_a_prompt_go_to_workers_that_serve_them() -> None:
    async with (
        Stub(ok) as going,
        Stub(ok) as prefill,
        Stub(ok) as good,
        World({"a": going.url, "b": prefill.url, "c": good.url}) as world,
    ):
        world.fleet.workers["a"].draining = True
        world.fleet.workers["b"].role = Role.PREFILL
        for _ in range(3):
            async with world.http.get(world.url + "/version") as response:
                assert response.status == 200
        assert [len(stub.calls) for stub in (going, prefill, good)] == [0, 0, 3]


async def test_a_large_prompt_passes_unchanged_and_is_placed() -> None:
    raw = json.dumps({"model": "m", "prompt": list(range(LARGE_BYTES // 4))}).encode()
    async with Stub(ok) as stub, World({"a": stub.url}, max_body_bytes=4 << 20) as world:
        assert (await world.post(raw))[0] == 200
        assert stub.calls[0].body == raw
        (record,) = await world.records()
        assert (record["tokens"], record["prompt_tokens"]) == ("given", LARGE_BYTES // 4)


def nested(levels: int, inside: str = "1") -> bytes:
    deep = '{"a":[' * (levels // 2) + inside + "]}" * (levels // 2)
    return b'{"model":"m","prompt":"hi","metadata":' + deep.encode() + b"}"


@pytest.mark.parametrize("levels", [140, 900, 5000, 200_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
async def test_what_is_nested_deep_is_refused_at_once(levels: int, path: str) -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        began_s = time.thread_time()
        status, answer, _ = await world.post(nested(levels), path)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_json")
        assert time.thread_time() - began_s < 2
        assert stub.calls == []
        assert (await world.post(nested(100, '"' + "[" * 500 + '"')))[0] == 200
        await until(world.is_idle)


@pytest.mark.parametrize("size", [b"FFFFFFFFFF", b"100001", b"fffffffffffff"])
async def test_a_chunk_that_says_it_is_too_large_is_not_waited_for(size: bytes) -> None:
    async with Stub(ok) as stub, World({"a": stub.url}, http="fast") as world:
        request = raw_request(b"", "Transfer-Encoding: chunked", length=False) + size + b"\r\n" + b"x" * 100
        head, rest = await answer_of(world, request)
        assert head.split(b" ")[1] in (b"413", b"400")
        assert json.loads(rest)["error"]["code"] in ("request_too_large", "invalid_body")
        assert stub.calls == []


async def test_a_head_that_comes_drop_by_drop_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.http1 import listener

    monkeypatch.setattr(listener, "_HEAD_S", 0.3)
    async with Stub(ok) as stub, World({"a": stub.url}, http="fast") as world:
        reader, writer = await world.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")

        async def drips() -> None:
            while True:
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.02)

        task = asyncio.ensure_future(drips())
        told = b""
        with contextlib.suppress(ConnectionError):  # Its drops go on after the end.
            while piece := await asyncio.wait_for(reader.read(1 << 16), 60):
                told += piece
        assert told.startswith(b"HTTP/1.1 408 ")
        task.cancel()
        assert (await world.post(BODY))[0] == 200


@pytest.mark.parametrize("scheme", ["http", "HTTP", "HtTpS"])
async def test_absolute_targets_in_any_case(scheme: str) -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        raw = json.dumps(BODY).encode()
        line = f"POST {scheme}://gateway.example/v1/completions?q=1 HTTP/1.1"
        head, _ = await answer_of(world, raw_request(raw, "Connection: close", line=line))
        assert head.startswith(b"HTTP/1.1 200")
        assert stub.calls[0].line == "POST /v1/completions?q=1 HTTP/1.1"
