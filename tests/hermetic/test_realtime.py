"""/v1/realtime: WebSockets passed through to a worker, and closed for the right reason."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from yarl import URL

from gateway.config.schema import TenancyConfig
from scorer.types import ChangeKind, WorkerChange
from tests.support.gateway_world import Fleet, engine, until
from tests.support.proxy_world import Call, Stub, World
from tests.support.sidecar_world import Pod

AUDIO = {"type": "input_audio_buffer.append", "audio": base64.b64encode(b"\0\1" * 800).decode()}
COMMIT = {"type": "input_audio_buffer.commit"}
FINAL = {**COMMIT, "final": True}
UPDATE = {"type": "session.update", "model": "tiny"}
PATH = "/v1/realtime"


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(), b=engine()) as started:
        yield started


def sessions(fleet: Fleet) -> dict[str, int]:
    return {name: len(server.sessions) for name, server in fleet.engines.items()}


def booked(fleet: Fleet) -> int:
    return fleet.core.planner.in_flight()


async def said(socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    async with asyncio.timeout(60):
        event: dict[str, Any] = json.loads(await socket.receive_str())
    return event


async def closed(socket: aiohttp.ClientWebSocketResponse, within_s: float = 60.0) -> int | None:
    """The code it is closed with."""
    async with asyncio.timeout(within_s):
        while (message := await socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
            pass
    return message.data if message.type is WSMsgType.CLOSE else socket.close_code


async def transcribe(socket: aiohttp.ClientWebSocketResponse, model: str = "tiny") -> str:
    for event in ({**UPDATE, "model": model}, AUDIO, COMMIT, AUDIO, FINAL):
        await socket.send_json(event)
    texts = []
    while (event := await said(socket))["type"] == "transcription.delta":
        texts.append(event["delta"])
    assert (event["type"], event["text"]) == ("transcription.done", "".join(texts))
    return "".join(texts)


async def test_a_session_is_passed_through_booked_and_given_back(fleet: Fleet) -> None:
    async with fleet.http.ws_connect(f"{fleet.url}{PATH}?model=tiny") as socket:
        worker = socket._response.headers["x-warmroute-worker"]
        assert (await said(socket))["type"] == "session.created"
        assert (sessions(fleet)[worker], booked(fleet), fleet.gateway.plane.in_flight) == (1, 1, 1)
        assert fleet.core.metrics.registry.get_sample_value("warmroute_realtime_sessions") == 1
        assert await transcribe(socket) == "word0 word1 "
        assert await transcribe(socket) == "word0 word1 "
    await until(lambda: not booked(fleet) and not fleet.gateway.plane.in_flight)
    await until(lambda: not any(sessions(fleet).values()))
    value = fleet.core.metrics.registry.get_sample_value
    assert value("warmroute_requests_total", {"worker": worker, "status": "101"}) == 1
    assert value("warmroute_realtime_sessions") == 0
    assert value("warmroute_request_duration_seconds_count") == 0  # An hour of talk is no slow request.


async def test_sessions_spread_over_the_workers(fleet: Fleet) -> None:
    sockets = [await fleet.http.ws_connect(f"{fleet.url}{PATH}?model=tiny") for _ in range(6)]
    assert sessions(fleet) == {"a": 3, "b": 3}
    await asyncio.gather(*(socket.close() for socket in sockets))
    await until(lambda: not booked(fleet))


async def test_the_only_model_need_not_be_named(fleet: Fleet) -> None:
    async with fleet.http.ws_connect(fleet.url + PATH) as socket:
        assert (await said(socket))["type"] == "session.created"
        assert await transcribe(socket)


@pytest.mark.parametrize("greeted", [True, False])
async def test_of_several_models_the_first_session_update_chooses(greeted: bool) -> None:
    async with Fleet(a=engine(), b=engine(model="other")) as fleet, fleet.http.ws_connect(fleet.url + PATH) as socket:
        if not greeted:  # Who does not wait for it may have sent audio already.
            await socket.send_json(AUDIO)
        event = await said(socket)
        assert (event["type"], event["id"][:5], type(event["created"])) == ("session.created", "sess-", int)
        await socket.send_json({"type": "session.update", "model": "nope"})
        event = await said(socket)
        assert (event["type"], event["code"]) == ("error", "model_not_found")
        assert await transcribe(socket, "other") == ("word0 word1 " if greeted else "word0 word1 word2 ")
        assert sessions(fleet) == {"a": 0, "b": 1}
        await socket.send_json({"type": "session.update", "model": "tiny"})
        assert (await said(socket))["code"] == "model_not_found"  # The worker's own word.


@pytest.mark.parametrize("member", ["session", "whatever"])
async def test_an_event_nested_too_deep_names_no_model_and_ends_nothing(member: str) -> None:
    deep = f'{{"type": "session.update", "{member}": {{"x": {"[" * 20_000 + "]" * 20_000}}}}}'
    async with Fleet(a=engine(), b=engine(model="other")) as fleet, fleet.http.ws_connect(fleet.url + PATH) as socket:
        await said(socket)
        await socket.send_str(deep)
        await socket.send_json({"type": "session.update", "model": "nope"})
        assert (await said(socket))["code"] == "model_not_found"


async def test_who_names_no_model_cannot_hold_a_place_or_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.proxy.realtime.session._CHOOSING_S", 1.5)
    monkeypatch.setattr("gateway.proxy.realtime.session._MOST_HELD_BYTES", 10_000)
    async with Fleet(a=engine(), b=engine(model="other")) as fleet:
        async with fleet.http.ws_connect(fleet.url + PATH) as socket:
            assert await closed(socket) == 1008
        async with fleet.http.ws_connect(fleet.url + PATH) as socket:
            for _ in range(10):
                await socket.send_json(AUDIO)
            assert await closed(socket) == 1009
        await until(lambda: fleet.gateway.plane.in_flight == 0)


# ---- before the 101 --------------------------------------------------------------------------------------------------


async def refused(world: World | Fleet, path: str = PATH, **options: Any) -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as failure:
        await world.http.ws_connect(world.url + path, **options)
    return failure.value.status


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Upgrade": "h2c", "Connection": "Upgrade"},
        {"Upgrade": "websocket"},
        {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "12"},
        {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"},
    ],
)
async def test_what_is_no_websocket_is_told_to_be_one(fleet: Fleet, headers: dict[str, str]) -> None:
    async with fleet.http.get(fleet.url + PATH, headers=headers) as response:
        assert (response.status, response.headers["Upgrade"]) == (426, "websocket")
        assert (await response.json())["error"]["code"] == "upgrade_required"


async def test_other_methods_are_not_allowed(fleet: Fleet) -> None:
    async with fleet.http.post(fleet.url + PATH, json={}) as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET")
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_whats_wrong_before_the_101_is_an_http_error(fleet: Fleet) -> None:
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    headers["Sec-WebSocket-Key"] = base64.b64encode(b"k" * 16).decode()
    async with fleet.http.get(f"{fleet.url}{PATH}?model=nope", headers=headers) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert response.headers["X-Request-Id"]
    for server in fleet.engines.values():
        await server.stop()
    async with fleet.http.get(f"{fleet.url}{PATH}?model=tiny", headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (502, "upstream_unreachable")
    assert (booked(fleet), fleet.gateway.plane.in_flight) == (0, 0)


async def test_another_worker_takes_it_if_one_cannot_be_reached(fleet: Fleet) -> None:
    await fleet.engines["a"].stop()
    for _ in range(4):
        async with fleet.http.ws_connect(f"{fleet.url}{PATH}?model=tiny") as socket:
            assert socket._response.headers["x-warmroute-worker"] == "b"
            assert await said(socket)
    await until(lambda: not booked(fleet))


@pytest.mark.parametrize(("status", "told"), [("401 Unauthorized", 401), ("403 Forbidden", 403), ("200 OK", 502)])
async def test_a_workers_refusal_is_passed_on(status: str, told: int) -> None:
    async def script(call: Any) -> None:
        await call.ok(b"no", status=status)

    async with Stub(script) as a, World({"a": a.url}) as world:
        assert await refused(world, headers={"Authorization": "Bearer k"}) == told
        assert a.calls[0].header("authorization") == "Bearer k"
        assert world.is_idle()
        record = (await world.records())[0]
        assert (record["status"], record["error"], record["worker"]) == (told, "upstream_refused", "a")


async def test_a_worker_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.proxy.realtime.dialer.UPGRADE_TIMEOUT_S", 1.0)

    async def hangs(call: Any) -> None:
        await call.wait_hang_up()

    async with Stub(hangs) as a, World({"a": a.url}) as world:
        assert await refused(world) == 504
        await until(lambda: a.calls[0].hung_up.is_set())
        assert world.is_idle()


async def test_sessions_count_towards_max_concurrency() -> None:
    async with upstream(echoes) as a, World({"a": a.url}, max_concurrency=2) as world:
        sockets = [await world.http.ws_connect(world.url + PATH) for _ in range(2)]
        assert await refused(world) == 503
        await sockets[0].close()
        await until(lambda: world.plane.in_flight == 1)
        sockets[0] = await world.http.ws_connect(world.url + PATH)
        await asyncio.gather(*(socket.close() for socket in sockets))
        await until(world.is_idle)


# ---- upstreams that a test scripts -----------------------------------------------------------------------------------


class Upstream:
    def __init__(self, script: Any, protocols: tuple[str, ...]) -> None:
        self.script = script
        self.protocols = protocols
        self.requests: list[web.Request] = []
        self.codes: list[int | None] = []
        """What each session was closed with."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        self.requests.append(request)
        socket = web.WebSocketResponse(protocols=self.protocols, max_msg_size=0)
        await socket.prepare(request)
        try:
            await self.script(socket)
        finally:
            self.codes.append(socket.close_code)
        return socket


