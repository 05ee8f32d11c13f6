"""The sidecar's face: inference, everything else, health, what it says when the engine is not there, and leaving."""

import asyncio
import json
import signal
from typing import Any

import msgspec
import pytest

from bench.engine.server import FakeVllm
from gateway.config import Config
from gateway.config.schema import Worker
from gateway.sidecar.run import Sidecar
from tests.support.command import Command
from tests.support.gateway_world import engine, until
from tests.support.proxy_world import Call, Stub
from tests.support.sidecar_world import Pod, free_port, sidecar_config


async def test_inference_goes_to_the_engine_and_comes_back_as_it_is() -> None:
    async with Pod() as pod:
        body = {"model": "tiny", "prompt": "abc def", "max_tokens": 4, "seed": 1}
        status, answer, headers = await pod.ask("POST", "/v1/completions", json=body)
        async with pod.http.post(pod.engines[0].url + "/v1/completions", json=body) as direct:
            text = (await direct.json())["choices"][0]["text"]
        assert (status, answer["choices"][0]["text"]) == (200, text)
        assert headers["x-warmroute-worker"] == pod.sidecar.pod.names[0]
        assert "x-warmroute-outcome" in headers
        status, _, _ = await pod.ask("POST", "/v1/chat/completions", json={"model": "no", "messages": []})
        assert status == 404


async def test_everything_else_is_the_engines_page() -> None:
    async with Pod() as pod:
        for path in ("/v1/models", "/v1/models/tiny", "/version", "/kv_event_sources", "/no/such"):
            async with pod.http.get(pod.engines[0].url + path) as direct:
                assert (await pod.ask("GET", path))[:2] == (direct.status, await _told(direct)), path
        status, text, headers = await pod.ask("GET", "/metrics")
        assert (status, headers["Content-Type"][:10]) == (200, "text/plain")
        assert "vllm:num_requests_running" in text
        assert "warmroute_" not in text
        async with pod.http.get(pod.admin + "/metrics") as own:
            assert "warmroute_requests_in_flight" in await own.text()


async def test_any_method_query_headers_and_body_pass() -> None:
    async def script(call: Call) -> None:
        if call.line.startswith("HEAD"):
            return await call.send(b"HTTP/1.1 418 Teapot\r\nContent-Length: 4\r\n\r\n")
        await call.ok(b"seen", "X-Own: 1", "Connection: keep-alive", status="418 Teapot")

    async with Stub(script) as stub, Pod(engine_url=stub.url) as pod:
        mine = {"X-Mine": "1", "x-prefiller-host-port": "evil:1"}
        status, text, headers = await pod.ask("PATCH", "/any%2Fpath?a=1&a=%20", data=b"\x00raw", headers=mine)
        assert (status, text, headers["X-Own"]) == (418, "seen", "1")
        (call,) = [call for call in stub.calls if "any" in call.line]
        assert (call.line, call.body) == ("PATCH /any%2Fpath?a=1&a=%20 HTTP/1.1", b"\x00raw")
        assert call.header("X-Mine") == "1"
        assert call.header("x-prefiller-host-port") is None
        status, text, headers = await pod.ask("HEAD", "/head")
        assert (status, text, headers["Content-Length"]) == (418, "", "4")


async def test_a_page_is_streamed() -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        if "/slow" not in call.line:
            return await call.ok(b"", status="404 Not Found")
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await go_on.wait()
        await call.chunk(b"data: 2\n\n")
        await call.end_stream()

    async with Stub(script) as stub, Pod(engine_url=stub.url) as pod, pod.http.get(pod.url() + "/slow") as answer:
        assert await answer.content.readany() == b"data: 1\n\n"
        go_on.set()
        assert await answer.content.read() == b"data: 2\n\n"


