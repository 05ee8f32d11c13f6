"""Spans as a collector receives them over OTLP/HTTP, and the context that engines get."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig, TracingConfig
from tests.support.command import Command
from tests.support.envoy import connection_manager, envoy_binary
from tests.support.epp_fleet import EppFleet
from tests.support.fleets import prompt
from tests.support.gateway_world import Fleet, decode, engine, prefill, until
from tests.support.sidecar_world import free_port
from tests.support.traced import CLIENT_SPAN, CLIENT_TRACE, SAMPLED, Collector, Seen, collector, named, tree

pytestmark = pytest.mark.hermetic
ON = TracingConfig(enabled=True)
COMPLETIONS = "POST /v1/completions"
LONG = prompt(3000)
needs_envoy = pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine")


@pytest.fixture
def otlp(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port to which spans go."""
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    return port


def traceparent(server: FakeVllm) -> str:
    return server.requests[-1].headers["traceparent"]


def of(spans: list[Seen], service: str) -> list[Seen]:
    return [span for span in spans if span.service == service]


async def test_spans_arrive_and_the_engine_is_a_child(otlp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "the-front-door")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    async with collector(otlp) as at, Fleet(tracing=ON, a=engine()) as fleet:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "stream": True}
        async with fleet.http.post(
            fleet.url + "/v1/completions", json=body, headers={"traceparent": SAMPLED, "tracestate": "v=1"}
        ) as answer:
            assert answer.status == 200
            await answer.read()
        spans = await at.until(lambda spans: any(span.kind == "SERVER" for span in spans))
        seen = fleet.engines["a"].requests[-1].headers
    assert at.paths == {"/v1/traces"}
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "decide", "decode"]
    root, leg = named(spans, COMPLETIONS), named(spans, "decode")
    assert (root.trace, root.parent, root.service) == (CLIENT_TRACE, CLIENT_SPAN, "the-front-door")
    assert leg.gave(seen["traceparent"])
    assert seen["tracestate"] == "v=1"
    assert [name for name, _ in leg.events] == ["first_token"]


async def test_a_handoff_is_two_legs_of_one_trace(otlp: int) -> None:
    pd = PdConfig(policy="always-remote")
    async with collector(otlp) as at, Fleet(tracing=ON, pd=pd, p=prefill(), d=decode()) as fleet:
        await fleet.complete(LONG)
        spans = await at.until(lambda spans: any(span.kind == "SERVER" for span in spans))
        assert named(spans, "prefill").gave(traceparent(fleet.engines["p"]))
        assert named(spans, "decode").gave(traceparent(fleet.engines["d"]))
    assert tree(spans) == [COMPLETIONS, "read_body", "tokenise", "decide", "prefill", "decode"]


async def test_a_websocket_has_a_span_for_its_life_and_one_for_its_beginning(otlp: int) -> None:
    async with collector(otlp) as at, Fleet(tracing=ON, a=engine()) as fleet:
        headers = {"traceparent": SAMPLED}
        async with fleet.http.ws_connect(fleet.url + "/v1/realtime?model=tiny", headers=headers) as socket:
            await socket.receive()
        spans = await at.until(lambda spans: any(span.kind == "SERVER" for span in spans))
    root = named(spans, "GET /v1/realtime")
    assert tree(spans) == ["GET /v1/realtime", "forward"]
    assert (root.trace, root.attributes["http.response.status_code"]) == (CLIENT_TRACE, 101)
    assert named(spans, "forward").attributes["http.response.status_code"] == 101


