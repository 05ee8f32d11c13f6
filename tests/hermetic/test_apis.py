"""Every API that is served: by a worker that has the model, with its bytes unchanged, streamed or not."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.proxy.routes import ROUTES
from tests.support.proxy_world import Call, Stub, World

JSON_PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/v1/messages/derender",
    "/v1/responses/derender",
    "/inference/v1/generate",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/v1/classify",
    "/score",
    "/v1/score",
    "/generative_scoring",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/v1/audio/speech",
)
FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
FORM = {"Content-Type": "multipart/form-data; boundary=B"}
SSE = "text/event-stream; charset=utf-8"
EVENTS = [b'data: {"x": 1}\n\n', b'data: {"y": "caf', b'\xc3\xa9"}\n\n', b"data: [DONE]\n\n"]


class Pair:
    """Two workers with a model each."""

    def __init__(self, world: World, a: Stub, b: Stub) -> None:
        self.world, self.a, self.b = world, a, b

    async def post(self, path: str, model: str | None, **fields: Any) -> tuple[int, bytes, Any, bytes]:
        """(status, body, headers, what was sent)"""
        body, headers = body_for(path, model, **fields)
        return *await self.world.post(body, path, **headers), body


def body_for(path: str, model: str | None, **fields: Any) -> tuple[bytes, dict[str, str]]:
    if path in FORM_PATHS:
        parts = {"language": "en", **({} if model is None else {"model": model}), **fields}
        texts = "".join(
            f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in parts.items()
        )
        head = '--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        return head.encode() + bytes(range(256)) * 800 + b"\r\n" + texts.encode() + b"--B--\r\n", FORM
    given = {"input": "caf\u00e9", "messages": [{"role": "user", "content": "x"}], "token_ids": [1, 2], **fields}
    extra = "" if model is None else f', "model" : {json.dumps(model)}'
    # No encoder of ours would write it so.
    return f'{{ "odd": 1.0,"odd":1e2, {json.dumps(given)[1:-1]}{extra} }}\n'.encode(), {}


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async def says(call: Call) -> None:
        if b"/stream" in call.head or b'"stream": true' in call.body or b'name="stream"\r\n\r\ntrue' in call.body:
            await call.begin_stream()
            for piece in EVENTS:
                await call.chunk(piece)
            await call.end_stream()
        else:
            await call.ok(b'{"odd" : [ 1.0 ]}')

    async with Stub(says) as a, Stub(says) as b, World({"a": a.url}, model="one") as world:
        world.add("b", b.url, model="two", adapters=("two-lora",))
        yield Pair(world, a, b)


def test_nothing_is_served_that_is_not_tested_here() -> None:
    assert set(JSON_PATHS + FORM_PATHS) == {path for path, route in ROUTES.items() if "POST" in route.methods}


@pytest.mark.parametrize("path", JSON_PATHS + FORM_PATHS)
async def test_it_goes_to_a_worker_that_serves_the_model_unchanged(pair: Pair, path: str) -> None:
    for model in ("two", "two-lora"):
        status, answer, headers, sent = await pair.post(path, model)
        assert (status, answer, headers["x-warmroute-worker"]) == (200, b'{"odd" : [ 1.0 ]}', "b")
        assert (pair.b.calls[-1].line, pair.b.calls[-1].body) == (f"POST {path} HTTP/1.1", sent)
    assert pair.a.calls == []
    assert pair.world.is_idle()


@pytest.mark.parametrize("path", JSON_PATHS + FORM_PATHS)
async def test_its_streams_pass_as_they_come(pair: Pair, path: str) -> None:
    stream: Any = "true" if path in FORM_PATHS else True
    status, answer, headers, _ = await pair.post(path, "two", stream=stream)
    assert (status, answer, headers["Content-Type"]) == (200, b"".join(EVENTS), SSE)
    assert pair.world.is_idle()
    record = (await pair.world.records())[0]
    assert (record["path"], record["worker"], record["model"], record["status"]) == (path, "b", "two", 200)
    assert "ttft_ms" in record


@pytest.mark.parametrize("path", JSON_PATHS + FORM_PATHS)
async def test_its_mistakes_are_told(pair: Pair, path: str) -> None:
    status, answer, _, _ = await pair.post(path, "three")
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    status, answer, _, _ = await pair.post(path, None)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "model")
    for method in ("GET", "PUT", "DELETE"):
        async with pair.world.http.request(method, pair.world.url + path) as response:
            assert (response.status, response.headers["Allow"]) == (405, "OPTIONS, POST")
    assert pair.a.calls == pair.b.calls == []
    assert pair.world.is_idle()


@pytest.mark.parametrize("path", JSON_PATHS + FORM_PATHS)
async def test_without_a_model_the_only_one_is_meant(pair: Pair, path: str) -> None:
    del pair.world.fleet.workers["b"]
    status, _, headers, sent = await pair.post(path, None)
    assert (status, headers["x-warmroute-worker"], pair.a.calls[0].body) == (200, "a", sent)


@pytest.mark.parametrize("path", ["/version", "/tokenizer_info"])
async def test_pages_of_engines_that_are_read(pair: Pair, path: str) -> None:
    async with pair.world.http.get(pair.world.url + path) as response:
        assert (response.status, await response.read()) == (200, b'{"odd" : [ 1.0 ]}')
    status, answer, _ = await pair.world.post({}, path)
    assert (status, json.loads(answer)["error"]["code"]) == (405, "method_not_allowed")


async def test_an_uploaded_file_is_no_long_prompt(pair: Pair) -> None:
    """Else the worker would be avoided, and its silence borne with, for as long as that much text takes."""
    status, _, _, sent = await pair.post("/v1/audio/transcriptions", "one")
    assert (status, len(sent) > 200_000) == (200, True)
    assert (await pair.world.records())[0]["prompt_tokens"] < 1000
