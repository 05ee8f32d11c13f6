"""Keys of a whole gateway over fake engines: files that change, lists of models, realtime sessions, commands."""

from __future__ import annotations

import io
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.engine.server import FakeVllm
from gateway.auth import keys
from gateway.cli import main
from gateway.config.schema import AuthConfig, TenancyConfig
from gateway.debug.health import DEGRADATIONS
from gateway.errors import UserError
from tests.support.auth import bearer, made, write_keys
from tests.support.gateway_world import Fleet, engine, until

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 1}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


async def status(fleet: Fleet, secret: str, path: str = "/v1/completions", body: Any = BODY) -> int:
    async with fleet.http.post(fleet.url + path, json=body, headers=bearer(secret)) as response:
        await response.read()
        return response.status


def spoil(file: Path) -> None:
    file.write_text("keys:\n- {tenant: x}\n")


async def looked(fleet: Fleet, times: int = 2) -> None:
    assert fleet.core.keys is not None
    for _ in range(times):
        await fleet.core.keys.look()


async def test_a_changed_file_is_taken_while_it_serves_and_a_bad_one_is_not(file: Path) -> None:
    (one, a), (two, b) = made("a", requests_per_minute=10), made("b")
    write_keys(file, a)
    async with Fleet(a=engine(), auth=AuthConfig(keys_file=str(file))) as fleet:
        assert [await status(fleet, secret) for secret in (one, two, "")] == [200, 401, 401]
        assert {await status(fleet, one) for _ in range(6)} == {200}
        write_keys(file, a, b)
        await looked(fleet, 1)
        assert await status(fleet, two) == 401  # It may be half of it.
        await looked(fleet)
        assert [await status(fleet, secret) for secret in (one, two)] == [200, 200]
        async with fleet.http.post(fleet.url + "/v1/completions", json=BODY, headers=bearer(one)) as response:
            left = int(response.headers["x-ratelimit-remaining-requests"])
        assert left < 9  # Its books go on: new ones would have 9 left, and these are full again after a minute only.
        spoil(file)
        await looked(fleet)
        assert [await status(fleet, secret) for secret in (one, two)] == [200, 200]
        _, page = await fleet.get(fleet.admin + "/readyz?verbose")
        (found,) = [each for each in page["degraded"] if each["what"] == "keys_rejected"]
        assert "keys[0]" in found["detail"]
        assert "keys_rejected" in DEGRADATIONS
        os.unlink(file)
        await looked(fleet)
        assert await status(fleet, two) == 200
        write_keys(file, b)
        assert fleet.core.keys is not None
        fleet.core.keys.reload()
        assert [await status(fleet, secret) for secret in (one, two)] == [401, 200]
        _, page = await fleet.get(fleet.admin + "/readyz?verbose")
        assert "keys_rejected" not in json.dumps(page)


