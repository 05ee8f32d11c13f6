"""Responses in the background in the books of their keys: at work until they are over, counted by what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.engine.timing import preset
from gateway.config.schema import AuthConfig
from gateway.proxy import background
from tests.support.auth import bearer, made, write_keys
from tests.support.gateway_world import Fleet, engine, until
from tests.support.proxy_world import Call, Stub, World

BODY = {"model": "m", "input": "tell me of the sea", "background": True, "max_output_tokens": 3000}
USAGE = {"input_tokens": 40, "output_tokens": 20}
LIMITS = {"concurrent_requests": 1, "tokens_per_minute": 6000}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FIRST_S", 0.05)
    monkeypatch.setattr(background, "_LEAST_S", 0.01)


class Engine:
    """Accepts responses, all of one id, and says `state` when it is asked for one."""

    def __init__(self, **accepted: Any) -> None:
        self.accepted = {"id": "resp_1", "status": "queued", "usage": None, **accepted}
        self.state: dict[str, Any] | None = {"id": "resp_1", "status": "in_progress", "usage": None}
        self.asked: list[Call] = []

    async def __call__(self, call: Call) -> None:
        if call.line.startswith("POST"):
            await call.ok(json.dumps(self.accepted).encode())
            return
        self.asked.append(call)
        if self.state is None:
            await call.ok(b'{"error":{}}', status="404 Not Found")
        else:
            await call.ok(json.dumps(self.state).encode())


async def create(world: World, secret: str, body: Any = BODY) -> int:
    status, _, _ = await world.post(body, "/v1/responses", **bearer(secret))
    return status


def ended(world: World, outcome: str) -> float:
    return world.value("warmroute_background_responses_ended_total", outcome=outcome)


def counted(world: World) -> tuple[float, float]:
    prompt, output = (
        world.value("warmroute_tenant_tokens_total", tenant="acme", kind=kind) for kind in ("prompt", "output")
    )
    return prompt, output


async def test_one_is_at_work_until_it_is_over_and_counts_by_what_it_says() -> None:
    secret, key = made(**LIMITS)
    script = Engine(metadata={"usage": {"input_tokens": 0, "output_tokens": 0}}, tools=[{"usage": {"input_tokens": 0}}])
    async with Stub(script) as stub, World({"a": stub.url}, keys=(key,), engine_key="engines'") as world:
        assert await create(world, secret) == 200
        await until(lambda: len(script.asked) > 1)
        assert await create(world, secret) == 429
        assert world.value("warmroute_background_responses") == 1
        assert script.asked[0].line == "GET /v1/responses/resp_1 HTTP/1.1"
        assert script.asked[0].header("Authorization") == "Bearer engines'"
        assert secret not in script.asked[0].head.decode()
        assert counted(world) == (0, 0)
        script.state = {"id": "resp_1", "status": "completed", "usage": USAGE}
        await until(lambda: ended(world, "finished"))
        assert counted(world) == (40, 20)
        assert await create(world, secret) == 200
        await until(world.is_idle)


@pytest.mark.parametrize("status", ["cancelled", "failed"])
async def test_one_that_does_not_say_what_it_took_counts_by_what_was_reserved(status: str) -> None:
    secret, key = made(**LIMITS)
    script = Engine()
    async with Stub(script) as stub, World({"a": stub.url}, keys=(key,)) as world:
        assert await create(world, secret) == 200
        script.state = {"id": "resp_1", "status": status, "usage": None}
        await until(lambda: ended(world, "finished"))
        assert counted(world)[1] == 3000


async def test_one_that_its_worker_does_not_know_any_more_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, key = made(**LIMITS)
    script = Engine()
    async with Stub(script) as stub, World({"a": stub.url}, keys=(key,)) as world:
        script.state = None
        assert await create(world, secret) == 200
        await until(lambda: ended(world, "lost"))
        assert counted(world)[1] == 3000
        assert await create(world, secret) in (200, 429)  # Its place is free; its tokens are not.


async def test_a_worker_that_says_nothing_for_long_has_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LOST_AFTER_S", 0.3)
    secret, key = made(**LIMITS)
    script = Engine()
    async with Stub(script) as stub, World({"a": stub.url}, keys=(key,)) as world:
        assert await create(world, secret) == 200
        await until(lambda: script.asked)
        world.upstreams.remove("a")
        await until(lambda: ended(world, "lost"))


@pytest.mark.parametrize("state", [{"id": "resp_1", "status": "in_progress"}, {"id": "resp_1", "pad": "x" * 9000}])
async def test_one_that_never_ends_counts_as_over_at_last(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LARGEST_BYTES", 5000)
    secret, key = made(**LIMITS)
    script = Engine()
    script.state = {**state, **({"status": "completed"} if "pad" in state else {})}
    async with Stub(script) as stub, World({"a": stub.url}, keys=(key,), request_timeout_s=3.0) as world:
        assert await create(world, secret) == 200
        await until(lambda: ended(world, "over_time"))
        assert len(script.asked) > 1
        assert counted(world)[1] == 3000


async def test_a_quick_one_of_the_same_id_does_not_end_a_long_one() -> None:
    secret, key = made(concurrent_requests=2)
    script = Engine()
    async with Stub(script) as stub, World({"a": stub.url}, keys=(key,), request_timeout_s=3.0) as world:
        assert await create(world, secret) == 200
        script.accepted = script.state = {"id": "resp_1", "status": "completed", "usage": USAGE}
        assert await create(world, secret, {**BODY, "background": False, "metadata": {"store": False}}) == 200
        await until(lambda: ended(world, "over_time"))
        assert ended(world, "finished") == 0


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(BODY).replace("background", r"backgr\u006fund").encode(),
        json.dumps({**BODY, "background": "true"}).encode(),
        json.dumps({**BODY, "metadata": {"a": 1}, "text": {"x": {"store": False}}}).encode(),
        json.dumps({**BODY, "metadata": {"pad": "x" * (300 << 10)}}).encode(),
    ],
    ids=["escaped", "text", "store", "large"],
)
async def test_however_it_is_asked_for(body: bytes) -> None:
    secret, key = made(concurrent_requests=1)
    async with Stub(Engine()) as stub, World({"a": stub.url}, keys=(key,)) as world:
        assert await create(world, secret, body) == 200
        assert await create(world, secret) == 429


async def test_who_is_one_too_many_to_be_followed_is_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_MOST", 1)
    secret, key = made(concurrent_requests=2)
    async with Stub(Engine()) as stub, World({"a": stub.url}, keys=(key,)) as world:
        assert [await create(world, secret) for _ in range(3)] == [200, 200, 200]
        assert ended(world, "unfollowed") == 2
        assert world.value("warmroute_background_responses") == 1


async def test_what_still_runs_at_the_end_is_given_back() -> None:
    secret, key = made(concurrent_requests=1)
    async with Stub(Engine()) as stub, World({"a": stub.url}, keys=(key,)) as world:
        assert await create(world, secret) == 200
        assert world.background is not None
        await world.background.close()
        assert len(world.background) == 0
        assert await create(world, secret) == 200


async def test_over_a_whole_gateway_one_that_is_cancelled_and_one_whose_reader_leaves(tmp_path: Any) -> None:
    secret, key = made(concurrent_requests=1)
    write_keys(tmp_path / "keys.yaml", key)
    slow = engine(store_responses=True).with_engine(timing=preset("cpu-fast"), max_model_len=16_384)
    async with Fleet(a=slow, b=slow, auth=AuthConfig(keys_file=str(tmp_path / "keys.yaml"))) as fleet:
        fleet.http.headers.update(bearer(secret))
        body = {**BODY, "model": "tiny", "max_output_tokens": 10_000}
        url = fleet.url + "/v1/responses"

        async def cancelled(response_id: str) -> None:
            status, answer, _ = await fleet.post(f"{url}/{response_id}/cancel")
            assert (status, answer["status"]) == (200, "cancelled")

        status, queued, _ = await fleet.post(url, body)
        assert (status, queued["status"]) == (200, "queued")
        assert (await fleet.post(url, body))[0] == 429
        await cancelled(queued["id"])
        registry = fleet.core.metrics.registry
        name = "warmroute_background_responses_ended_total"
        await until(lambda: registry.get_sample_value(name, {"outcome": "finished"}) == 1)
        async with fleet.http.post(url, json={**body, "stream": True}) as first:
            head = await first.content.readuntil(b"\n\n")
        made_id = json.loads(head.partition(b"data: ")[2])["response"]["id"]
        await until(lambda: registry.get_sample_value("warmroute_background_responses") == 1)
        await cancelled(made_id)
        await until(lambda: registry.get_sample_value(name, {"outcome": "finished"}) == 2)
