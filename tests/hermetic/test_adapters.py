"""LoRA adapters that engines load and unload while they run, through the gateway and behind its back."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_world import Fleet, engine, until

LONG = "the quick brown fox jumps over the lazy dog " * 200
LORA = {"lora_name": "l9", "lora_path": "/adapters/l9"}
SLOW_S = 60.0
"""A scrape interval in which nothing is learned by itself."""


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(), b=engine()) as started:
        yield started


async def ask(fleet: Fleet, model: str, prompt: str = "x") -> tuple[int, Any, Any]:
    return await fleet.post(fleet.url + "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 2})


def known(fleet: Fleet, name: str) -> set[str]:
    return {worker.name for worker in fleet.core.fleet.workers.values() if name in worker.adapters}


async def load(fleet: Fleet, *workers: str) -> None:
    """By the engines' own API."""
    for name in workers:
        assert (await fleet.post(fleet.engines[name].url + "/v1/load_lora_adapter", LORA))[0] == 200


async def test_one_loaded_through_us_serves_when_that_is_answered() -> None:
    async with Fleet(a=engine(), b=engine(), scrape_interval_s=SLOW_S) as fleet:
        for verb, expected in (("load", {"b"}), ("unload", set())):
            body = LORA if verb == "load" else {"lora_name": "l9"}
            status, _, _ = await fleet.post(f"{fleet.admin}/v1/{verb}_lora_adapter?worker=b", body)
            assert (status, known(fleet, "l9")) == (200, expected)
        await fleet.post(f"{fleet.admin}/v1/load_lora_adapter", LORA)
        assert known(fleet, "l9") == {"a", "b"}


async def test_a_request_for_one_loaded_behind_our_back_finds_it_at_once() -> None:
    async with Fleet(a=engine(), b=engine(), scrape_interval_s=SLOW_S) as fleet:
        await load(fleet, "b")
        for _ in range(3):
            status, answer, headers = await ask(fleet, "l9")
            assert (status, headers["x-warmroute-worker"], answer["model"]) == (200, "b", "l9")


async def test_all_its_workers_are_known_within_a_reading(fleet: Fleet) -> None:
    await load(fleet, "b")
    assert (await ask(fleet, "l9"))[0] == 200
    await load(fleet, "a")
    await until(lambda: known(fleet, "l9") == {"a", "b"}, within_s=20)


async def test_one_that_was_unloaded_is_not_found_soon_and_asked_for_nowhere(fleet: Fleet) -> None:
    await load(fleet, "a", "b")
    await until(lambda: known(fleet, "l9") == {"a", "b"})
    await fleet.post(fleet.engines["a"].url + "/v1/unload_lora_adapter", {"lora_name": "l9"})
    await until(lambda: known(fleet, "l9") == {"b"}, within_s=20)
    assert {(await ask(fleet, "l9", f"{i}"))[2]["x-warmroute-worker"] for i in range(6)} == {"b"}
    await fleet.post(fleet.engines["b"].url + "/v1/unload_lora_adapter", {"lora_name": "l9"})
    await until(lambda: not known(fleet, "l9"), within_s=20)
    before = [len(server.requests) for server in fleet.engines.values()]
    status, answer, _ = await ask(fleet, "l9")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert [len(server.requests) for server in fleet.engines.values()] == before


async def test_unknown_models_do_not_make_us_ask_more_often_than_once_an_interval() -> None:
    async with Fleet(a=engine(), b=engine(), scrape_interval_s=SLOW_S) as fleet:
        readings = 0
        read = fleet.core.scraper._models

        async def counted(worker: Any) -> Any:
            nonlocal readings
            readings += 1
            return await read(worker)

        fleet.core.scraper._models = counted  # type: ignore[method-assign]
        answers = await asyncio.gather(*(ask(fleet, f"nope{i}") for i in range(30)))
        assert {status for status, _, _ in answers} == {404}
        assert readings == 2  # One of each worker.


async def test_a_worker_that_hangs_does_not_hold_up_the_answer() -> None:
    async with Fleet(a=engine(), b=engine(), scrape_interval_s=SLOW_S) as fleet:
        await load(fleet, "b")
        fleet.engines["a"].faults.stall = True
        fleet.engines["a"].faults.paths = ("/v1/models",)
        began_s = time.monotonic()
        assert (await ask(fleet, "l9"))[0] == 200
        assert (await ask(fleet, "nope"))[0] == 404
        assert time.monotonic() - began_s < 5


async def test_its_blocks_are_its_own_and_predicted_exactly(fleet: Fleet) -> None:
    """Also those that it has told of before we knew that there is such an adapter."""
    await load(fleet, "b")
    body = {"model": "l9", "prompt": LONG, "max_tokens": 2}
    assert (await fleet.post(fleet.engines["b"].url + "/v1/completions", body))[0] == 200
    await until(lambda: known(fleet, "l9") == {"b"})
    stats = fleet.core.index.stats
    await until(lambda: sum(sum(rank["blocks"].values()) for rank in stats()["workers"].get("b", {}).values()))
    for _ in range(2):
        status, answer, headers = await ask(fleet, "l9", LONG)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (status, headers["x-warmroute-worker"]) == (200, "b")
        assert int(headers["x-warmroute-cached-tokens"]) == cached > 1000
    _, answer, headers = await ask(fleet, "tiny", LONG)  # The base model's KV is another.
    assert int(headers["x-warmroute-cached-tokens"]) == 0
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_one_that_an_engine_would_load_when_asked_is_tried_if_so_configured() -> None:
    """vLLM's resolvers: nobody lists the adapter before somebody asked for it."""
    async with Fleet(unknown_models="try", a=engine(), b=engine()) as fleet:
        status, answer, headers = await ask(fleet, "l9")
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")  # An engine's word.
        asked = headers["x-warmroute-worker"]
        await load(fleet, asked)
        await until(lambda: known(fleet, "l9") == {asked})
        assert {(await ask(fleet, "l9", f"{i}"))[2]["x-warmroute-worker"] for i in range(4)} == {asked}
    async with Fleet(unknown_models="try", a=engine(), b=engine(model="other")) as fleet:
        status, answer, _ = await ask(fleet, "l9")  # Of which of them would it be an adapter?
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
