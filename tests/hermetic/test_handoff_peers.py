"""Prompts computed by a worker that decodes too, over HTTP: what it is asked, and that nobody depends on it."""

from typing import Any

import msgspec
import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig
from gateway.sidecar.hints import KV_SOURCE, Hints
from scorer.ledger import Booking
from scorer.types import Role
from tests.support.gateway_world import Fleet, engine, until
from tests.support.handoff_world import (
    BODIES,
    IDS,
    LONG,
    PREFILL_PARAMS,
    answers,
    ask,
    bodies,
    offers,
    refusing_releases,
    releases,
    resets,
    stages,
    world,
)
from tests.support.proxy_world import Script, Stub, World
from tests.support.sidecar_world import Pod, free_port

COMPLETION = {"model": "m", "prompt": IDS}
GOOD = {"choices": [{"index": 0, "text": "right", "finish_reason": "length"}]}
NIXL = {"kv_connector": True}
VERY_LONG = LONG * 16
"""Some 2300 tokens."""


def decoder() -> Stub:
    return Stub(refusing_releases(answers(GOOD)))


def named(it: World, source: str = "d2", **hints: Any) -> World:
    it.hints = Hints(kv_source=source, decode=frozenset({"d1"}), **hints)
    return it


# ---- named by somebody in front, scripted servers --------------------------------------------------------------------


async def test_the_source_gets_a_prefill_leg_and_the_decode_worker_its_params() -> None:
    async with Stub(offers()) as d2, decoder() as d1, world(PdConfig(policy="header"), d1=d1, d2=d2) as it:
        told = await ask(it.http, named(it).url, body=COMPLETION)
        assert (told.text, told.went, told.outcome["prefiller"]) == ("right", ("peer", "hint"), "d2")
        (first,), (second,) = bodies(d2), bodies(d1)
        assert (first["kv_transfer_params"], first["max_tokens"]) == (PREFILL_PARAMS, 1)
        assert second["kv_transfer_params"]["remote_engine_id"] == "engine-of-p1"
        assert it.planner.in_flight() == 0
        assert all(load.requests == 0 for worker in it.fleet.workers.values() for load in worker.loads.values())
        assert stages(it) == {("prefill", "ok"): 1, ("decode", "ok"): 1}
        assert it.metrics.registry.get_sample_value(
            "warmroute_pd_decisions_total", {"choice": "peer", "reason": "hint"}
        ) == 1  # fmt: skip


BAD_SOURCES: dict[str, tuple[Script | None, str]] = {
    "refused": (None, "prefill_failed"),
    "reset": (resets(), "prefill_failed"),
    "500": (answers(b"{}", "500 Internal Server Error"), "prefill_failed"),
    "404": (answers({"error": {"message": "no such model"}}, "404 Not Found"), "prefill_failed"),
    "401": (answers(b"", "401 Unauthorized"), "prefill_failed"),
    "not_json": (answers(b"<html>"), "prefill_failed"),
    "no_params": (answers({"usage": {"prompt_tokens": 64}}), "no_params"),
    "bad_params": (offers(remote_block_ids=[[1]]), "bad_params"),
}