@asynccontextmanager
async def upstream(script: Any, protocols: tuple[str, ...] = ()) -> AsyncIterator[Upstream]:
    out = Upstream(script, protocols)
    app = web.Application()
    app.router.add_get(PATH, out.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    out.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield out
    finally:
        await runner.cleanup()


async def echoes(socket: web.WebSocketResponse) -> None:
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)


async def waits(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        pass


async def test_text_and_bytes_pass_both_ways_unchanged() -> None:
    async with upstream(echoes) as a, World({"a": a.url}) as world:
        async with world.http.ws_connect(URL(f"{world.url}{PATH}?model=m&x=%2F%20", encoded=True)) as socket:
            for data in ("caf\u00e9 \U0001f600", "", '{"a":  1.0}', "x" * 500_000):
                await socket.send_str(data)
                assert await socket.receive_str() == data
            for raw in (bytes(range(256)), b""):
                await socket.send_bytes(raw)
                assert await socket.receive_bytes() == raw
        await until(world.is_idle)
        assert a.requests[0].raw_path == f"{PATH}?model=m&x=%2F%20"
        record = (await world.records())[0]
        assert (record["status"], record["worker"], record["path"], record.get("cut")) == (101, "a", PATH, None)
        assert record["sent_bytes"] > 500_000


async def test_headers_and_subprotocols_pass_and_keys_in_them_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    offered = ("realtime", "openai-insecure-api-key.sk-secret")
    steering = {"X-data-parallel-rank": "7", "x-prefiller-host-port": "evil:1"}
    sent = {"Authorization": "Bearer sk-secret", "Origin": "https://me", "X-Request-Id": "mine", **steering}
    for protocols, chosen in ((("realtime",), "realtime"), ((), None)):
        async with upstream(echoes, protocols) as a, World({"a": a.url}) as world:
            async with world.http.ws_connect(world.url + PATH, protocols=offered, headers=sent) as socket:
                assert socket.protocol == chosen
                assert socket._response.headers["X-Request-Id"] == "mine"
            seen = a.requests[0].headers
            assert (seen["Authorization"], seen["Origin"], seen["X-Request-Id"]) == (
                "Bearer sk-secret", "https://me", "mine",
            )  # fmt: skip
            assert [part.strip() for part in seen["Sec-WebSocket-Protocol"].split(",")] == list(offered)
            assert not set(steering) & set(seen)
            await until(world.is_idle)
            assert "secret" not in json.dumps(await world.records())
    ours = [record for record in caplog.records if record.name.startswith(("gateway", "aiohttp"))]
    assert "secret" not in " ".join(record.getMessage() for record in ours)


@pytest.mark.parametrize("code", [1000, 1001, 1008, 1011, 3000, 4999])
async def test_close_codes_pass_both_ways(code: int) -> None:
    async def closes(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        await socket.close(code=code, message=b"because")

    async with upstream(closes) as a, World({"a": a.url}) as world:
        async with world.http.ws_connect(world.url + PATH) as socket:
            await socket.send_str("x")
            message = await socket.receive()
            assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, code, "because")
        a.script = waits
        async with world.http.ws_connect(world.url + PATH) as socket:
            await socket.close(code=code, message=b"bye")
        await until(lambda: len(a.codes) == 2)
        assert a.codes[1] == code
        await until(world.is_idle)
        assert [record.get("cut") for record in await world.records()] == [None, None]


async def test_a_client_that_vanishes_ends_the_workers_side_at_once() -> None:
    async with upstream(waits) as a, World({"a": a.url}) as world:
        async with aiohttp.ClientSession() as client:
            socket = await client.ws_connect(world.url + PATH)
            socket._response.connection.transport.abort()  # type: ignore[union-attr]
            await until(lambda: len(a.codes) == 1, within_s=20)
        await until(world.is_idle)
        assert (await world.records())[0]["cut"] == "client_left"
        assert world.value("warmroute_answers_cut_total", reason="client_left") == 1


async def test_a_worker_that_breaks_off_is_told_as_a_restart_and_held_against_it() -> None:
    async def breaks(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        socket._req.transport.abort()  # type: ignore[union-attr]

    async with upstream(breaks) as a, World({"a": a.url}) as world:
        for _ in range(2):
            async with world.http.ws_connect(world.url + PATH) as socket:
                await socket.send_str("x")
                assert await closed(socket, within_s=20) == 1012
            await until(world.is_idle)
        assert {record["cut"] for record in await world.records()} == {"upstream_broke"}
        assert len(world.health._workers["a"].faults) == 2


async def test_messages_that_are_too_large_end_it_with_1009() -> None:
    async def shouts(socket: web.WebSocketResponse) -> None:
        if (await socket.receive()).data == "shout":
            await socket.send_bytes(b"x" * 70_000)
            await socket.receive()

    async with upstream(shouts) as a, World({"a": a.url}, max_body_bytes=1 << 16) as world:
        async with world.http.ws_connect(world.url + PATH) as socket:
            await socket.send_bytes(b"x" * 70_000)
            assert await closed(socket) == 1009
        async with world.http.ws_connect(world.url + PATH) as socket:
            await socket.send_str("shout")
            assert await closed(socket) == 1009
        await until(world.is_idle)
        assert [record["cut"] for record in await world.records()] == ["too_large", "too_large"]


async def test_a_client_that_takes_nothing_holds_up_its_worker_and_nobodys_memory() -> None:
    sent = 0

    async def pours(socket: web.WebSocketResponse) -> None:
        nonlocal sent
        await socket.receive()
        for _ in range(2000):
            await socket.send_bytes(b"x" * 65_536)
            sent += 1

    async with upstream(pours) as a, World({"a": a.url}) as world:
        async with world.http.ws_connect(world.url + PATH, max_msg_size=0) as socket:
            socket._response.connection.transport.pause_reading()  # type: ignore[union-attr]
            await socket.send_str("go")
            before = -1
            while sent != before or not sent:  # Until it stands still.
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 1000  # What sockets hold, not 128 MB.
            socket._response.connection.transport.resume_reading()  # type: ignore[union-attr]
            for _ in range(100):
                assert len((await socket.receive()).data) == 65_536
        await until(world.is_idle)


# ---- workers and gateways that leave ---------------------------------------------------------------------------------


async def test_an_idle_session_is_no_silence_of_a_worker() -> None:
    async with upstream(waits) as a, upstream(waits) as b, World({"a": a.url, "b": b.url}) as world:
        async with world.http.ws_connect(world.url + PATH):
            assert not any(world.health.state(name).in_flight for name in ("a", "b"))
            assert sum(world.load().values()) == 1
            assert sum(load.streams for worker in world.fleet.workers.values() for load in worker.loads.values()) == 1
        await until(world.is_idle)
        assert not world.planner.calibration.factors()


async def test_a_worker_taken_out_or_leaving_closes_its_sessions_for_a_new_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.proxy.realtime.session._LOOK_S", 0.02)
    monkeypatch.setattr("gateway.proxy.realtime.session._LEAVING_S", 0.2)
    async with upstream(waits) as a, World({"a": a.url}) as world:

        def eject() -> None:
            world.health._eject(world.health._workers["a"], "a test says so", None, 0.0)

        def drain() -> None:
            world.fleet.apply(WorkerChange(kind=ChangeKind.DRAINING, worker="a"))

        def remove() -> None:
            world.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker="a"))

        for leave in (drain, eject, remove):
            async with world.http.ws_connect(world.url + PATH) as socket:
                leave()
                assert await closed(socket) == 1012
            await until(lambda: world.plane.in_flight == 0)
            world.add("a", a.url)
            world.health.restarted("a", 0.0)
        assert a.codes == [1012, 1012, 1012]


