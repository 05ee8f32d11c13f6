"""The spans of a pick, and the context that a proxy is told to pass on."""

from __future__ import annotations

import json

import msgspec
import pytest
from multidict import CIMultiDict

from gateway.config.schema import QueueConfig
from tests.support.epp_world import P, Pool, answer, get, request
from tests.support.fleets import prompt
from tests.support.traced import CLIENT_SPAN, CLIENT_TRACE, SAMPLED, named, traced, tree

NAME = "POST /v1/completions"
ENVOYS = "00-" + "e" * 32 + "-" + "f" * 16 + "-01"
USAGE = b'{"id":"x","usage":{"prompt_tokens":400,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":320}}}'


async def test_a_pick_lasts_as_long_as_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch, face="epp")
    async with Pool(P(), tracing=it.tracing) as pool:
        pick = await pool.picked(request(prompt(400), headers={"traceparent": SAMPLED, "tracestate": "a=b"}))
        answer(pick, USAGE)
        spans = await it.spans()
        root = named(spans, NAME)
        assert root.gave(pick.set_headers["traceparent"])
        assert pick.set_headers["tracestate"] == "a=b"
    assert tree(spans) == [NAME, "tokenise", "decide"]
    assert (root.trace, root.parent) == (CLIENT_TRACE, CLIENT_SPAN)
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] == 7
    assert root.attributes["warmroute.cached_tokens"] == 320


async def test_a_proxy_that_traces_is_the_parent_and_passes_its_own_context_on(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch, face="epp")
    async with Pool(P(), tracing=it.tracing) as pool:
        asked = request(prompt(400), headers={"traceparent": SAMPLED}).ask()
        pick = await pool.picker.pick(msgspec.structs.replace(asked, context={"traceparent": ENVOYS}))
        answer(pick, USAGE)  # type: ignore[arg-type]
        (root,) = (span for span in await it.spans() if span.kind == "SERVER")
    assert (root.trace, root.parent) == ("e" * 32, "f" * 16)
    assert "traceparent" not in pick.set_headers  # type: ignore[union-attr]


async def test_the_state_of_no_trace_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch, face="epp")
    async with Pool(P(), tracing=it.tracing) as pool:
        pick = await pool.picked(request(prompt(400), headers={"traceparent": "nonsense", "tracestate": "a=b"}))
        answer(pick, USAGE)
        assert named(await it.spans(), NAME).gave(pick.set_headers["traceparent"])
    assert "tracestate" in pick.remove_headers


async def test_off_the_clients_context_is_left_as_it_is() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(prompt(400), headers={"traceparent": SAMPLED, "tracestate": "a=b"}))
        answer(pick, USAGE)
    assert not {"traceparent", "tracestate"} & {*pick.set_headers, *pick.remove_headers}


async def test_a_stream_has_its_first_token_and_a_break_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch, face="epp")
    async with Pool(P(), tracing=it.tracing) as pool:
        pick = await pool.picked(request(prompt(400), stream=True))
        pick.watch.responded(200, CIMultiDict({"content-type": "text/event-stream"}), None)
        pick.watch.chunk(b"data: {}\n\n")
        pick.watch.aborted()
        pick.watch.aborted()
        root = named(await it.spans(), NAME)
    assert [name for name, _ in root.events] == ["first_token", "cut"]
    assert (root.attributes["warmroute.cut"], root.failed) == ("aborted", False)


async def test_a_response_that_is_not_shown_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch, face="epp")
    async with Pool(P(), tracing=it.tracing) as pool:
        pick = await pool.picked(request(prompt(400)))
        pick.watch.unseen()
        root = named(await it.spans(), NAME)
    assert "http.response.status_code" not in root.attributes
    assert root.attributes["warmroute.worker"] == "p0"


@pytest.mark.parametrize(
    ("asked", "status", "stages"),
    [
        (request(raw=b'{"prompt": "a secret pro'), 400, ["tokenise!"]),
        (request(prompt(400), model="nobody's"), 404, ["tokenise", "decide!"]),
        (request(prompt(400)), 429, ["tokenise", "queue!"]),
    ],
    ids=["bad", "unknown", "shed"],
)
async def test_a_refusal_names_its_trace(
    monkeypatch: pytest.MonkeyPatch, asked: object, status: int, stages: list[str]
) -> None:
    it = traced(monkeypatch, face="epp")
    queue = QueueConfig(waiting_per_worker=1, max_requests=0)
    async with Pool(P(queue=9, running=9), queue=queue, tracing=it.tracing) as pool:
        refusal = await pool.refused(asked)  # type: ignore[arg-type]
        spans = await it.spans()
        (root,) = (span for span in spans if span.kind == "SERVER")
        assert (refusal.status, refusal.headers["x-warmroute-trace-id"]) == (status, root.trace)
        await pool.access.close()
        assert json.loads(pool.log.getvalue())["trace_id"] == root.trace
    assert tree(spans)[1:] == stages
    assert "secret" not in repr(spans)


async def test_without_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch, face="epp")
    async with Pool(P(), tracing=it.tracing) as pool:
        pick = await pool.picked(get("/v1/responses/resp_1?key=sk"))
        answer(pick)
        spans = await it.spans()
    assert tree(spans) == ["GET /v1/responses/{response_id}", "tokenise"]
    assert "sk" not in repr(spans)
