"""/v1/models over several upstreams."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from gateway.proxy.models import PATH, ModelList
from tests.support.auth import bearer, made
from tests.support.proxy_world import Call, Script, Stub, World

pytestmark = pytest.mark.usefixtures("http_plane")


def cards(*names: str, **fields: object) -> Script:
    async def script(call: Call) -> None:
        data = [{"id": name, "object": "model", "extra": {"kept": 1}, **fields} for name in names]
        await call.ok(json.dumps({"object": "list", "data": data}).encode())

    return script


async def refuses(call: Call) -> None:
    await call.ok(b'{"error":{"message":"bad key"}}', status="401 Unauthorized")


@pytest.fixture
async def stubs() -> AsyncIterator[tuple[Stub, Stub]]:
    async with Stub(cards("m", "x/y", max_model_len=5)) as one, Stub(cards("m", "z", max_model_len=9)) as two:
        yield one, two


async def get(world: World, path: str, **headers: str) -> tuple[int, dict[str, object]]:
    models = ModelList(world.upstreams, lambda: ["a", "b", "gone"])
    world.plane.pages = {PATH: models.page}
    world.plane.prefixes = {PATH + "/": models.page}
    async with world.http.get(world.url + path, headers=headers) as response:
        return response.status, json.loads(await response.read())


async def test_each_id_once_and_cards_whole(stubs: tuple[Stub, Stub]) -> None:
    async with World({"a": stubs[0].url, "b": stubs[1].url, "gone": "http://127.0.0.1:9"}) as world:
        status, answer = await get(world, "/v1/models", Authorization="Bearer k")
        assert (status, answer["object"]) == (200, "list")
        rows = answer["data"]
        assert isinstance(rows, list)
        assert [(row["id"], row["max_model_len"], row["extra"]) for row in rows] == [
            ("m", 5, {"kept": 1}),
            ("x/y", 5, {"kept": 1}),
            ("z", 9, {"kept": 1}),
        ]
        assert {call.header("authorization") for stub in stubs for call in stub.calls} == {"Bearer k"}
        assert (await get(world, "/v1/models/x%2Fy"))[1]["id"] == "x/y"
        assert (await get(world, "/v1/models/x/y"))[1]["id"] == "x/y"
        assert (await get(world, "/v1/models/no"))[0] == 404


async def test_a_burst_asks_each_worker_once(stubs: tuple[Stub, Stub]) -> None:
    async with World({"a": stubs[0].url, "b": stubs[1].url}) as world:
        await get(world, "/v1/models")
        for _ in range(5):
            async with world.http.get(world.url + "/v1/models") as response:
                assert response.status == 200
        assert [len(stub.calls) for stub in stubs] == [1, 1]


async def test_a_refusal_by_all_is_passed_on_and_by_one_is_not(stubs: tuple[Stub, Stub]) -> None:
    stubs[0].script = refuses
    async with World({"a": stubs[0].url, "b": stubs[1].url}) as world:
        status, answer = await get(world, "/v1/models")
        assert (status, len(answer["data"])) == (200, 2)  # type: ignore[arg-type]
        stubs[1].script = refuses
        assert await get(world, "/v1/models") == (401, {"error": {"message": "bad key"}})


async def test_an_answer_without_end_is_left_out(stubs: tuple[Stub, Stub]) -> None:
    sent = 0

    async def endless(call: Call) -> None:
        nonlocal sent
        await call.begin_stream()
        while sent < 256 << 20:
            await call.chunk(b" " * 65_536)
            sent += 65_536

    stubs[0].script = endless
    async with World({"a": stubs[0].url, "b": stubs[1].url}) as world:
        status, answer = await get(world, "/v1/models")
        assert (status, [row["id"] for row in answer["data"]]) == (200, ["m", "z"])  # type: ignore[attr-defined]
        assert sent < 64 << 20


async def test_an_answer_nested_too_deep_is_left_out(stubs: tuple[Stub, Stub]) -> None:
    async def deep(call: Call) -> None:
        await call.ok(b'{"data":[{"id":"m","extra":' + b"[" * 20_000 + b"]" * 20_000 + b"}]}")

    stubs[0].script = deep
    async with World({"a": stubs[0].url, "b": stubs[1].url}) as world:
        status, answer = await get(world, "/v1/models")
        assert (status, [row["id"] for row in answer["data"]]) == (200, ["m", "z"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Authorization", "X-Api-Key", "Cookie"])
async def test_one_clients_list_is_not_shown_to_another(stubs: tuple[Stub, Stub], name: str) -> None:
    async def by_credential(call: Call) -> None:
        data = [{"id": call.header(name) or "nobody"}]
        await call.ok(json.dumps({"data": data}).encode())

    stubs[0].script = by_credential
    async with World({"a": stubs[0].url}) as world:
        models = ModelList(world.upstreams, lambda: ["a"])
        world.plane.pages = {PATH: models.page}
        for key in ("one", "two", "one"):
            async with world.http.get(world.url + PATH, headers={name: key}) as response:
                assert (await response.json())["data"] == [{"id": key}]
        assert len(stubs[0].calls) == 2


async def test_who_has_a_key_cannot_have_the_fleet_asked_again_by_a_header_more(stubs: tuple[Stub, Stub]) -> None:
    (one, a), (two, b) = made("a"), made("b")
    async with World({"a": stubs[0].url}, keys=(a, b), engine_key="theirs") as world:
        world.plane.pages = {PATH: ModelList(world.upstreams, lambda: ["a"], world.door).page}
        statuses = set()
        for i, secret in enumerate((one, two) * 20):
            headers = {**bearer(secret), "X-Nonce": str(i), "Cookie": f"c={i}"}
            async with world.http.get(world.url + PATH, headers=headers) as response:
                statuses.add(response.status)
        assert statuses == {200}
        assert len(stubs[0].calls) <= 3  # One a second.
        assert stubs[0].calls[0].header("authorization") == "Bearer theirs"
        assert not stubs[0].calls[0].header("x-nonce")


async def test_only_so_many_lists_are_asked_for_at_once(stubs: tuple[Stub, Stub]) -> None:
    async def waits(call: Call) -> None:
        await call.wait_hang_up()

    stubs[0].script = waits
    async with World({"a": stubs[0].url}) as world:
        models = ModelList(world.upstreams, lambda: ["a"])
        world.plane.pages = {PATH: models.page}

        async def status(key: int) -> int:
            async with world.http.get(world.url + PATH, headers={"Authorization": str(key)}) as response:
                return response.status

        statuses = await asyncio.gather(*(status(i) for i in range(40)))
        assert set(statuses) == {503}
        assert len(stubs[0].calls) == 16
