"""Decode legs that fail: tried again before anything has been sent to the client, and never with the same params."""

import asyncio
import json

import pytest

from gateway.config.schema import PdConfig
from tests.support.handoff_world import (
    IDS,
    ROLES,
    answers,
    ask,
    bodies,
    offers,
    refusing_releases,
    releases,
    resets,
    streams,
    world,
)
from tests.support.proxy_world import Call, Script, Stub, World, until

REMOTE = PdConfig(policy="always-remote")
COMPLETION = {"model": "m", "prompt": IDS}
GOOD = {"choices": [{"index": 0, "text": "right", "finish_reason": "length"}]}


def decoder() -> Stub:
    return Stub(refusing_releases(answers(GOOD)))


ERROR = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
START = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":64}}}\n\n'
FAILED = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'


async def breaks_off(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(CREATED)
    call.reset()


FAILED_LOADS: dict[str, Script] = {
    "500": answers(b'{"error": {"message": "Internal server error"}}', "500 Internal Server Error"),
    "completions": streams(ERROR, DONE),
    "chat": streams(ROLE, ERROR, DONE),
    "responses": breaks_off,
    "messages": streams(START, FAILED),
    "finish_reason": streams(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}\n\n', DONE),
    "finish_reason_whole": answers({"choices": [{"index": 0, "text": "", "finish_reason": "error"}]}),
}


@pytest.mark.parametrize("case", FAILED_LOADS)
async def test_a_failed_fetch_is_tried_once_more_without(case: str) -> None:
    async def script(call: Call) -> None:
        remote = b"kv_transfer_params" in call.body
        await (FAILED_LOADS[case] if remote else answers(GOOD))(call)

    async with Stub(offers()) as p1, Stub(refusing_releases(script)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", "kv_load_failed"))
        assert ["kv_transfer_params" in body for body in bodies(d1)] == [True, False]
        await until(lambda: len(releases(d1)) == 1)
        assert it.value("warmroute_pd_retries_total", stage="decode", reason="kv_load_failed") == 1
        await until(it.is_idle)


@pytest.mark.parametrize("case", ["500", "chat"])
async def test_what_the_decode_worker_then_says_is_the_clients_answer(case: str) -> None:
    async with (
        Stub(offers()) as p1,
        Stub(refusing_releases(FAILED_LOADS[case])) as d1,
        world(REMOTE, p1=p1, d1=d1) as it,
    ):
        told = await ask(it.http, it.url, body=COMPLETION)
        assert len(bodies(d1)) == 2
        assert told.status == (500 if case == "500" else 200)
        assert "Internal server error" in told.body
        await until(it.is_idle)


async def test_an_error_after_content_is_not_hidden() -> None:
    text = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    async with Stub(offers()) as p1, Stub(streams(text, ERROR, DONE)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        status, body, _ = await it.post({**COMPLETION, "stream": True})
        assert (status, body) == (200, text + ERROR + DONE)
        assert len(bodies(d1)) == 1


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity", "404 Not Found"])
async def test_a_decode_4xx_is_the_clients_and_the_blocks_are_given_back(status: str) -> None:
    async with (
        Stub(offers()) as p1,
        Stub(refusing_releases(answers(b'{"error": 1}', status))) as d1,
        world(REMOTE, p1=p1, d1=d1) as it,
    ):
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.status, told.body) == (int(status[:3]), '{"error": 1}')
        await until(lambda: len(releases(d1)) == 1)
        params = bodies(d1)[0]["kv_transfer_params"]
        assert releases(d1)[0]["kv_transfer_params"] == params
        await until(lambda: it.value("warmroute_pd_releases_total", outcome="ok") == 1)
        assert it.handoffs.releases.stranded.tokens(0.0) == {}


@pytest.mark.parametrize("how", ["refused", "reset", "503"])
async def test_another_decode_worker_takes_over_with_an_offer_of_its_own(how: str) -> None:
    """Params that one engine may have seen are nobody else's."""
    scripts = {"refused": answers(), "reset": resets(), "503": answers(b"{}", "503 Service Unavailable")}
    offer = offers()

    async def lets_d2_in(call: Call) -> None:
        it.down.clear()
        await offer(call)

    async with Stub(lets_d2_in) as p1, Stub(scripts[how]) as d1, decoder() as d2:
        it = world(REMOTE, p1=p1, d1=d1, d2=d2)
        if how == "refused":
            d1._server.close()  # type: ignore[union-attr]
        async with it:
            it.down.add("d2")
            told = await ask(it.http, it.url, body=COMPLETION)
            assert (told.text, told.went) == ("right", ("remote", "policy"))
            assert told.headers["x-warmroute-worker"] == "d2"
            assert len(p1.calls) == 2
            params = [body["kv_transfer_params"]["remote_request_id"] for body in (*bodies(d1)[:1], *bodies(d2))]
            assert len(set(params)) == len(params)
            await until(it.is_idle)
            await until(lambda: not it.handoffs.releases._tasks)
            assert len(releases(d2)) == 1 or how != "refused", "the first offer is given back by whoever can"


async def test_an_answer_that_breaks_off_before_it_is_whole_is_tried_again() -> None:
    """None of it was sent on, as it is read to its end first."""

    async def breaks_once(call: Call) -> None:
        if len(bodies(d1)) == 1:
            await call.send(b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"choices": [')
            call.reset()
        else:
            await call.ok(json.dumps(GOOD).encode())

    async with Stub(offers()) as p1, Stub(refusing_releases(breaks_once)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", "decode_failed"))
        assert len(p1.calls) == 1, "it is asked once more, without what it may have failed at"
        await until(it.is_idle)


async def test_a_lone_decode_worker_that_resets_is_asked_once_more_without_params() -> None:
    async def once(call: Call) -> None:
        if len(bodies(d1)) == 1:
            call.reset()
        else:
            await call.ok(json.dumps(GOOD).encode())

    async with Stub(offers()) as p1, Stub(refusing_releases(once)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", "decode_failed"))
        first, second = bodies(d1)
        assert "kv_transfer_params" in first
        assert "kv_transfer_params" not in second


async def test_llm_d_case_55_a_lone_decode_worker_that_refuses_is_a_clear_error() -> None:
    """llm-d's sidecar answers 503, and so does ours; the gateway's own is 502."""
    async with Stub(offers()) as p1, Stub(answers()) as d1:
        d1._server.close()  # type: ignore[union-attr]
        async with world(REMOTE, p1=p1, d1=d1) as it:
            told = await ask(it.http, it.url, body=COMPLETION)
            assert told.status == 502
            assert json.loads(told.body)["error"]["code"] == "upstream_unreachable"
            await until(it.is_idle)
            await until(lambda: it.value("warmroute_pd_releases_total", outcome="failed") == 1)
            assert it.handoffs.releases.stranded.tokens(0.0) == {"p1": 64}


async def test_a_decode_server_that_cannot_ask_for_a_body_gets_it_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no `Expect: 100-continue`. That is found out once."""
    monkeypatch.setattr("gateway.handoff.watch.LEAVE_S", 0.1)
    async with Stub(offers()) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        d1.continues = False
        for _ in range(2):
            told = await ask(it.http, it.url, body=COMPLETION)
            assert (told.text, told.went) == ("right", ("remote", "policy"))
        assert len(p1.calls) == len(bodies(d1)) == 2
        assert [call.header("Expect") for call in d1.calls] == [None, None]


async def test_an_answer_before_the_body_is_the_answer() -> None:
    """A server may refuse a request by its head."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(head)
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    heads: list[bytes] = []
    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Stub(offers()) as p1, World({"p1": p1.url, "d1": url}, pd=REMOTE, roles=ROLES) as it:
        told = await asyncio.wait_for(ask(it.http, it.url, body=COMPLETION), 20)
        assert (told.status, told.body) == (401, "{}")
        await until(it.is_idle)
        await until(lambda: it.value("warmroute_pd_releases_total", outcome="failed") == 1)
