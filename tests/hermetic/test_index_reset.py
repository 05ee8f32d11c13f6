"""`/admin/index/reset`, and caches that are emptied around the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_world import Fleet, engine, until

LONG = "the quick brown fox jumps over the lazy dog " * 100


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(), b=engine(), c=engine(model="other")) as started:
        yield started


async def warm(fleet: Fleet, worker: str, **fields: Any) -> None:
    """`worker` alone has computed LONG, and its events have said so."""
    others = [name for name in fleet.engines if name != worker]
    for name in others:
        await fleet.post(f"{fleet.admin}/admin/workers/{name}/drain")
    await fleet.complete(LONG, **fields)
    await until(lambda: fleet.core.index.blocks(worker))
    for name in others:
        await fleet.post(f"{fleet.admin}/admin/workers/{name}/undrain")


async def reset(fleet: Fleet, query: str = "", body: Any = None) -> tuple[int, Any]:
    status, answer, _ = await fleet.post(f"{fleet.admin}/admin/index/reset{query}", body)
    return status, answer


async def thought_cached(fleet: Fleet, model: str = "tiny") -> dict[str, int]:
    _, page, _ = await fleet.post(fleet.admin + "/debug/explain", {"model": model, "prompt": LONG})
    return {row["decode"][0]: row["cached_tokens"] for row in page["considered"]}


async def test_a_workers_cache_is_forgotten(fleet: Fleet) -> None:
    await warm(fleet, "a")
    await warm(fleet, "b")
    blocks = fleet.core.index.blocks("a")
    status, answer = await reset(fleet, "?worker=a")
    assert (status, answer["workers"]["a"]["blocks"], set(answer["workers"])) == (200, blocks, {"a"})
    cached = await thought_cached(fleet)
    assert cached["a"] == 0
    assert cached["b"] > 0
    assert (await reset(fleet, "?worker=a"))[1]["workers"]["a"] == {"blocks": 0, "assumed_blocks": 0}


async def test_i18_new_weights_of_a_model_are_told_in_one_call(fleet: Fleet) -> None:
    """I18: the engines' caches first, then ours, of every worker that serves the model and of no other."""
    await warm(fleet, "a")
    await warm(fleet, "c", model="other")
    status, answer = await reset(fleet, body={"model": "tiny", "engine": True})
    assert (status, set(answer["workers"])) == (200, {"a", "b"})
    assert {row["engine"]["status"] for row in answer["workers"].values()} == {200}
    assert set((await thought_cached(fleet)).values()) == {0}
    assert (await thought_cached(fleet, "other"))["c"] > 0
    _, usage = await fleet.complete(LONG)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    await until(lambda: fleet.core.index.blocks("a") + fleet.core.index.blocks("b"))
    assert max((await thought_cached(fleet)).values()) > 0  # What is computed with the new weights counts.


async def test_all_of_it(fleet: Fleet) -> None:
    await warm(fleet, "a")
    await fleet.complete(LONG)
    assert fleet.core.prefixes.top(1)
    status, answer = await reset(fleet, "?all")
    assert (status, set(answer["workers"])) == (200, {"a", "b", "c"})
    assert fleet.core.prefixes.top(1) == []


async def test_an_engine_that_cannot_is_named_and_ours_is_forgotten_all_the_same(fleet: Fleet) -> None:
    await warm(fleet, "a")
    await fleet.engines["b"].stop()
    status, answer = await reset(fleet, "?model=tiny&engine=true")
    assert status == 502
    assert answer["workers"]["a"]["engine"]["status"] == 200
    assert answer["workers"]["b"]["engine"]["status"] is None
    assert fleet.core.index.blocks("a") == 0


@pytest.mark.parametrize(
    ("query", "body", "status", "says"),
    [
        ("", None, 400, "Say of what"),
        ("?worker=x", None, 404, "No worker is named x"),
        ("?model=x", None, 404, "`x` does not exist"),
        ("?engine=perhaps&all", None, 400, "bool"),
        ("?workers=a", None, 400, "unknown field `workers`"),
        ("", {"worker": 3}, 400, "worker"),
        ("?worker=a", {"worker": "a"}, 400, "not both"),
    ],
)
async def test_what_cannot_be_meant(fleet: Fleet, query: str, body: Any, status: int, says: str) -> None:
    answered, answer = await reset(fleet, query, body)
    assert answered == status
    assert says in answer["error"]["message"]
    assert (await fleet.get(fleet.admin + "/admin/index/reset"))[0] == 405
    assert (await fleet.post(fleet.url + "/admin/index/reset?all"))[0] == 404


async def test_e13_a_nap_between_two_scrapes_shows_with_the_next_request(fleet: Fleet) -> None:
    """E13: put to sleep and woken up around us, faster than anybody looks; the engine says so with its next step."""
    await warm(fleet, "a")
    fleet.core.scraper.remove("a")  # Nobody looks.
    for path in ("/sleep", "/wake_up"):
        assert (await fleet.post(fleet.engines["a"].url + path))[0] == 200
    assert fleet.core.index.blocks("a")
    for name in ("b", "c"):
        await fleet.post(f"{fleet.admin}/admin/workers/{name}/drain")
    await fleet.complete("something else")
    await until(lambda: fleet.core.ingest.status()["a", 0].counters.get("cleared_by_engine"))
    assert (await thought_cached(fleet))["a"] == 0


async def test_e13_woken_up_behind_our_back(fleet: Fleet) -> None:
    await warm(fleet, "a")
    await fleet.post(fleet.admin + "/sleep?worker=a")
    await until(lambda: "a" in fleet.core.asleep)
    assert fleet.core.index.blocks("a") == 0
    assert (await fleet.post(fleet.engines["a"].url + "/wake_up"))[0] == 200
    await until(lambda: "a" not in fleet.core.asleep)
    await fleet.all_serve("a", "b")
