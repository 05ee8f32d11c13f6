"""vLLM 0.32's store of responses (`VLLM_ENABLE_RESPONSES_API_STORE=1`): in the memory of one process, until it ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from bench.engine import responses
from bench.engine.answers import json_response
from bench.engine.protocol import ApiError

if TYPE_CHECKING:
    from bench.engine.http import Api

Generate = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

_NO_STORE = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)


class Store:
    """What one process keeps."""

    def __init__(self) -> None:
        self.responses: dict[str, dict[str, Any]] = {}
        self.messages: dict[str, list[Any]] = {}
        self.events: dict[str, list[bytes]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.changed = asyncio.Condition()

    def keep(self, response: dict[str, Any]) -> None:
        known = self.responses.get(response["id"])
        if known is None or known["status"] != "cancelled":
            self.responses[response["id"]] = response

    async def add_events(self, response_id: str, frames: bytes) -> None:
        async with self.changed:
            self.events[response_id] += [frame + b"\n\n" for frame in frames.split(b"\n\n") if frame]
            self.changed.notify_all()

    def close(self) -> None:
        for task in list(self.tasks.values()):
            task.cancel()


class StoredResponses:
    """Handlers of one server; the store itself is `FakeVllm.store`."""

    def __init__(self, api: "Api", generate: Generate) -> None:
        self._api = api
        self._generate = generate

    @property
    def _store(self) -> Store:
        return self._api.server.store

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/responses", self._create)
        app.router.add_get("/v1/responses/{id}", self._retrieve)
        app.router.add_post("/v1/responses/{id}/cancel", self._cancel)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await self._api.body(request)
        enabled = self._api.server.config.store_responses
        if body.get("store", True) and body.get("background") and not enabled:
            raise ApiError(400, _NO_STORE, "invalid_request_error", "background")
        if (previous := body.get("previous_response_id")) is not None:
            if previous not in self._store.responses:
                raise _not_found(previous)
            body = {**body, "input": [*self._history(previous), *responses.messages_of(body.get("input"))]}
        body["store"] = enabled and body.get("store", True) is not False
        if not body["store"] or not body.get("background"):
            return await self._generate(request, body)
        return await self._in_background(request, body)

    def _history(self, previous: str) -> list[Any]:
        answer = self._store.responses[previous]
        texts = [part["text"] for item in answer["output"] for part in item["content"]]
        return [*self._store.messages.get(previous, ()), {"role": "assistant", "content": "".join(texts)}]

    async def _in_background(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        job = self._api.job(request, "responses", body)
        store, rid = self._store, job.request_id
        run = self._api.start(request, job)
        queued = responses.response_of(run, body, "queued")
        store.keep(queued)
        store.messages[rid] = responses.messages_of(body.get("input"))
        frames = responses.ResponsesFrames(run, body, lambda: None, store.keep)
        if job.stream:
            store.events[rid] = []

        async def work() -> None:
            with run:
                if not job.stream:
                    async for _ in run.deltas():
                        pass
                    store.keep(responses.answer(run, body, None))
                    return
                await store.add_events(rid, frames.begin())
                async for delta in run.deltas():
                    await store.add_events(rid, frames.delta(delta))
                await store.add_events(rid, frames.end())

        task = store.tasks[rid] = asyncio.create_task(work())
        task.add_done_callback(lambda _: store.tasks.pop(rid, None))
        return await self._replay(request, rid, -1) if job.stream else json_response(queued)

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        rid = request.match_info["id"]
        if rid not in self._store.responses:
            raise _not_found(rid)
        if request.query.get("stream") != "true":
            return json_response(self._store.responses[rid])
        if rid not in self._store.events:
            raise ApiError(400, f"Unknown response_id: {rid} (parameter=response_id, value={rid})", param="response_id")
        return await self._replay(request, rid, int(request.query.get("starting_after", "-1")))

    async def _replay(self, request: web.Request, rid: str, starting_after: int) -> web.StreamResponse:
        store = self._store
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        sent = starting_after + 1
        while True:
            async with store.changed:
                while len(store.events[rid]) <= sent:
                    await store.changed.wait()
            for frame in store.events[rid][sent:]:
                await response.write(frame)
                sent += 1
                if frame.startswith(b"event: response.completed"):
                    await response.write_eof()
                    return response

    async def _cancel(self, request: web.Request) -> web.Response:
        rid = request.match_info["id"]
        response = self._store.responses.get(rid)
        if response is None:
            raise _not_found(rid)
        if response["status"] not in ("queued", "in_progress"):
            raise ApiError(400, "Cannot cancel a synchronous response.", "invalid_request_error", "response_id")
        response["status"] = "cancelled"
        if task := self._store.tasks.get(rid):
            task.cancel()
        return json_response(response)


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", "invalid_request_error", "response_id")