@pytest.mark.parametrize("on_prefill_failure", ["next,local", "fail"])
@pytest.mark.parametrize("case", BAD_SOURCES)
async def test_a_source_that_does_not_do_costs_no_request(case: str, on_prefill_failure: Any) -> None:
    """Whatever `pd.on_prefill_failure` says of prefill workers: it was asked for nothing but speed."""
    script, reason = BAD_SOURCES[case]
    pd = PdConfig(policy="header", on_prefill_failure=on_prefill_failure)
    async with Stub(script or answers()) as d2, decoder() as d1, world(pd, d1=d1, d2=d2) as it:
        if script is None:
            it.upstreams.set("d2", f"http://127.0.0.1:{free_port()}")
        told = await ask(it.http, named(it).url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", reason))
        assert bodies(d1) == [COMPLETION]
        assert stages(it)["prefill", reason] == 1
        assert all(load.requests == 0 for worker in it.fleet.workers.values() for load in worker.loads.values())


async def test_what_is_wrong_with_a_request_the_decode_worker_says() -> None:
    no = answers({"error": {"message": "from the source"}}, "400 Bad Request")
    wrong = answers({"error": {"message": "from the decode worker"}}, "400 Bad Request")
    async with Stub(no) as d2, Stub(wrong) as d1, world(PdConfig(policy="header"), d1=d1, d2=d2) as it:
        told = await ask(it.http, named(it).url, body=COMPLETION)
        assert (told.status, "from the decode worker" in told.body) == (400, True)


async def test_blocks_that_cannot_be_fetched_are_given_back_and_computed_here() -> None:
    def broken(body: dict[str, Any]) -> bool:
        return "kv_transfer_params" in body

    async def script(call: Any) -> None:
        if broken(msgspec.json.decode(call.body)):
            await call.ok(b'{"error":{"type":"InternalServerError"}}', status="500 Internal Server Error")
        else:
            await call.ok(msgspec.json.encode(GOOD))

    async with (
        Stub(offers()) as d2,
        Stub(refusing_releases(script)) as d1,
        world(PdConfig(policy="header"), d1=d1, d2=d2) as it,
    ):
        told = await ask(it.http, named(it).url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", "kv_load_failed"))
        await until(lambda: len(releases(d1)) == 1)
        assert releases(d2) == [], "the source is not asked to fetch from itself"


async def test_a_source_that_is_none_is_named_in_the_outcome() -> None:
    async with decoder() as d1, world(PdConfig(policy="header"), d1=d1) as it:
        for source, reason in (("gone", "source_unusable"), ("d1", "no_hint")):
            told = await ask(it.http, named(it, source).url, body=COMPLETION)
            assert (told.text, told.went) == ("right", ("local", reason))


async def test_what_must_stay_local_stays() -> None:
    async with Stub(offers()) as d2, decoder() as d1, world(PdConfig(policy="header"), d1=d1, d2=d2) as it:
        told = await ask(it.http, named(it).url, body={**COMPLETION, "n": 2})
        assert told.went == ("local", "n_sequences")
        told = await ask(it.http, named(it, choice="local").url, body=COMPLETION)
        assert told.went == ("local", "plan")
        assert bodies(d2) == []


# ---- chosen by cost, with engines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_an_idle_worker_fetches_from_a_crowded_one_that_holds_the_prompt(path: str, stream: bool) -> None:
    field = next(name for name in ("prompt", "messages", "input") if name in BODIES[path])
    said: Any = [{"role": "user", "content": VERY_LONG}] if field == "messages" else VERY_LONG
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**BODIES[path], field: said, limit: 64, "stream": stream}
    if stream and "completions" in path:
        body["stream_options"] = {"include_usage": True}
    async with FakeVllm(engine()) as alone, Fleet(pd=PdConfig(policy="cost"), a=engine(**NIXL), b=engine(**NIXL)) as it:
        expected = (await ask(it.http, alone.url, path, body)).text
        first = await ask(it.http, it.url, path, body)
        assert (first.text, first.went[0]) == (expected, "local")
        prompt, _ = first.prompt_and_cached
        source = first.headers["x-warmroute-worker"]
        await until(lambda: it.core.index.resident_blocks((source, 0)) >= prompt // 16)
        _make_crowded(it, source)
        told = await ask(it.http, it.url, path, body)
        assert (told.text, told.went) == (expected, ("peer", "cost"))
        assert told.outcome["prefiller"] == source != told.headers["x-warmroute-worker"]
        assert told.prompt_and_cached == (prompt, (prompt - 1) // 16 * 16)
        (decode,) = set(it.engines) - {source}
        assert [seen.leg for seen in it.engines[decode].requests] == ["decode"]
        assert sum(side.transfers.bytes.total for side in it.engines[decode].nixl) > 0
        await until(lambda: it.engines[source].held_blocks == 0)
        assert it.core.planner.in_flight() == 0
        await until(lambda: it.core.index.resident_blocks((decode, 0)) >= prompt // 16)
        again = await ask(it.http, it.url, path, body)
        assert (again.went[0], again.headers["x-warmroute-worker"]) == ("local", decode)


def _make_crowded(fleet: Fleet, name: str) -> None:
    """Ten answers run there, and computing and decoding beside others take long."""
    cost = fleet.core.planner.cost
    cost.constants = msgspec.structs.replace(cost.constants, comp_per_token_s=1e-3, step_per_stream_s=1e-2)
    load = fleet.core.fleet.workers[name].loads[0]
    for _ in range(10):
        Booking(load, 0.0, 10, 0.0).first_token(0.0)


async def test_explain_shows_the_peers_way() -> None:
    async with Fleet(pd=PdConfig(policy="cost"), a=engine(**NIXL), b=engine(**NIXL)) as it:
        source, usage = await it.complete(VERY_LONG)
        await until(lambda: it.core.index.resident_blocks((source, 0)) >= usage["prompt_tokens"] // 16)
        _make_crowded(it, source)
        body = {"model": "tiny", "prompt": VERY_LONG, "max_tokens": 64}
        status, told, _ = await it.post(it.admin + "/debug/explain", body)
        assert (status, told["choice"], told["pd_reason"]) == (200, "peer", "cost")
        assert (told["considered"][0]["prefill"], told["considered"][0]["peer"]) == ([source, 0], True)


async def test_engines_without_a_connector_hand_nothing_over() -> None:
    async with Fleet(pd=PdConfig(policy="cost"), a=engine(), b=engine()) as it:
        source, usage = await it.complete(VERY_LONG)
        await until(lambda: it.core.index.resident_blocks((source, 0)) >= usage["prompt_tokens"] // 16)
        _make_crowded(it, source)
        told = await ask(it.http, it.url, body={"model": "tiny", "prompt": VERY_LONG, "max_tokens": 64})
        assert told.went == ("local", "no_prefill_worker")


async def test_engines_of_different_versions_hand_nothing_over() -> None:
    async with Fleet(pd=PdConfig(policy="cost"), a=engine(**NIXL), b=engine(**NIXL, version="0.31.0")) as it:
        await until(lambda: it.core.planner.pairs.incompatible(("a", "b")))
        source, usage = await it.complete(VERY_LONG)
        await until(lambda: it.core.index.resident_blocks((source, 0)) >= usage["prompt_tokens"] // 16)
        _make_crowded(it, source)
        told = await ask(it.http, it.url, body={"model": "tiny", "prompt": VERY_LONG, "max_tokens": 64})
        assert told.went[0] == "local"


# ---- in a pod --------------------------------------------------------------------------------------------------------

ALLOWED = PdConfig(allow=("127.0.0.0/8:*",))


def at(server: FakeVllm) -> str:
    return server.url.removeprefix("http://")


async def test_a_sidecar_fetches_from_the_pod_that_is_named() -> None:
    async with FakeVllm(engine(**NIXL)) as other, Pod(engine(**NIXL), pd=ALLOWED) as pod:
        body = {"model": "tiny", "prompt": VERY_LONG, "max_tokens": 6, "temperature": 0}
        expected = await ask(pod.http, other.url, body=body)
        told = await ask(pod.http, pod.url(), body=body, **{KV_SOURCE: at(other)})
        assert (told.text, told.went, told.outcome["prefiller"]) == (expected.text, ("peer", "hint"), at(other))
        prompt, cached = told.prompt_and_cached
        assert cached == (prompt - 1) // 16 * 16
        assert [seen.leg for seen in (*other.requests, *pod.engines[0].requests)][1:] == ["prefill", "decode"]
        worker = pod.core.fleet.workers[at(other)]
        assert (worker.role, worker.labels) == (Role.SOURCE, {"origin": "hint"})
        assert pod.value("warmroute_hints_total", header=KV_SOURCE, outcome="used") == 1
        assert pod.value("warmroute_pd_decisions_total", choice="peer", reason="hint") == 1
        await until(lambda: other.held_blocks == 0)
        # It decodes nothing here, and its being there does not make the pod ready.
        assert pod.core.up.decoders() == pod.sidecar.pod.names
        plain = await ask(pod.http, pod.url(), body={**body, "prompt": LONG})
        assert plain.went == ("local", "no_hint")


async def test_sources_that_may_not_be_named_or_are_none_leave_requests_alone() -> None:
    body = {"model": "tiny", "prompt": VERY_LONG, "max_tokens": 2}
    async with FakeVllm(engine()) as plain, FakeVllm(engine(**NIXL)) as other, Pod(engine(**NIXL)) as pod:
        for value in (at(other), "evil.example:80", "nonsense", f"127.0.0.1:{pod.sidecar.port}"):
            told = await ask(pod.http, pod.url(), body=body, **{KV_SOURCE: value})
            assert (told.status, told.went) == (200, ("local", "no_hint"))
        assert list(pod.core.fleet.workers) == pod.sidecar.pod.names
        assert len(other.requests) == 0
        async with Pod(engine(**NIXL), pd=ALLOWED) as open_pod:
            dead = f"127.0.0.1:{free_port()}"
            told = await ask(open_pod.http, open_pod.url(), body=body, **{KV_SOURCE: dead})
            assert (told.status, told.went[0]) == (200, "local")
            assert told.went[1] in ("prefill_failed", "source_unusable"), "asked, or known to be down by then"
            await ask(open_pod.http, open_pod.url(), body=body, **{KV_SOURCE: at(plain)})
            await until(lambda: open_pod.core.fleet.workers[at(plain)].stats is not None)
            n_asked = len(plain.requests)
            told = await ask(open_pod.http, open_pod.url(), body=body, **{KV_SOURCE: at(plain)})
            assert (told.status, told.went) == (200, ("local", "source_unusable"))
            assert len(plain.requests) == n_asked