async def test_a_collector_that_is_down_is_told_and_harms_nobody(otlp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with Fleet(tracing=ON, a=engine()) as fleet:
        for _ in range(3):
            await fleet.complete("hello")

        async def lost() -> list[str]:
            _, body = await fleet.get(fleet.admin + "/readyz?verbose")
            return [each["detail"] for each in body["degraded"] if each["what"] == "traces_lost"]

        await until(lambda: fleet.gateway.tracing and fleet.gateway.tracing.problem)
        assert await lost()
        _, metrics = await fleet.get(fleet.admin + "/metrics")
        assert 'warmroute_degraded{what="traces_lost"} 1.0' in metrics
        async with collector(otlp):
            await fleet.complete("hello")
            await until(lambda: fleet.gateway.tracing and not fleet.gateway.tracing.problem)
            assert await lost() == []
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 6


@needs_envoy
async def test_picker_and_sidecar_join_a_clients_trace(otlp: int, tmp_path: Path) -> None:
    """client > picker > sidecar > engines, with an Envoy between that does not trace."""
    pd = PdConfig(policy="always-remote")
    async with (
        collector(otlp) as at,
        EppFleet(tmp_path, sidecars=True, pd=pd, tracing=ON, p=prefill(), d=decode()) as fleet,
    ):
        await fleet.complete(LONG, headers={"traceparent": SAMPLED})
        spans = await at.until(lambda spans: sum(span.kind == "SERVER" for span in _of_the_client(spans)) == 2)
        prefilled, decoded = (traceparent(fleet.engines[name]) for name in "pd")
    picker, sidecar = (of(_of_the_client(spans), f"warmroute-{face}") for face in ("epp", "sidecar"))
    assert tree(picker) == [COMPLETIONS, "tokenise", "decide"]
    assert tree(sidecar) == [COMPLETIONS, "read_body", "tokenise", "decide", "prefill", "decode"]
    front = named(picker, COMPLETIONS)
    assert (front.trace, front.parent) == (CLIENT_TRACE, CLIENT_SPAN)
    assert named(sidecar, COMPLETIONS).parent == front.id
    assert named(sidecar, "prefill").gave(prefilled)
    assert named(sidecar, "decode").gave(decoded)
    assert front.attributes["http.response.status_code"] == 200
    assert front.attributes["gen_ai.usage.output_tokens"] == 2
    assert "url.scheme" not in front.attributes  # Of what the client spoke to Envoy.


@needs_envoy
@pytest.mark.parametrize("grpc", ["fast", "grpcio"])
async def test_a_trace_that_envoy_has_begun_is_one(otlp: int, tmp_path: Path, grpc: str) -> None:
    """Envoy tells the picker its context with the question, and the engine with the request: the engine is Envoy's
    child, beside the picker.
    """

    def traces(config: dict[str, Any]) -> None:
        http = {
            "http_uri": {"uri": f"http://127.0.0.1:{otlp}/v1/traces", "cluster": "collector", "timeout": "5s"},
        }
        connection_manager(config)["tracing"] = {
            "provider": {
                "name": "envoy.tracers.opentelemetry",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
                    "service_name": "envoy",
                    "http_service": http,
                },
            }
        }
        address = {"socket_address": {"address": "127.0.0.1", "port_value": otlp}}
        config["static_resources"]["clusters"].append(
            {
                "name": "collector",
                "type": "STATIC",
                "load_assignment": {
                    "cluster_name": "collector",
                    "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
                },
            }
        )

    async with (
        collector(otlp) as at,
        EppFleet(tmp_path, epp={"grpc": grpc}, tracing=ON, change=traces, a=engine()) as fleet,
    ):
        await fleet.complete("hello")
        spans = await _both(at)
        seen = traceparent(fleet.engines["a"])
    (front,) = (span for span in of(spans, "warmroute-epp") if span.kind == "SERVER")
    envoys = {span.id: span for span in of(spans, "envoy")}
    assert {span.trace for span in spans} == {front.trace}
    assert front.parent in envoys
    _, trace, parent, _ = seen.split("-")
    assert trace == front.trace
    assert parent in envoys


def _of_the_client(spans: list[Seen]) -> list[Seen]:
    """Not what the picker asks of engines itself."""
    return [span for span in spans if span.trace == CLIENT_TRACE]


async def _both(at: Collector) -> list[Seen]:
    def enough(spans: list[Seen]) -> bool:
        return bool(of(spans, "warmroute-epp")) and any(span.kind == "SERVER" for span in of(spans, "envoy"))

    return await at.until(enough)


async def test_the_command_sends_its_last_spans_when_it_is_told_to_stop(
    otlp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    async with collector(otlp) as at, FakeVllm(engine()) as worker:
        async with Command(
            "gateway", "--worker", worker.url, "--tracing-enabled", "--logging-format", "json"
        ) as gateway:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            async with gateway.http.post(gateway.url + "/v1/completions", json=body) as answer:
                assert answer.status == 200
            assert at.spans == []
            log = await gateway.terminate()
        root = named(at.spans, COMPLETIONS)
    lines = [json.loads(line) for line in log.splitlines()]
    assert root.trace in [line.get("trace_id") for line in lines]