async def test_no_path_takes_a_clients_transfer_parameters_to_the_engine() -> None:
    """{"do_remote_prefill": true} kills an engine, and /invocations takes every API's body."""

    async def script(call: Call) -> None:
        await call.ok(b"{}")

    body = {"model": "m", "prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}
    async with Stub(script) as stub, Pod(engine_url=stub.url) as pod:
        assert (await pod.ask("POST", "/invocations", json=body))[0] == 200
        (call,) = [call for call in stub.calls if "invocations" in call.line]
        assert json.loads(call.body) == {"model": "m", "prompt": "x"}


async def test_a_half_page_does_not_look_whole() -> None:
    async def script(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        call.reset()

    async with Stub(script) as stub, Pod(engine_url=stub.url) as pod:
        reader, writer = await asyncio.open_connection("127.0.0.1", pod.sidecar.port)
        writer.write(b"GET /cut HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        try:
            while piece := await asyncio.wait_for(reader.read(1024), 60):
                got += piece
        except ConnectionError:
            pass
        assert not got.endswith(b"0\r\n\r\n")
        writer.close()


async def test_health_is_the_engines() -> None:
    async with Pod() as pod:
        (fake,) = pod.engines
        assert (await pod.ask("GET", "/health"))[0] == 200
        assert (await pod.ask("POST", "/health"))[0] == 405
        fake.faults.paths = ("/",)
        fake.faults.stall = True
        fake.apply_faults()
        status, answer, _ = await pod.ask("GET", "/health")
        assert (status, answer["error"]["code"]) == (503, "engine_unhealthy")
        fake.faults.stall = False
        fake.apply_faults()
        assert (await pod.ask("GET", "/health"))[0] == 200
        fake.kill_engine()
        status, answer, _ = await pod.ask("GET", "/health")
        assert status == 503
        assert "503" in answer["error"]["message"]


async def test_readyz_and_livez_are_ours_unless_the_engine_has_them() -> None:
    async with Pod() as pod:
        assert (await pod.ask("GET", "/readyz"))[:2] == (200, {"ready": True, "draining": False, "usable_workers": 1})
        assert (await pod.ask("GET", "/livez"))[:2] == (200, {"status": "ok"})
        await pod.engines[0].stop()
        assert (await pod.ask("GET", "/livez"))[0] == 200
        await until(lambda: not pod.core.is_well(pod.sidecar.pod.names[0]))
        assert (await pod.ask("GET", "/readyz"))[0] == 503

    async def script(call: Call) -> None:
        await call.ok(b'{"mine":true}')

    async with Stub(script) as stub, Pod(engine_url=stub.url) as pod:
        assert (await pod.ask("GET", "/readyz"))[:2] == (200, {"mine": True})


async def test_llm_d_d5_55_engine_that_refuses_is_503() -> None:
    """Before it was ever up, after it went, and on every kind of path."""
    async with Pod(engine_url=f"http://127.0.0.1:{free_port()}") as pod:
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/health"), ("GET", "/readyz")):
            status, answer, _ = await pod.ask(method, path)
            assert status == 503, path
            assert path == "/readyz" or answer["error"]["type"] == "service_unavailable_error"
        assert (await pod.complete())[0] == 503
    async with Pod() as pod:
        assert (await pod.complete())[0] == 200
        await pod.engines[0].stop()
        for status, answer, _ in (await pod.complete(), await pod.ask("GET", "/v1/models")):
            assert (status, set(answer["error"])) == (503, {"message", "type", "param", "code"})


async def test_engine_that_breaks_is_502() -> None:
    async def script(call: Call) -> None:
        call.reset()

    async with Stub(script) as stub, Pod(engine_url=stub.url) as pod:
        status, answer, _ = await pod.ask("POST", "/pause")
        assert (status, answer["error"]["code"]) == (502, "engine_unreachable")


async def test_o8_the_debug_pages_are_on_the_admin_port_alone() -> None:
    """O8: pages that tell of others' prompts are an oracle; the main port has none, and the admin port is loopback."""
    async with Pod() as pod:
        for path in ("/debug/cache", "/debug/config", "/debug/explain"):
            assert (await pod.ask("GET", path))[0] == 404
        async with pod.http.get(pod.admin + "/debug/cache") as answer:
            assert answer.status == 200
    assert Config().sidecar.admin_host == "127.0.0.1"


async def test_controls_through_the_main_port_are_known_at_once() -> None:
    async with Pod() as pod:
        name = pod.sidecar.pod.names[0]
        await pod.complete(prompt="the quick brown fox jumps over the lazy dog " * 100)
        await until(lambda: _held(pod))
        assert (await pod.ask("POST", "/reset_prefix_cache"))[0] == 200
        assert _held(pod) == 0
        lora = {"lora_name": "l9", "lora_path": "/adapters/l9"}
        assert (await pod.ask("POST", "/v1/load_lora_adapter", json=lora))[0] == 200
        await until(lambda: "l9" in pod.core.fleet.workers[name].adapters)
        assert (await pod.complete(model="l9"))[0] == 200
        assert (await pod.ask("GET", "/reset_prefix_cache"))[0] == 405


async def test_admin_controls_reach_the_pods_own_engines_only() -> None:
    async with FakeVllm(engine()) as prefill, Pod(workers=(Worker(url=prefill.url, role="prefill"),)) as pod:
        await until(lambda: len(pod.core.capabilities) == 2)
        async with pod.http.post(pod.admin + "/sleep?level=1") as answer:
            assert list((await answer.json())["results"]) == pod.sidecar.pod.names
        assert (pod.engines[0].sleep_level, prefill.sleep_level) == (1, None)


async def test_drain_lets_what_runs_end() -> None:
    async with FakeVllm(engine()) as fake, Command("sidecar", "--engine", fake.url) as sidecar:
        fake.faults.headers_delay_s = 1.0
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3}
        running = asyncio.create_task(_post(sidecar.http, sidecar.url + "/v1/completions", body))
        await until(lambda: fake.requests)
        sidecar.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running, 60) == 200
        assert f"serving on {sidecar.url}" in await sidecar.stopped()


async def test_a_taken_port_leaves_nothing_open() -> None:
    async with Pod() as pod:
        config = sidecar_config(pod.engines[0].url)
        taken = msgspec.structs.replace(config.sidecar, port=pod.sidecar.port)
        with pytest.raises(OSError, match="in use"):
            async with Sidecar(msgspec.structs.replace(config, sidecar=taken)):
                pass
        assert (await pod.complete())[0] == 200


def _held(pod: Pod) -> int:
    ranks = pod.core.index.stats()["workers"].get(pod.sidecar.pod.names[0], {})
    return sum(sum(rank["blocks"].values()) for rank in ranks.values())


async def _told(response: Any) -> Any:
    text = await response.text()
    return json.loads(text) if text.startswith(("{", "[")) else text


async def _post(http: Any, url: str, body: Any) -> int:
    async with http.post(url, json=body) as answer:
        await answer.read()
        return int(answer.status)