async def test_no_key_is_in_logs_metrics_or_pages(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret, key = made("acme")
    write_keys(file, key)
    async with Fleet(a=engine(), auth=AuthConfig(keys_file=str(file))) as fleet:
        assert await status(fleet, secret) == 200
        assert await status(fleet, "wr-wrong") == 401
        told = ""
        for path in ("/metrics", "/debug/config", "/debug/state", "/debug/decisions", "/readyz?verbose"):
            _, page = await fleet.get(fleet.admin + path)
            told += json.dumps(page)
        assert 'tenant=\\"acme\\"' in told
    assert isinstance(key.sha256, str)
    for hidden in (secret, "wr-wrong", key.sha256):
        assert hidden not in told + caplog.text


async def test_a_list_of_models_has_those_of_the_key(file: Path) -> None:
    some, a = made("a", models=("l*",), requests_per_minute=60)
    (every, b), (none, c) = made("b"), made("c", models=("no",))
    write_keys(file, a, b, c)
    lora = engine(aliases=("large",))
    async with Fleet(a=lora, auth=AuthConfig(keys_file=str(file))) as fleet:
        listed = {}
        for name, secret in (("some", some), ("every", every), ("none", none)):
            async with fleet.http.get(fleet.url + "/v1/models", headers=bearer(secret)) as response:
                assert response.status == 200
                listed[name] = [card["id"] for card in (await response.json())["data"]]
        assert listed == {"some": ["large"], "every": ["tiny", "large"], "none": []}
        for model, expected in (("large", 200), ("tiny", 404)):
            async with fleet.http.get(f"{fleet.url}/v1/models/{model}", headers=bearer(some)) as response:
                assert response.status == expected
                assert response.headers["x-ratelimit-remaining-requests"] == "60"
        async with fleet.http.get(fleet.url + "/v1/models") as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_a_tenants_request_is_explained_on_the_admin_port(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_SALT_SECRET", "s" * 32)
    secret, key = made("acme")
    write_keys(file, key)
    settings = AuthConfig(keys_file=str(file))
    async with Fleet(a=engine(), auth=settings, tenancy=TenancyConfig(salt="derive")) as fleet:
        body = {**BODY, "prompt": list(range(200))}
        assert await status(fleet, secret, body=body) == 200
        await until(lambda: fleet.core.index.stats()["entries"])
        cached = {}
        for tenant in ("acme", "other", None):
            headers = {} if tenant is None else {"X-Warmroute-Tenant": tenant}
            async with fleet.http.post(fleet.admin + "/debug/explain", json=body, headers=headers) as response:
                cached[tenant] = (await response.json())["considered"][0]["cached_tokens"]
        assert cached == {"acme": 192, "other": 0, None: 0}


@pytest.fixture
async def realtime(file: Path) -> AsyncIterator[tuple[Fleet, str]]:
    secret, key = made(concurrent_requests=1, models=("tiny",))
    write_keys(file, key)
    config = engine(aliases=("large",))
    async with Fleet(a=config, auth=AuthConfig(keys_file=str(file))) as fleet:
        yield fleet, secret


async def test_a_realtime_session_needs_a_key_and_holds_its_place(realtime: tuple[Fleet, str]) -> None:
    fleet, secret = realtime
    at = fleet.url.replace("http", "ws") + "/v1/realtime"
    for headers, path, expected in (
        ({}, "?model=tiny", 401), (bearer("x" * 30), "?model=tiny", 401), (bearer(secret), "?model=large", 403)
    ):  # fmt: skip
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await fleet.http.ws_connect(at + path, headers=headers)
        assert refused.value.status == expected
    async with fleet.http.ws_connect(at + "?model=tiny", headers=bearer(secret)) as session:
        assert (await session.receive_json())["type"] == "session.created"
        assert await status(fleet, secret) == 429
    assert fleet.core.keys is not None
    await until(lambda: fleet.gateway.plane.in_flight == 0)
    assert await status(fleet, secret) == 200


@pytest.mark.parametrize(
    "event",
    [
        '{"type":"session.update","model":"large"}',
        '{"type":"session.update","session":{"model":"large"}}',
        '{"type":"session.update","model":"tiny","session":{"model":"large"}}',
        '{"type":"session\\u002eupdate","mod\\u0065l":"large"}',
        '{"type":"session.update","model":"tiny","model":"large","pad":"' + "x" * 100_000 + '"}',
        "{",
    ],
)
async def test_a_session_changes_to_no_model_that_its_key_does_not_name(
    realtime: tuple[Fleet, str], event: str
) -> None:
    fleet, secret = realtime
    at = fleet.url.replace("http", "ws") + "/v1/realtime?model=tiny"
    async with fleet.http.ws_connect(at, headers=bearer(secret)) as session:
        assert (await session.receive_json())["type"] == "session.created"
        await session.send_str(event)
        while (message := await session.receive()).type is aiohttp.WSMsgType.TEXT:
            pass
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert (message.data, message.extra) == (1008, "your API key may not use this model")


async def test_a_session_that_names_a_forbidden_model_late_is_not_told_to_try_later(
    realtime: tuple[Fleet, str],
) -> None:
    fleet, secret = realtime
    at = fleet.url.replace("http", "ws") + "/v1/realtime"
    async with (
        FakeVllm(engine(model="another")) as other,
        fleet.http.post(fleet.admin + "/admin/workers", json={"url": other.url, "name": "b"}),
    ):
        await until(lambda: "b" in fleet.core.capabilities)
        async with fleet.http.ws_connect(at, headers=bearer(secret)) as session:
            assert (await session.receive_json())["type"] == "session.created"
            await session.send_json({"type": "session.update", "model": "another"})
            event = await session.receive_json()
            assert (event["type"], event["code"]) == ("error", "model_not_allowed")
            message = await session.receive()
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1008)


async def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = keys.new_key(), keys.new_key()
    monkeypatch.setenv("GATEWAY_KEYS", f" a={one}, b={two}\n a={'k' * 20} ")
    async with Fleet(a=engine(), auth=AuthConfig(keys_env="GATEWAY_KEYS")) as fleet:
        assert [await status(fleet, secret) for secret in (one, two, "k" * 20, "k" * 21)] == [200, 200, 200, 401]


@pytest.mark.parametrize("value", ["", "a", "a=short", "=" + "x" * 30, "a=" + "x" * 20 + ",b=" + "x" * 20])
def test_a_variable_that_holds_no_good_keys_stops_the_start_without_being_told(value: str) -> None:
    with pytest.raises(UserError, match="THE_KEYS") as refused:
        keys.keys_of_variable(value, "THE_KEYS")
    assert "short" not in str(refused.value)
    assert "xxx" not in str(refused.value)


def test_the_command_makes_hashes_and_checks(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--requests-per-minute", "600", "--tokens-per-minute", "1000", "--concurrent-requests", "2"]
    more = ["--model", "a", "--model", "b*", "--priority", "1", "2", "--expires", "2030-01-01", "--name", "n"]
    assert main(["keys", "new", "--tenant", "acme", *limits, *more]) == 0
    out, err = capsys.readouterr()
    secret = err.strip().removeprefix("key (shown once): ")
    assert secret.startswith("wr-")
    assert secret not in out
    file.write_text(f"keys:\n{out}")
    assert main(["keys", "check", str(file)]) == 0
    assert capsys.readouterr().out == "1 keys of 1 tenants\n"
    (key,) = keys.read_keys(file.read_text(), "f")
    assert key.digests == (keys.digest_of(secret),)
    assert (key.tenant, key.name, key.models, key.priority) == ("acme", "n", ("a", "b*"), (1, 2))
    assert main(["keys", "new", "--tenant", "x", "--expires", "tomorrow"]) == 2
    file.write_text("keys: [{tenant: a, sha256: x}, {tenant: b, sha265: y}]\n")
    assert main(["keys", "check", str(file)]) == 2
    err = capsys.readouterr().err
    assert "keys[0]" in err
    assert "did you mean sha256?" in err


@pytest.mark.parametrize(("line", "code"), [("", 2), ("\n", 2), ("hunter2\n", 2), (" sk-" + "x" * 30 + " \n", 0)])
def test_a_key_that_can_be_guessed_is_not_hashed(
    line: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    assert main(["keys", "hash"]) == code
    out, err = capsys.readouterr()
    assert out == (keys.digest_of(line.strip()).hex() + "\n" if code == 0 else "")
    assert "hunter2" not in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold `keys:`"),
        ("keys: {}", "must hold `keys:`"),
        ("keys: []\nmore: 1", "must hold `keys:`"),
        ("keys: [", "not valid YAML"),
        (f"keys: [{{tenant: a, sha256: {'a' * 64}}}, {{tenant: a, sha256: {'b' * 64}}}]", "give each a `name`"),
        (f"keys: [{{tenant: a, sha256: {'a' * 64}}}, {{tenant: b, sha256: {'a' * 64}}}]", "given twice"),
        (f"keys: [{{tenant: a, sha256: {'a' * 64}, tenant: b}}]", "given twice"),
        (f"keys: [{{tenant: a, sha256: {'a' * 64}, requests_per_minute: 0}}]", ">= 1"),
        (f"keys: [{{tenant: a, sha256: {'A' * 64}}}]", "regex"),
        (f"keys: [{{tenant: a, sha256: {'a' * 64}, priority: [2, 1]}}]", "lowest"),
        (f"keys: [{{tenant: a, sha256: {'a' * 64}, priority: [2]}}]", "2"),
        (f"keys: [{{tenant: '', sha256: {'a' * 64}}}]", "length"),
    ],
)
def test_a_file_with_a_mistake_is_no_file_of_keys(text: str, says: str) -> None:
    with pytest.raises(UserError, match="f") as refused:
        keys.read_keys(text, "f")
    assert says in str(refused.value)
