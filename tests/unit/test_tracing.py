"""The spans of a request, in each way that it can go."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from gateway.config.schema import PdConfig, QueueConfig
from tests.support.handoff_world import BODIES, LONG, answers, offers, resets, streams, world
from tests.support.proxy_world import Call, Stub, World
from tests.support.traced import (
    CLIENT_SPAN,
    CLIENT_TRACE,
    NOT_SAMPLED,
    SAMPLED,
    Seen,
    named,
    traced,
    tree,
)

BODY = {"model": "m", "prompt": "a secret prompt", "max_tokens": 5}
STREAM = {**BODY, "stream": True}
USAGE = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}}
COMPLETIONS = "POST /v1/completions"
ASKED = {"model": "m", "prompt": LONG, "max_tokens": 6}


def root_of(spans: list[Seen]) -> Seen:
    return next(span for span in spans if span.kind == "SERVER")


async def test_a_request_computed_where_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with Stub(answers({"usage": USAGE})) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        status, _, headers = await at.post(BODY, **{"X-Request-Id": "mine", "Authorization": "Bearer sk-key"})
        assert status == 200
        assert "x-warmroute-trace-id" not in headers
        spans = await it.spans()
        assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "decide", "decode"]
        root, leg = root_of(spans), named(spans, "decode")
        assert leg.gave(stub.calls[0].header("traceparent"))
        await at.access.close()
        assert json.loads(at.log.getvalue())["trace_id"] == root.trace
    assert {name: root.attributes[name] for name in root.attributes if name.startswith("gen_ai")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 16,
    }
    said = root.attributes
    assert (said["http.request.method"], said["http.route"], said["url.path"]) == (
        "POST", "/v1/completions", "/v1/completions",
    )  # fmt: skip
    assert (said["http.response.status_code"], said["url.scheme"], said["client.address"]) == (200, "http", "127.0.0.1")
    assert (said["warmroute.worker"], said["warmroute.choice"], said["warmroute.reason"]) == (
        "a",
        "local",
        "shorter_than_block",
    )
    assert said["warmroute.request_id"] == "mine"
    assert said["warmroute.predicted_ttft_s"] > 0
    assert named(spans, "decide").attributes["warmroute.worker"] == "a"
    assert leg.kind == "CLIENT"
    assert leg.attributes["url.full"] == stub.url + "/v1/completions"
    assert leg.attributes["http.response.status_code"] == 200
    assert root.began_ns <= leg.began_ns <= leg.ended_ns <= root.ended_ns
    assert root.service == "warmroute-gateway"
    whole = repr(spans)
    assert "secret" not in whole
    assert "sk-key" not in whole


async def test_the_first_token_of_a_stream_is_an_event_of_its_leg(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with (
        Stub(streams(b"data: {}\n\n", b"data: [DONE]\n\n")) as stub,
        World({"a": stub.url}, tracing=it.tracing) as at,
    ):
        await at.post(STREAM)
        spans = await it.spans()
    assert [name for name, _ in named(spans, "decode").events] == ["first_token"]
    assert root_of(spans).attributes["warmroute.ttft_s"] > 0


async def test_a_clients_trace_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch, ratio=0.0)  # What the client has begun to keep is kept whatever the ratio.
    async with Stub(answers()) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        await at.post(BODY, traceparent=SAMPLED, tracestate="congo=t61rcWkgMzE,rojo=00f067aa0ba902b7")
        spans = await it.spans()
        (call,) = stub.calls
    root = root_of(spans)
    assert (root.trace, root.parent) == (CLIENT_TRACE, CLIENT_SPAN)
    assert named(spans, "decode").gave(call.header("traceparent"))
    assert call.header("tracestate") == "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"
    assert [name for name, _ in call.headers].count("traceparent") == 1


async def test_a_trace_that_is_not_kept_goes_on_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with Stub(answers()) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        await at.post(BODY, traceparent=NOT_SAMPLED)
        assert await it.spans() == []
        said = (stub.calls[0].header("traceparent") or "").split("-")
    assert (said[1], said[3]) == (CLIENT_TRACE, "00")


async def test_the_ratio_decides_where_a_trace_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch, ratio=0.0)
    async with Stub(answers()) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        await at.post(BODY)
        assert await it.spans() == []
        assert not int((stub.calls[0].header("traceparent") or "1")[-1]) & 1


@pytest.mark.parametrize(
    "rows",
    [
        ["00-1-2-01"],
        ["nonsense"],
        [SAMPLED.replace("4bf", "\udce9bf")],
        ["00-" + "0" * 32 + "-00f067aa0ba902b7-01"],
        [SAMPLED, SAMPLED],
    ],
)
async def test_what_is_no_trace_context_begins_a_new_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rows: list[str]
) -> None:
    it = traced(monkeypatch)
    async with Stub(answers()) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        reader, writer = await at.connect()
        body = json.dumps(BODY).encode()
        head = ["POST /v1/completions HTTP/1.1", "Host: x", "tracestate: a=b", f"Content-Length: {len(body)}"]
        head += [f"traceparent: {row}" for row in rows]
        writer.write("\r\n".join([*head, "", ""]).encode("utf-8", "surrogateescape") + body)
        assert b" 200 " in await reader.readline()
        writer.close()
        spans = await it.spans()
        assert named(spans, "decode").gave(stub.calls[0].header("traceparent"))
        assert stub.calls[0].header("tracestate") is None  # Of no trace of ours.
    assert root_of(spans).parent == ""
    assert caplog.records == []


async def test_off_nothing_is_touched() -> None:
    async with Stub(answers()) as stub, World({"a": stub.url}) as at:
        await at.post(BODY, traceparent="whatever 1", tracestate="it=is")
        (call,) = stub.calls
        assert (call.header("traceparent"), call.header("tracestate")) == ("whatever 1", "it=is")
        await at.access.close()
        assert "trace_id" not in at.log.getvalue()


async def test_a_prompt_computed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with (
        Stub(offers()) as p1,
        Stub(answers({"usage": USAGE})) as d1,
        world(PdConfig(policy="always-remote"), tracing=it.tracing, p1=p1, d1=d1) as at,
    ):
        status, *_ = await at.post(ASKED)
        assert status == 200
        spans = await it.spans()
        assert named(spans, "prefill").gave(p1.calls[0].header("traceparent"))
        assert named(spans, "decode").gave(d1.calls[0].header("traceparent"))
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "decide", "prefill", "decode"]
    said = root_of(spans).attributes
    assert (said["warmroute.choice"], said["warmroute.prefill_worker"]) == ("remote", "p1")
    assert named(spans, "prefill").attributes["warmroute.worker"] == "p1"
    assert named(spans, "decode").attributes["warmroute.worker"] == "d1"


async def test_a_failed_prefill_that_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with (
        Stub(answers(status="500 No")) as p1,
        Stub(answers({"usage": USAGE})) as d1,
        world(PdConfig(policy="always-remote"), tracing=it.tracing, p1=p1, d1=d1) as at,
    ):
        status, *_ = await at.post(ASKED)
        assert status == 200
        spans = await it.spans()
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "decide", "prefill!", "decode"]
    assert root_of(spans).events == [("prefill_failed", {"warmroute.reason": "prefill_failed"})]
    assert named(spans, "prefill").attributes["error.type"] == "500"
    assert root_of(spans).attributes["warmroute.choice"] == "local"


async def test_a_handoff_that_fails_is_decoded_by_a_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)

    async def refuses_params(call: Call) -> None:
        if "kv_transfer_params" in json.loads(call.body):
            await call.ok(b'{"error":{"type":"InternalServerError"}}', status="500 No")
        else:
            await call.ok(json.dumps({"usage": USAGE}).encode())

    async with (
        Stub(offers()) as p1,
        Stub(refuses_params) as d1,
        world(PdConfig(policy="always-remote"), tracing=it.tracing, p1=p1, d1=d1) as at,
    ):
        status, *_ = await at.post(ASKED)
        assert status == 200
        spans = await it.spans()
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "decide", "prefill", "decode!", "decode"]
    assert root_of(spans).events == [("handoff_failed", {"warmroute.reason": "kv_load_failed"})]
    first, second = sorted((s for s in spans if s.name == "decode"), key=lambda s: s.began_ns)
    assert first.attributes["error.type"] == "kv_load_failed"
    assert second.attributes["http.request.resend_count"] == 1


async def test_a_retry_is_a_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with (
        Stub(resets()) as bad,
        Stub(answers()) as good,
        World({"bad": bad.url, "good": good.url}, tracing=it.tracing) as at,
    ):
        at.say("good", waiting=4.0)  # So that the bad one is asked first.
        at.say("bad", waiting=0.0)
        status, *_ = await at.post(BODY)
        assert status == 200
        spans = await it.spans()
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "decide", "decode!", "decode"]
    first, second = sorted((s for s in spans if s.name == "decode"), key=lambda s: s.began_ns)
    assert (first.attributes["warmroute.worker"], second.attributes["warmroute.worker"]) == ("bad", "good")
    assert first.attributes["error.type"] == "disconnected"
    assert root_of(spans).events == [("retry", {"warmroute.reason": "disconnected"})]
    assert root_of(spans).attributes["warmroute.retries"] == 1


async def test_an_answer_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)

    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: {}\n\n")
        call.writer.close()

    async with Stub(breaks) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        with pytest.raises(aiohttp.ClientError):
            await at.post(STREAM)
        spans = await it.spans()
    assert tree(spans) == [COMPLETIONS + "!", "read_body", "tokenise", "decide", "decode!"]
    root = root_of(spans)
    assert (root.attributes["warmroute.cut"], root.attributes["error.type"]) == ("upstream_broke", "upstream_broke")
    assert root.events == [("cut", {"warmroute.reason": "upstream_broke"})]


async def test_a_client_that_leaves_is_no_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)

    async def hangs(call: Call) -> None:
        await call.wait_hang_up()

    async with Stub(hangs) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        asked = asyncio.create_task(at.post(BODY))
        async with asyncio.timeout(10):
            while not stub.calls:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.005)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        async with asyncio.timeout(10):
            while not at.is_idle():  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.005)
        spans = await it.spans()
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "decide", "decode!"]
    said = root_of(spans).attributes
    assert said["warmroute.cut"] == "client_left"
    assert "http.response.status_code" not in said
    assert named(spans, "decode").attributes["error.type"] in ("client_left", "cancelled", "disconnected")


async def test_one_that_is_shed(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    queue = QueueConfig(waiting_per_worker=1, max_requests=0)
    async with Stub(answers()) as stub, World({"a": stub.url}, queue=queue, tracing=it.tracing) as at:
        at.say("a", waiting=9.0, running=9.0)
        status, _, headers = await at.post(BODY)
        assert status == 429
        spans = await it.spans()
        assert headers["x-warmroute-trace-id"] == root_of(spans).trace
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "queue!"]
    assert named(spans, "queue").attributes["error.type"] == "queue_full"
    said = root_of(spans).attributes
    assert (said["http.response.status_code"], said["warmroute.error"]) == (429, "queue_full")


async def test_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    queue = QueueConfig(waiting_per_worker=1)
    async with Stub(answers()) as stub, World({"a": stub.url}, queue=queue, tracing=it.tracing) as at:
        at.say("a", waiting=9.0, running=9.0)
        asked = asyncio.create_task(at.post(BODY))
        async with asyncio.timeout(10):
            while not at.queue.n_waiting:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.005)
        at.say("a", waiting=0.0)
        assert (await asked)[0] == 200
        spans = await it.spans()
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "queue", "decide", "decode"]
    assert root_of(spans).attributes["warmroute.queued_s"] > 0


async def test_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with Stub(answers()) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        status, _, headers = await at.post(b'{"prompt": "a secret pro')
        assert status == 400
        spans = await it.spans()
        assert headers["x-warmroute-trace-id"] == root_of(spans).trace
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise!"]  # A 4xx is no error of a server's span.
    assert root_of(spans).attributes["http.response.status_code"] == 400
    assert "secret" not in repr(spans)


async def test_an_error_of_the_worker_names_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with Stub(answers(status="500 No")) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        status, _, headers = await at.post(BODY)
        assert status == 500
        spans = await it.spans()
        assert headers["x-warmroute-trace-id"] == root_of(spans).trace
    assert tree(spans) == [COMPLETIONS + "!", "read_body", "tokenise", "decide", "decode!"]


async def test_no_worker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with World({}, tracing=it.tracing) as at:
        status, *_ = await at.post(BODY)
        spans = await it.spans()
    assert status in (404, 503)
    assert tree(spans)[-1] in ("tokenise!", "decide!")


async def test_what_is_placed_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    async with Stub(answers()) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        async with at.http.get(at.url + "/version?api_key=sk-key") as response:
            assert response.status == 200
        spans = await it.spans()
        assert named(spans, "forward").gave(stub.calls[0].header("traceparent"))
    assert tree(spans) == ["GET /version", "read_body", "tokenise", "forward"]
    assert "sk-key" not in repr(spans)


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_an_id_that_cannot_be_written_down_is_told_as_far_as_it_can(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    it = traced(monkeypatch)
    async with Stub(answers()) as stub, World({"a": stub.url}, tracing=it.tracing) as at:
        reader, writer = await at.connect()
        body = json.dumps({**BODIES[path], "model": "m\ud800"}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine \udce9\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode("utf-8", "surrogateescape") + body)
        assert (await reader.readline()).split()[1] == b"404"
        writer.close()
        (root,) = (span for span in await it.spans() if span.kind == "SERVER")
    assert root.attributes["warmroute.request_id"] == "mine ?"
