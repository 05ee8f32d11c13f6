"""A fake prefill and a fake decode server, their client, and what was recorded of real ones."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from bench.engine.timing import preset

DATA = Path(__file__).parents[1] / "data"
RECORDED: dict[str, Any] = json.loads((DATA / "vllm_0.32_pd.json").read_text())
APIS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
OFFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PROMPT = list(range(100, 600))
WORDS = "hello world " * 60
GREEDY = {"model": "tiny", "prompt": PROMPT, "temperature": 0}


def config(timing: str = "instant", **changes: Any) -> FakeVllmConfig:
    given = {"model": "tiny", "kv_connector": True, "kv_bytes_per_token": 1024, "kv_layers": 2, **changes}
    return FakeVllmConfig(**given).with_engine(
        timing=preset(timing), max_model_len=2048, block_size=32, num_gpu_blocks=100, max_num_batched_tokens=4096
    )


class Pair:
    """A prefill and a decode server, and a client of both."""

    def __init__(self, prefill: FakeVllm, decode: FakeVllm, http: aiohttp.ClientSession) -> None:
        self.prefill, self.decode, self.http = prefill, decode, http

    async def post(self, server: FakeVllm, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
        async with self.http.post(server.url + path, json=body) as response:
            return response.status, json.loads(await response.text())

    async def offer(self, **changes: Any) -> dict[str, Any]:
        """The kv_transfer_params of a prefill."""
        body = {**GREEDY, "max_tokens": 1, "kv_transfer_params": OFFER, **changes}
        status, answer = await self.post(self.prefill, body)
        assert status == 200, answer
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params

    async def decoded(self, params: Any, server: FakeVllm | None = None, **changes: Any) -> tuple[int, Any]:
        body = {**GREEDY, "max_tokens": 20, "kv_transfer_params": params, **changes}
        return await self.post(server or self.decode, body)

    async def text(self, params: Any = None, server: FakeVllm | None = None) -> str:
        status, answer = await self.decoded(params, server)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])


@contextlib.asynccontextmanager
async def a_pair(decode: dict[str, Any] | None = None, **prefill: Any) -> AsyncIterator[Pair]:
    async with (
        FakeVllm(config(**prefill)) as first,
        FakeVllm(config(**(decode or {}))) as second,
        aiohttp.ClientSession() as http,
    ):
        yield Pair(first, second, http)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine signals nothing
            await asyncio.sleep(0.002)


async def metric(pair: Pair, server: FakeVllm, name: str) -> float:
    """The value of rank 0's `vllm:` series, given with its further labels if it has any."""
    name, _, further = name.partition("{")
    labels = {'engine="0"', 'model_name="tiny"', *further.rstrip("}").split(",")} - {""}
    async with pair.http.get(server.url + "/metrics") as response:
        rows = re.findall(rf"^vllm:{name}{{(.*)}} (\S+)$", await response.text(), re.MULTILINE)
    (value,) = [value for told, value in rows if set(told.split(",")) == labels]
    return float(value)


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def kinds(rows: list[Any]) -> list[Any]:
    """The events' names and shapes in order, repeated ones once."""
    return [kind for kind, _ in itertools.groupby((name, shape(data)) for name, data in rows)]


def request_of(api: str, **fields: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    said: dict[str, Any] = {"messages": [{"role": "user", "content": WORDS}]}
    if api == "completions":
        said = {"prompt": WORDS}
    elif api == "responses":
        said = {"input": WORDS}
    return {"model": "tiny", "temperature": 0, **said, limit: 1, **fields}


def text_of(api: str, answer: Any) -> str:
    if api == "responses":
        return str(answer["output"][0]["content"][0]["text"])
    if api == "messages":
        return str(answer["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if api == "completions" else choice["message"]["content"])


def events(text: str) -> list[tuple[str | None, Any]]:
    """(event name or None, data) of a stream without its [DONE]."""
    found = re.findall(r"(?:event: (\S+)\n)?data: (.*)\n\n", text)
    return [(name or None, json.loads(data)) for name, data in found if data != "[DONE]"]


def streamed_text(api: str, text: str) -> str:
    rows = events(text)
    if api == "responses":
        return "".join(data["delta"] for name, data in rows if name == "response.output_text.delta")
    if api == "messages":
        return "".join(data["delta"]["text"] for name, data in rows if name == "content_block_delta")
    choices = [data["choices"][0] for _, data in rows if data["choices"]]
    return "".join(it["text"] if api == "completions" else it["delta"]["content"] for it in choices)
