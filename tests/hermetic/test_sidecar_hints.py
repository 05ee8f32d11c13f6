"""Control headers through a running sidecar (and gateway): what is obeyed, what is refused, what never goes on."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig, Worker
from gateway.run import Gateway
from gateway.sidecar.hints import PREFILLER
from scorer.types import Role
from tests.support.gateway_world import Fleet, engine, until
from tests.support.sidecar_world import Pod

LONG = "the quick brown fox jumps over the lazy dog " * 20
STEERING = [
    (PREFILLER, ""),
    ("x-encoder-hosts-ports", "e:1"),
    ("x-kv-cache-source-host-port", "k:1"),
    ("x-warmroute-plan", "v1;id=a;choice=local"),
    ("x-warmroute-outcome", "forged"),
    ("x-bypass-remote-prefill", "1"),
    ("x-data-parallel-rank", "0"),
]


def address(server: FakeVllm) -> str:
    return server.url.removeprefix("http://")


async def test_control_headers_are_read_and_do_not_go_on() -> None:
    async with Pod() as pod:
        local = ("x-data-parallel-host-port", f"127.0.0.1:{pod.sidecar.port}")
        ids = [("X-Request-Id", "one"), ("X-Request-Id", "two")]
        status, _, headers = await pod.complete(*STEERING, local, *ids, ("X-Kept", "1"))
        assert (status, headers["X-Request-Id"]) == (200, "one")
        (seen,) = pod.engines[0].requests
        assert {name.lower() for name in seen.headers} & {name for name, _ in [*STEERING, local]} == set()
        assert [value for name, value in seen.headers.items() if name.lower() == "x-request-id"] == ["one"]
        assert seen.headers["X-Kept"] == "1"


async def test_o5_refused_targets_never_reach_any_server() -> None:
    """O5: denied 403, malformed 400, both as OpenAI errors, before anything is computed."""
    async with FakeVllm(engine()) as other, Pod() as pod:
        for value, status, code in (
            (address(other), 403, "prefill_target_denied"),
            (f"{address(other)}, evil.example:80", 403, "prefill_target_denied"),
            ("http://" + address(other), 400, "invalid_header"),
            ("nonsense", 400, "invalid_header"),
        ):
            got, answer, headers = await pod.complete((PREFILLER, value), ("X-Request-Id", "r"))
            assert (got, answer["error"]["code"], headers["X-Request-Id"]) == (status, code, "r")
            assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert (list(other.requests), list(pod.engines[0].requests)) == ([], [])
        assert list(pod.core.fleet.workers) == pod.sidecar.pod.names
        assert pod.value("warmroute_hints_total", header=PREFILLER, outcome="denied") == 3


async def test_an_allowed_target_joins_the_fleet_as_a_prefill_worker() -> None:
    async with FakeVllm(engine(kv_connector=True)) as prefill:
        pd = PdConfig(allow=("127.0.0.0/8:*",))
        async with Pod(engine(kv_connector=True), pd=pd) as pod:
            await until(lambda: all(w.stats is not None for w in pod.core.fleet.workers.values()))
            status, _, headers = await pod.complete((PREFILLER, address(prefill)), prompt=LONG)
            assert (status, headers["x-warmroute-outcome"].split(";")[1:4]) == (
                200,
                ["choice=remote", "reason=hint", f"prefiller={address(prefill)}"],
            )
            assert ([seen.leg for seen in prefill.requests], [seen.leg for seen in pod.engines[0].requests]) == (
                ["prefill"],
                ["decode"],
            )
            worker = pod.core.fleet.workers[address(prefill)]
            assert (worker.role, worker.url, worker.labels) == (Role.PREFILL, prefill.url, {"origin": "hint"})
            await until(lambda: address(prefill) in pod.core.capabilities)
            status, answer, _ = await pod.ask("GET", "/readyz?verbose")
            assert (status, answer["usable_workers"]) == (200, 1)


async def test_known_prefill_workers_need_no_entry_and_others_decode_nothing() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeVllm(engine())) for _ in range(3)]
        roles = ("prefill", "both", "decode")
        workers = tuple(Worker(url=s.url, role=role) for s, role in zip(servers, roles, strict=True))  # type: ignore[arg-type]
        pod = await stack.enter_async_context(Pod(workers=workers))
        names = [address(server) for server in servers]
        await until(lambda: set(pod.core.capabilities) == {*pod.sidecar.pod.names, *names[:2]})
        fleet = pod.core.fleet.workers
        assert {name: fleet[name].role for name in names[:2]} == dict.fromkeys(names[:2], Role.PREFILL)
        assert (await pod.complete((PREFILLER, f"{names[0]},{names[1]}")))[0] == 200
        assert (await pod.complete((PREFILLER, names[2])))[0] == 403
        for i in range(6):
            assert (await pod.complete(prompt=f"{i}"))[2]["x-warmroute-worker"] == pod.sidecar.pod.names[0]


async def test_ranks_behind_one_pod() -> None:
    """llm-d's --data-parallel-size: port + r leads to the engine on its port + r, unless a header says otherwise."""
    async with Pod(ranks=2) as pod:
        names = pod.sidecar.pod.names
        assert len(set(pod.sidecar.ports)) == 2

        async def went_to(*headers: tuple[str, str], rank: int = 0) -> str:
            status, answer, got = await pod.complete(*headers, rank=rank)
            assert status == 200, answer
            return str(got["x-warmroute-worker"])

        assert [await went_to(rank=rank) for rank in (0, 1)] == names
        assert [await went_to(("x-data-parallel-rank", str(rank)), rank=0) for rank in (0, 1)] == names
        by_endpoint = [("x-data-parallel-host-port", f"127.0.0.1:{port}") for port in pod.sidecar.ports]
        assert [await went_to(header, rank=1) for header in by_endpoint] == names
        assert (await pod.complete(("x-data-parallel-rank", "2")))[0] == 400
        assert (await pod.complete(("x-data-parallel-host-port", "127.0.0.1:1")))[0] == 400
        assert [len(fake.requests) for fake in pod.engines] == [3, 3]
        pod.engines[1].kill_engine()
        assert [(await pod.ask("GET", "/health", rank=rank))[0] for rank in (0, 1)] == [200, 503]