async def test_a_gateway_that_drains_says_it_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.proxy.realtime.session._LOOK_S", 0.02)
    async with upstream(waits) as a, World({"a": a.url}) as world:
        world.add("b", a.url, model="other")
        placed = await world.http.ws_connect(world.url + PATH + "?model=m")
        choosing = await world.http.ws_connect(world.url + PATH)
        await said(choosing)
        assert await world.plane.drain(5.0) == 0
        assert (await closed(placed), await closed(choosing)) == (1001, 1001)
        assert await refused(world, PATH + "?model=m") == 503


async def test_the_longest_life_of_a_request_is_a_sessions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.proxy.realtime.session._LOOK_S", 0.02)
    async with upstream(waits) as a, World({"a": a.url}, request_timeout_s=0.3) as world:
        async with world.http.ws_connect(world.url + PATH) as socket:
            assert await closed(socket) == 1001
        await until(world.is_idle)
        assert (await world.records())[0]["cut"] == "timeout"


async def test_a_rank_is_told_to_a_worker_that_has_several() -> None:
    async with upstream(echoes) as a, World({"a": a.url}, ranks=2) as world:
        sockets = [await world.http.ws_connect(world.url + PATH) for _ in range(2)]
        assert sorted(request.headers["X-data-parallel-rank"] for request in a.requests) == ["0", "1"]
        await asyncio.gather(*(socket.close() for socket in sockets))
        await until(world.is_idle)


