"""API keys at the data plane: who comes in, what engines see of it, what is counted, and what is refused how."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from gateway.auth import door as door_module
from gateway.config.schema import TenancyConfig
from gateway.proxy.aio_incoming import AioIncoming
from gateway.proxy.routes import ROUTES
from tests.support.auth import bearer, made
from tests.support.proxy_world import Call, Stub, World, raw_request, until

pytestmark = pytest.mark.usefixtures("http_plane")

BODY = {"model": "m", "prompt": "hi", "max_tokens": 10}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
USAGE = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'


async def ok(call: Call) -> None:
    await call.ok(USAGE)


def error(answer: bytes) -> Any:
    return json.loads(answer)["error"]


async def test_without_keys_nobody_needs_one_and_nothing_is_taken_out() -> None:
    async with Stub(ok) as stub, World({"a": stub.url}) as world:
        status, _, headers = await world.post(BODY, Authorization="Bearer theirs")
        assert status == 200
        assert stub.calls[0].header("Authorization") == "Bearer theirs"
        assert not [name for name in headers if name.lower().startswith("x-ratelimit")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/version"])
async def test_who_has_no_key_is_told_so_before_a_byte_of_the_body_is_read(path: str) -> None:
    _, key = made()
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        method = "GET" if path == "/version" else "POST"
        reader, writer = await world.connect()
        writer.write(raw_request(b"", "Content-Length: 5000", line=f"{method} {path} HTTP/1.1", length=False))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nwww-authenticate: bearer\r\n" in head.lower()
        assert error(await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r")[0]))) == {
            "message": "You must give an API key: `Authorization: Bearer KEY` or `x-api-key: KEY`.",
            "type": "authentication_error", "param": None, "code": "invalid_api_key",
        }  # fmt: skip
        writer.close()
        assert stub.calls == []
        assert world.value("warmroute_requests_rejected_total", reason="bad_key") == 1
        await until(world.is_idle)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wr-wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic d3I6d3I="},
        {"x-api-key": "wr-wrong"},
        {"x-api-key": "\xff\xfe"},
        {"Authorization": "Bearer " + "x" * 8000},
    ],
)
async def test_a_wrong_key_is_401_and_never_told(headers: dict[str, str]) -> None:
    _, key = made()
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        rows = [f"{name}: {value}" for name, value in headers.items()]
        raw = json.dumps(BODY).encode()
        reader, writer = await world.connect()
        writer.write(raw_request(raw, *rows, "Connection: close"))
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert stub.calls == []
        (record,) = await world.records()
        shown = json.dumps(record) + answer.decode("latin-1")
        assert "wr-wrong" not in shown
        assert record["error"] == "invalid_api_key"


@pytest.mark.parametrize("how", ["bearer", "BEARER", "x-api-key", "both"])
async def test_a_key_comes_in_either_header_and_goes_no_further(how: str) -> None:
    secret, key = made()
    headers = {
        "bearer": {"Authorization": f"Bearer {secret}"},
        "BEARER": {"AUTHORIZATION": f"bEARER  {secret} "},
        "x-api-key": {"X-Api-Key": secret},
        "both": {"Authorization": f"Bearer {secret}", "x-api-key": secret},
    }[how]
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        assert (await world.post(BODY, **headers))[0] == 200
        assert [record["tenant"] for record in await world.records()] == ["acme"]
        assert secret not in stub.calls[0].head.decode()
        assert stub.calls[0].header("Authorization") is None
        assert secret not in world.log.getvalue()
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,), engine_key="the engines'") as world:
        assert (await world.post(BODY, **headers))[0] == 200
        assert [value for name, value in stub.calls[0].headers if name.lower() == "authorization"] == [
            "Bearer the engines'"
        ]
        async with world.http.options(world.url + "/v1/completions", headers=headers) as response:
            assert response.status == 200  # A preflight needs none, and takes none along.
        assert secret not in stub.calls[1].head.decode()


async def test_two_keys_at_once_are_nobodys() -> None:
    (one, a), (two, b) = made("a"), made("b")
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(a, b)) as world:
        status, answer, _ = await world.post(BODY, **{"Authorization": f"Bearer {one}", "x-api-key": two})
        assert (status, error(answer)["code"]) == (400, "ambiguous_identity")


async def test_anthropic_clients_get_errors_of_their_own_shape() -> None:
    _, key = made()
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, answer, _ = await world.post(CHAT, path)
            assert status == 401
            assert json.loads(answer) == {
                "type": "error",
                "error": {
                    "type": "authentication_error",
                    "message": "You must give an API key: `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                    "param": None,
                    "code": "invalid_api_key",
                },
            }


async def test_expired_and_replaced_keys() -> None:
    old, before = made("a", expires="2020-01-01")
    new, key = made("a", expires="2999-01-01T00:00:00+01:00", name="b")
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(before, key)) as world:
        status, answer, _ = await world.post(BODY, **bearer(old))
        assert (status, error(answer)["code"]) == (401, "expired_api_key")
        assert (await world.post(BODY, **bearer(new)))[0] == 200
        assert world.door is not None
        world.door.replace([])
        assert (await world.post(BODY, **bearer(new)))[0] == 401


async def test_models_that_a_key_does_not_name_are_403() -> None:
    secret, key = made(models=("m", "meta/*"))
    async with Stub(ok) as stub, Stub(ok) as other, World({"a": stub.url}, keys=(key,)) as world:
        world.add("b", other.url, model="other", adapters=("meta/x", "lora"))
        for name, expected in (("m", 200), ("meta/x", 200), ("other", 403), ("lora", 403)):
            status, answer, _ = await world.post({**BODY, "model": name}, **bearer(secret))
            assert status == expected, name
        assert error(answer) == {
            "message": "Your API key may not use the model `lora`.",
            "type": "permission_error", "param": "model", "code": "model_not_allowed",
        }  # fmt: skip
        assert len(other.calls) == 1
        assert world.value("warmroute_tenant_requests_total", tenant="acme", outcome="forbidden") == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"x","model":"other"}',
        b'{"model":"m","prompt":"x","mod\\u0065l":"other"}',
        b'{"model":"m","prompt":"' + b"x" * (300 << 10) + b'","model":"other"}',
        '{"model":"m","prompt":"x","model":"other"}'.encode("utf-16"),
        b'{"model":"m","prompt":NaN,"model":"other"}',
    ],
)
async def test_a_model_named_twice_is_the_last_one_as_engines_read_it(body: bytes) -> None:
    assert json.loads(body)["model"] == "other"
    secret, key = made(models=("m",))
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        world.add("b", stub.url, model="other")
        assert (await world.post(body, **bearer(secret)))[0] == 403
        assert stub.calls == []


def form(*parts: tuple[str, bytes]) -> bytes:
    rows = [b"--b\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + text for head, text in parts]
    return b"\r\n".join(rows) + b"\r\n--b--\r\n"


FILE = ('name="file"; filename="model.wav"', b"x" * 200_000)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([('name="model"', b"m"), FILE], 200),
        ([FILE, ('name="model"', b"m"), FILE], 200),
        ([('name="model"', b"other"), FILE], 403),
        ([FILE, ('name="model"', b"other"), FILE], 403),
        ([('name="model"', b"m"), FILE, ('name="model"', b"other"), FILE], 400),
        ([('name="model"', b"m"), ('name="mo\\del"', b"other"), FILE], 400),
        ([('name="model"', b"m"), ("name=model", b"other"), FILE], 400),
        ([FILE], 400),
    ],
)
async def test_a_form_says_its_model_once_to_a_key_that_names_models(
    parts: list[tuple[str, bytes]], expected: int
) -> None:
    secret, key = made(models=("m",))
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        world.add("a", stub.url, adapters=("other",))
        headers = {**bearer(secret), "Content-Type": "multipart/form-data; boundary=b"}
        status, answer, _ = await world.post(form(*parts), "/v1/audio/transcriptions", **headers)
        assert status == expected, answer


async def test_what_cannot_be_read_is_refused_to_a_key_that_names_models() -> None:
    secret, key = made(models=("m",))
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        headers = {**bearer(secret), "Content-Encoding": "gzip"}
        status, answer, _ = await world.post(b"\x1f\x8b", **headers)
        assert (status, error(answer)["code"]) == (400, "not_readable")


async def test_requests_a_minute_are_counted_and_told_on_every_answer() -> None:
    secret, key = made(requests_per_minute=2, tokens_per_minute=1000)
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        status, _, headers = await world.post(BODY, **bearer(secret))
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert headers["x-ratelimit-limit-tokens"] == "1000"
        assert headers["x-ratelimit-reset-requests"].endswith("s")
        assert (await world.post({"model": "unknown"}, **bearer(secret)))[0] == 404
        status, answer, headers = await world.post(BODY, **bearer(secret))
        assert status == 429
        assert error(answer)["code"] == "rate_limit_exceeded"
        assert error(answer)["message"] == "Your API key is limited to 2 requests a minute."
        assert 1 <= int(headers["Retry-After"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert len(stub.calls) == 1
        assert world.value("warmroute_tenant_requests_total", tenant="acme", outcome="requests") == 1
        status, answer, headers = await world.post(CHAT, "/v1/messages", **bearer(secret))
        assert (status, json.loads(answer)["error"]["type"]) == (429, "rate_limit_error")


def tokens_left(world: World, secret: str) -> int:
    from multidict import CIMultiDict

    assert world.door is not None
    visit = world.door.identify(CIMultiDict(bearer(secret)))
    return int(dict(visit.headers())["x-ratelimit-remaining-tokens"])


async def test_tokens_are_reserved_and_put_right_by_usage() -> None:
    secret, key = made(tokens_per_minute=1000)
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        asked.set()
        await go_on.wait()
        await call.ok(USAGE)

    async with Stub(waits) as stub, World({"a": stub.url}, keys=(key,)) as world:
        first = asyncio.ensure_future(world.post({**BODY, "prompt": [1] * 100, "max_tokens": 850}, **bearer(secret)))
        await asked.wait()
        assert 50 <= tokens_left(world, secret) <= 60
        status, answer, headers = await world.post({**BODY, "prompt": [1] * 100}, **bearer(secret))
        assert (status, error(answer)["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["Retry-After"]) <= 4
        go_on.set()
        assert (await first)[0] == 200
        assert tokens_left(world, secret) >= 990
        assert world.value("warmroute_tenant_tokens_total", tenant="acme", kind="prompt") == 7
        assert world.value("warmroute_tenant_tokens_total", tenant="acme", kind="output") == 3
        status, answer, headers = await world.post({**BODY, "prompt": [1] * 1001}, **bearer(secret))
        assert (status, error(answer)["code"]) == (429, "request_too_large_for_limit")
        assert "Retry-After" not in headers
        await until(world.is_idle)


@pytest.mark.parametrize("content_type", ["text/plain; charset=utf-8", None])
async def test_what_somebody_has_dictated_is_not_what_it_took(content_type: str | None) -> None:
    spoken = b'{"usage":{"prompt_tokens":0,"completion_tokens":0}}'

    async def transcribes(call: Call) -> None:
        rows = [] if content_type is None else [f"Content-Type: {content_type}"]
        head = "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(spoken)}", *rows])
        await call.send(head.encode() + b"\r\n\r\n" + spoken)

    secret, key = made(tokens_per_minute=100_000)
    async with Stub(transcribes) as stub, World({"a": stub.url}, keys=(key,)) as world:
        headers = {**bearer(secret), "Content-Type": "multipart/form-data; boundary=b"}
        spoken_form = form(('name="model"', b"m"), FILE)
        status, answer, _ = await world.post(spoken_form, "/v1/audio/transcriptions", **headers)
        assert (status, answer) == (200, spoken)
        await until(world.is_idle)
        counted = sum(
            world.value("warmroute_tenant_tokens_total", tenant="acme", kind=kind) or 0 for kind in ("prompt", "output")
        )
        assert counted > 0, "nothing is counted of what was reserved"


async def test_a_request_that_nobody_answers_well_costs_no_tokens() -> None:
    async def refuses(call: Call) -> None:
        await call.ok(b'{"error":{}}', status="400 Bad Request")

    secret, key = made(tokens_per_minute=1000)
    async with Stub(refuses) as stub, World({"a": stub.url}, keys=(key,)) as world:
        status, _, headers = await world.post({**BODY, "max_tokens": 900}, **bearer(secret))
        assert status == 400
        assert int(headers["x-ratelimit-remaining-tokens"]) >= 999
        assert tokens_left(world, secret) >= 999
        world.down.add("a")
        status, _, headers = await world.post({**BODY, "max_tokens": 900}, **bearer(secret))
        assert status == 503
        assert int(headers["x-ratelimit-remaining-tokens"]) >= 999
        assert tokens_left(world, secret) >= 999


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_pays_for_what_it_had(stream: bool) -> None:
    arrived = asyncio.Event()

    async def streams(call: Call) -> None:
        if stream:
            await call.begin_stream()
            for _ in range(40):
                await call.chunk(b'data: {"choices":[{"text":"x"}]}\n\n')
        arrived.set()
        await call.wait_hang_up()

    secret, key = made(tokens_per_minute=1000)
    async with Stub(streams) as stub, World({"a": stub.url}, keys=(key,)) as world:
        reader, writer = await world.connect()
        raw = json.dumps({**BODY, "prompt": [1] * 100, "max_tokens": 500, "stream": stream}).encode()
        writer.write(raw_request(raw, f"Authorization: Bearer {secret}"))
        await arrived.wait()
        if stream:
            got = b""
            while got.count(b"data: ") < 40:
                got += await reader.read(1 << 16)
        writer.transport.abort()
        await until(world.is_idle)
        left = tokens_left(world, secret)
        assert 850 <= left <= 870 if stream else 400 <= left <= 420


async def test_requests_at_once_are_limited_from_their_first_byte_and_given_back() -> None:
    secret, key = made(concurrent_requests=2)
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        slow = [await world.connect() for _ in range(2)]
        for _, writer in slow:
            writer.write(raw_request(b"", "Content-Length: 50", f"x-api-key: {secret}", length=False))
        await until(lambda: world.plane.in_flight == 2)
        status, answer, headers = await world.post(BODY, **bearer(secret))
        assert (status, error(answer)["code"]) == (429, "concurrency_limit_exceeded")
        assert headers["Retry-After"] == "1"
        for _, writer in slow:
            writer.transport.abort()
        await until(world.is_idle)
        for _ in range(5):
            assert (await world.post(BODY, **bearer(secret)))[0] == 200


async def test_a_priority_outside_the_range_of_a_key_is_refused_and_one_inside_reaches_the_engine() -> None:
    secret, key = made(priority=(5, 10))
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        for body, headers, expected in (
            ({}, {}, (200, "5")),
            ({"priority": 7}, {}, (200, "7")),
            ({"priority": 7}, {"X-Vllm-Priority": "10"}, (200, "10")),
            ({"priority": 0}, {}, (403, None)),
            ({"priority": 7}, {"x-vllm-priority": "-1"}, (403, None)),
            ({"priority": -9}, {"x-vllm-priority": "7"}, (403, None)),
            ({"priority": "-9"}, {}, (400, None)),
            ({}, {"x-vllm-priority": "x"}, (400, None)),
        ):
            before = len(stub.calls)
            status, _, _ = await world.post({**BODY, **body}, **bearer(secret), **headers)
            seen = stub.calls[-1].header("x-vllm-priority") if len(stub.calls) > before else None
            assert (status, seen) == expected


async def test_o6_the_tenant_is_that_of_the_key_whatever_a_header_says() -> None:
    (one, a), (two, b) = made("a"), made("b")
    tenancy = TenancyConfig(header="x-tenant", salt="derive", forward_header=True)
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(a, b), tenancy=tenancy) as world:
        salts = []
        for secret, said in ((one, "a"), (one, "b"), (two, "a"), (two, "b")):
            headers = {**bearer(secret), "X-Tenant": said}
            assert (await world.post({**BODY, "cache_salt": "mine"}, **headers))[0] == 200
            salts.append(json.loads(stub.calls[-1].body)["cache_salt"])
        assert salts[0] == salts[1] != salts[2] == salts[3]
        assert [call.header("x-tenant") for call in stub.calls] == ["a", "a", "b", "b"]


async def test_a_stored_response_is_its_tenants_alone() -> None:
    async def stores(call: Call) -> None:
        await call.ok(b'{"id":"resp_1","usage":{"input_tokens":1,"output_tokens":1}}')

    (one, a), (two, b), (again, c) = made("a"), made("b"), made("a", name="second")
    body = {"model": "m", "input": "x"}
    async with Stub(stores) as stub, World({"a": stub.url}, keys=(a, b, c)) as world:
        assert (await world.post(body, "/v1/responses", **bearer(one)))[0] == 200
        at = world.url + "/v1/responses/resp_1"
        for secret, expected in ((one, 200), (again, 200), (two, 404)):
            async with world.http.get(at, headers=bearer(secret)) as response:
                assert response.status == expected
            async with world.http.post(at + "/cancel", headers=bearer(secret)) as response:
                assert response.status == expected
            follow = {**body, "previous_response_id": "resp_1", "store": False}
            assert (await world.post(follow, "/v1/responses", **bearer(secret)))[0] == expected
        async with world.http.get(at) as response:
            assert response.status == 401
        # Another's id, said by an engine to somebody who chose it, changes no owner.
        assert (await world.post(body, "/v1/responses", **bearer(two)))[0] == 200
        async with world.http.get(at, headers=bearer(two)) as response:
            assert response.status == 404
        async with world.http.get(world.url + "/v1/responses/resp_2", headers=bearer(one)) as response:
            assert response.status == 404  # Whose it is nobody knows.
        assert len(stub.calls) == 8


async def test_anothers_response_is_not_followed_by_a_body_too_large_to_take_apart() -> None:
    async def stores(call: Call) -> None:
        await call.ok(b'{"id":"resp_1","usage":{"input_tokens":1,"output_tokens":1}}')

    (one, a), (two, b) = made("a"), made("b")
    body = {"model": "m", "input": "x"}
    filler = {"metadata": {f"k{i:06d}": "v" for i in range(40_000)}}
    members = {f"k{i:06d}": "x" * 250 for i in range(1500)}
    async with Stub(stores) as stub, World({"a": stub.url}, keys=(a, b)) as world:
        assert (await world.post(body, "/v1/responses", **bearer(one)))[0] == 200
        for more in (filler, members):
            follow = {**body, "previous_response_id": "resp_1", **more}
            assert (await world.post(follow, "/v1/responses", **bearer(two)))[0] == 404
            assert (await world.post(follow, "/v1/responses", **bearer(one)))[0] == 200


@pytest.mark.parametrize("headers", [{"Content-Encoding": "gzip"}, {"Content-Type": "multipart/form-data; boundary=b"}])
async def test_a_body_that_may_follow_anothers_response_unread_goes_to_no_engine(headers: dict[str, str]) -> None:
    secret, key = made()
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        raw = b'{"model":"m","input":"x","previous_response_id":"resp_1"}'
        async with world.http.post(
            world.url + "/v1/responses", data=raw, headers={**bearer(secret), **headers}
        ) as response:
            assert (response.status, error(await response.read())["code"]) == (400, "not_readable")
        assert stub.calls == []


async def test_an_engine_that_counts_below_nothing_gives_no_tokens_and_keeps_no_place() -> None:
    async def lies(call: Call) -> None:
        await call.ok(b'{"choices":[],"usage":{"prompt_tokens":-100000,"completion_tokens":-5}}')

    secret, key = made(tokens_per_minute=1000, concurrent_requests=1)
    async with Stub(lies) as stub, World({"a": stub.url}, keys=(key,)) as world:
        for _ in range(3):
            status, _, headers = await world.post({**BODY, "max_tokens": 100}, **bearer(secret))
            assert status == 200
        assert int(headers["x-ratelimit-remaining-tokens"]) < 800


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/cohere/v2/chat"])
async def test_answers_of_a_length_nobody_reads_are_reserved_as_usual_ones(path: str) -> None:
    async def silent(call: Call) -> None:
        await call.ok(b"{}")

    secret, key = made(tokens_per_minute=1000)
    async with Stub(silent) as stub, World({"a": stub.url}, keys=(key,)) as world:
        status, _, headers = await world.post(CHAT, path, **bearer(secret))
        assert status == 200
        usual = round(world.planner.cost.output_tokens(None))
        assert usual > 50
        # Not to the token: the bucket fills meanwhile.
        assert int(headers["x-ratelimit-remaining-tokens"]) <= 1000 - usual / 2


async def test_a_realtime_session_is_of_the_tenant_of_its_key_not_of_its_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AioIncoming, "certificate_name", lambda self: "another")

    async def refuses(call: Call) -> None:
        await call.ok(b"", status="403 Forbidden")

    secret, key = made("acme")
    settings = TenancyConfig(certificate=True, header="x-tenant", forward_header=True)
    async with Stub(refuses) as stub, World({"a": stub.url}, keys=(key,), tenancy=settings) as world:
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await world.http.ws_connect(f"{world.url}/v1/realtime?model=m", headers=bearer(secret))
        assert stub.calls[0].header("X-Tenant") == "acme"


async def test_tenants_beyond_a_bound_share_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MOST_TENANTS", 2)
    pairs = [made(f"t{i}") for i in range(4)]
    async with Stub(ok) as stub, World({"a": stub.url}, keys=tuple(key for _, key in pairs)) as world:
        for secret, _ in pairs:
            assert (await world.post(BODY, **bearer(secret)))[0] == 200
        assert world.value("warmroute_tenant_requests_total", tenant="t1", outcome="admitted") == 1
        assert world.value("warmroute_tenant_requests_total", tenant="other", outcome="admitted") == 2


async def test_what_a_key_costs_a_request() -> None:
    """A bound far above what it takes (some 15 us), so that nothing slow comes in unnoticed."""
    from multidict import CIMultiDict

    secret, key = made(requests_per_minute=10**9, tokens_per_minute=10**9, concurrent_requests=10)
    async with World({}, keys=(key,)) as world:
        assert world.door is not None
        began_s = time.thread_time()
        for _ in range(2000):
            visit = world.door.identify(CIMultiDict(bearer(secret)))
            visit.enter()
            visit.headers()
            visit.leave()
        assert (time.thread_time() - began_s) / 2000 < 300e-6


SALTLESS = ["/cohere/v2/chat", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations", "/v2/embed"]
SALTED = sorted({path for path, route in ROUTES.items() if route.queued and "POST" in route.methods} - {*SALTLESS})


@pytest.mark.parametrize("path", SALTED)
async def test_every_path_that_runs_the_model_has_the_salt_of_its_tenant(path: str) -> None:
    (one, a), (two, b) = made("a"), made("b")
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(a, b), tenancy=TenancyConfig(salt="derive")) as world:
        salts = set()
        for secret in (one, two):
            body = {**CHAT, "prompt": "x", "input": "x", "cache_salt": "mine"}
            assert (await world.post(body, path, **bearer(secret)))[0] == 200
            salts.add(json.loads(stub.calls[-1].body)["cache_salt"])
            for raw, kind in ((b"--b", "multipart/form-data; boundary=b"), (b"[]", "application/json")):
                status, _, _ = await world.post(raw, path, **bearer(secret), **{"Content-Type": kind})
                assert status == 400
        assert len(salts) == 2
        assert len(stub.calls) == 2


@pytest.mark.parametrize("path", SALTLESS)
async def test_a_path_on_which_engines_drop_the_salt_is_refused_where_tenants_have_one(path: str) -> None:
    secret, key = made("a")
    body = {**CHAT, "input": "x", "texts": ["x"]}
    for salt, expected in (("derive", 400), ("off", 200)):
        tenancy = TenancyConfig(salt=salt)  # type: ignore[arg-type]
        async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,), tenancy=tenancy) as world:
            status, answer, _ = await world.post(body, path, **bearer(secret))
            assert status == expected, answer
            assert len(stub.calls) == (expected == 200)
            if expected == 400:
                assert b"not_salted" in answer


async def test_a_preflight_needs_no_key_and_brings_nothing() -> None:
    _, key = made()
    async with Stub(ok) as stub, World({"a": stub.url}, keys=(key,)) as world:
        for n_bytes in (0, 10, 5000):
            async with world.http.options(world.url + "/v1/completions", data=b"x" * n_bytes) as response:
                assert response.status == 200
        assert [call.body for call in stub.calls] == [b"", b"", b""]