async def test_a_rank_of_an_engine_with_several_is_passed_to_it() -> None:
    async with Pod(engine(data_parallel_size=2)) as pod:
        await until(lambda: len(pod.core.fleet.workers[pod.sidecar.pod.names[0]].loads) == 2)
        for rank in ("1", "0", "1"):
            assert (await pod.complete(("x-data-parallel-rank", rank)))[0] == 200
        assert [seen.headers["x-data-parallel-rank"] for seen in pod.engines[0].requests] == ["1", "0", "1"]
        assert (await pod.complete(("x-data-parallel-rank", "2")))[0] == 400


@pytest.mark.parametrize(
    ("pd", "reason"),
    [
        (PdConfig(), "no_hint"),
        (PdConfig(policy="header"), "no_hint"),
        (PdConfig(policy="always-remote", no_hint="local"), "no_hint"),
        (PdConfig(policy="local"), "policy"),
        (PdConfig(policy="threshold:100000"), "threshold"),
    ],
)
async def test_a_request_without_a_hint(pd: PdConfig, reason: str) -> None:
    async with FakeVllm(engine(kv_connector=True)) as prefill:
        workers = (Worker(url=prefill.url, role="prefill"),)
        async with Pod(engine(kv_connector=True), pd=pd, workers=workers) as pod:
            await until(lambda: all(w.stats is not None for w in pod.core.fleet.workers.values()))
            await until(lambda: len(pod.core.capabilities) == 2)
            assert (await pod.complete(prompt=LONG))[0] == 200
            assert pod.value("warmroute_pd_decisions_total", choice="local", reason=reason) == 1
            assert list(prefill.requests) == []


async def test_a_plan_for_local_is_carried_out() -> None:
    async with FakeVllm(engine(kv_connector=True)) as prefill:
        workers, pd = (Worker(url=prefill.url, role="prefill"),), PdConfig(policy="always-remote")
        async with Pod(engine(kv_connector=True), pd=pd, workers=workers) as pod:
            await until(lambda: all(w.stats is not None for w in pod.core.fleet.workers.values()))
            plan = ("x-warmroute-plan", "v1;id=abc;choice=local;n=180;hd=0;hp=0")
            status, _, headers = await pod.complete(plan, prompt=LONG)
            assert (status, headers["x-warmroute-outcome"].split(";")[:3]) == (
                200,
                ["id=abc", "choice=local", "reason=plan"],
            )
            assert list(prefill.requests) == []


async def test_a_gateway_obeys_no_client() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        for value in ("evil.example:80", "nonsense", fleet.engines["b"].url.removeprefix("http://")):
            headers = {PREFILLER: value, "x-warmroute-plan": "v1;id=a;choice=local", "x-data-parallel-rank": "7"}
            body = {"model": "tiny", "prompt": LONG, "max_tokens": 2}
            async with fleet.http.post(fleet.url + "/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
        seen = [request for server in fleet.engines.values() for request in server.requests]
        assert len(seen) == 3
        assert not any(name.lower().startswith(("x-pre", "x-warm", "x-data")) for each in seen for name in each.headers)
        assert set(fleet.core.fleet.workers) == {"a", "b"}


async def test_a_gateway_with_the_header_policy_does() -> None:
    async with FakeVllm(engine()) as decode, FakeVllm(engine()) as prefill, Fleet(a=engine()) as fleet:
        config = fleet.gateway.config
        workers: Sequence[Worker] = (Worker(url=decode.url, role="decode"), Worker(url=prefill.url, role="prefill"))
        config = msgspec.structs.replace(config, workers=tuple(workers), pd=PdConfig(policy="header"))
        async with Gateway(config) as gateway:
            await until(lambda: len(gateway.core.capabilities) == 2)
            assert gateway.core.config.pd.policy == "header"
            for value, status in ((address(prefill), 200), ("evil.example:80", 403), ("nonsense", 400)):
                body = {"model": "tiny", "prompt": LONG, "max_tokens": 2}
                url = f"http://127.0.0.1:{gateway.port}/v1/completions"
                async with fleet.http.post(url, json=body, headers={PREFILLER: value}) as answer:
                    assert answer.status == status, await answer.text()