async def test_a_sidecar_passes_a_session_to_the_engine_of_its_port() -> None:
    async with Pod(ranks=2) as pod:
        for rank in (0, 1):
            async with pod.http.ws_connect(pod.url(rank) + PATH) as socket:
                assert (await said(socket))["type"] == "session.created"
                assert [len(server.sessions) for server in pod.engines] == [1 - rank, rank]
                assert await transcribe(socket)


async def test_the_identity_is_the_gateways_business() -> None:
    settings = TenancyConfig(header="x-tenant", required=True)
    async with Fleet(tenancy=settings, a=engine()) as fleet:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await fleet.http.ws_connect(fleet.url + PATH)
        assert refused.value.status == 401
        async with fleet.http.ws_connect(fleet.url + PATH, headers={"X-Tenant": "acme"}) as socket:
            assert (await said(socket))["type"] == "session.created"
            (session,) = fleet.engines["a"].sessions
            assert "X-Tenant" not in session.request.headers


async def test_no_session_where_every_prompt_must_have_its_tenants_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_SALT_SECRET", "a secret of the tests")
    async with Fleet(tenancy=TenancyConfig(header="x-tenant", salt="derive"), a=engine()) as fleet:
        async with fleet.http.get(
            fleet.url + PATH,
            headers={
                "X-Tenant": "acme",
                "Upgrade": "websocket",
                "Connection": "Upgrade",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            },
        ) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == "not_salted"
        assert sessions(fleet) == {"a": 0}


@pytest.mark.parametrize("version", ["8", "7", "12", "", "13, 8", "0x0d"])
async def test_only_version_13_is_spoken(fleet: Fleet, version: str) -> None:
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": version}
    headers["Sec-WebSocket-Key"] = base64.b64encode(b"k" * 16).decode()
    async with fleet.http.get(f"{fleet.url}{PATH}?model=tiny", headers=headers) as response:
        assert (response.status, response.headers["Sec-WebSocket-Version"]) == (426, "13")


@pytest.mark.parametrize("pipelined", [True, False])
async def test_a_frame_that_is_not_masked_ends_the_session_and_reaches_nobody(fleet: Fleet, pipelined: bool) -> None:
    url = URL(fleet.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    rows = [
        f"GET {PATH}?model=tiny HTTP/1.1", f"Host: {url.host}", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]  # fmt: skip
    text = json.dumps(UPDATE).encode()
    frame = bytes([0x81, len(text)]) + text
    writer.write("\r\n".join(rows).encode() + b"\r\n\r\n" + (frame if pipelined else b""))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    if not pipelined:
        writer.write(frame)
    told = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert told.endswith(b"\x88\x02" + (1002).to_bytes(2, "big")) or b"\x03\xea" in told  # A close of ours.
    await until(lambda: not booked(fleet) and not fleet.gateway.plane.in_flight)
    assert all(session.model is None for server in fleet.engines.values() for session in server.sessions)


async def test_a_worker_that_sends_us_elsewhere_is_not_followed() -> None:
    async def never(call: Call) -> None:
        await call.ok()

    async with Stub(never) as elsewhere:

        async def redirects(call: Call) -> None:
            await call.ok(b"", f"Location: {elsewhere.url}/latest/meta-data", status="302 Found")

        async with Stub(redirects) as stub, World({"a": stub.url}) as world:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await world.http.ws_connect(f"{world.url}{PATH}?model=m", headers={"Authorization": "Bearer x"})
            assert refused.value.status == 502
            assert elsewhere.calls == []
            await until(world.is_idle)
