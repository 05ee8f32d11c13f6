"""Faults of disaggregated serving that users met in the field (docs/field-cases.md), one test each."""

import asyncio
import itertools
import json
import time
from typing import Any

import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig
from gateway.sidecar.hints import KV_SOURCE
from scorer.types import PdReason
from tests.support.fleets import D, P, fleet, prompt
from tests.support.gateway_world import Fleet, decode, engine, prefill, until
from tests.support.handoff_world import (
    BODIES,
    IDS,
    LONG,
    answers,
    ask,
    bodies,
    offers,
    refusing_releases,
    releases,
    streams,
    world,
)
from tests.support.proxy_world import Call, Stub
from tests.support.sidecar_world import Pod

REMOTE = PdConfig(policy="always-remote")
COMPLETION = {"model": "m", "prompt": IDS}
GOOD = {"choices": [{"index": 0, "text": "right", "finish_reason": "length"}]}
VERY_LONG = LONG * 16
"""Some 2300 tokens."""
RULE = PdConfig(policy="threshold:1024")

# ---- local or remote -------------------------------------------------------------------------------------------------


async def test_d2_a_tiny_cold_prompt_is_computed_where_it_is_answered() -> None:
    """D2: by a rule of 1024 tokens, 140 cold tokens stay, 2300 go; by cost too 140 stay."""
    async with Fleet(p1=prefill(), d1=decode()) as it:
        assert (await ask(it.http, it.url)).went == ("local", "cost")
    async with Fleet(pd=RULE, p1=prefill(), d1=decode()) as it:
        assert (await ask(it.http, it.url)).went == ("local", "threshold")
        assert len(it.engines["p1"].requests) == 0
        body = {"model": "tiny", "prompt": VERY_LONG, "max_tokens": 2}
        assert (await ask(it.http, it.url, body=body)).went == ("remote", "threshold")


def test_d3_an_unreadable_cache_counts_as_cold_and_0_turns_the_rule_off() -> None:
    """D3: nothing is known of the decode worker's cache. That is no error: the prompt counts as uncached, so its length
    decides; with threshold 0 it never goes.
    """
    for threshold, remote in (("1024", True), ("4096", False), ("0", False)):
        rig = fleet(D("d", events=False, scraped=True), P("p"), pd_policy=f"threshold:{threshold}")
        plan = rig.route(prompt(2000))
        assert (plan.chosen.cached_tokens, plan.remote, plan.pd_reason) == (0, remote, PdReason.THRESHOLD)


def test_d5_a_long_queue_alone_does_not_send_a_cached_prompt_away() -> None:
    """D5: three prompts wait at the decode worker, which holds 95 % of the next one."""
    rig = fleet(D("d", waiting=3), P("p"), pd_policy="threshold:1024")
    text = prompt(8000)
    rig.hold("d", text[:7600])
    for seed in range(3):
        rig.route(prompt(8000, seed=seed + 1), keep_local=PdReason.PLAN)
    plan = rig.route(text)
    assert (plan.remote, plan.chosen.cached_tokens) == (False, 7600)


@pytest.mark.parametrize(
    ("on_prefill_failure", "status"), [("next,local", 200), ("next,fail", 502), ("local", 200), ("fail", 502)]
)
async def test_d6_a_prefill_5xx_is_retried_in_bounds_and_then_as_configured(
    on_prefill_failure: Any, status: int
) -> None:
    """D6: every prefill worker answers 503. Each is asked at most once, then the decode worker computes, or nobody."""
    busy = answers(b"{}", "503 Service Unavailable")
    pd = PdConfig(policy="always-remote", on_prefill_failure=on_prefill_failure)
    async with Stub(busy) as p1, Stub(busy) as p2, Stub(answers(GOOD)) as d1, world(pd, p1=p1, p2=p2, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert told.status == status
        assert len(p1.calls) + len(p2.calls) == (2 if "next" in on_prefill_failure else 1)
        assert len(d1.calls) == (status == 200)
        if status == 200:
            assert told.went == ("local", "prefill_failed")
        await until(it.is_idle)


async def test_d8_a_decode_worker_without_events_is_named_and_judged_by_what_it_was_sent() -> None:
    """D8: its cache cannot be seen. The rule falls back on the length, less what we sent there ourselves, and the
    gateway says so.
    """
    async with Fleet(pd=RULE, p1=prefill(), d1=decode(events_endpoint=None, replay_endpoint=None)) as it:
        body = {"model": "tiny", "prompt": VERY_LONG, "max_tokens": 2}
        assert (await ask(it.http, it.url, body=body)).went == ("remote", "threshold")
        assert (await ask(it.http, it.url, body=body)).went == ("local", "threshold")
        _, page = await it.get(it.url + "/readyz?verbose")
        assert "d1" in json.dumps(page)
        assert "events_missing" in json.dumps(page)


# ---- prefill/decode protocol -----------------------------------------------------------------------------------------


async def test_p1_a_decode_that_refuses_after_a_good_prefill_strands_nothing() -> None:
    """P1: what an engine would refuse is refused before a prefill is spent; where the decode worker refuses all the
    same, its answer is the client's, the blocks are given back, and they count as stranded until then.
    """
    go_on = asyncio.Event()

    async def refuses(call: Call) -> None:
        if len(d1.calls) > 1:  # The release.
            await go_on.wait()
        await call.ok(b'{"error": {"message": "template"}}', status="400 Bad Request")

    async with Stub(offers()) as p1, Stub(refuses) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.status, told.body) == (400, '{"error": {"message": "template"}}')
        await until(lambda: len(releases(d1)) == 1)
        assert it.handoffs.releases.stranded.tokens(0.0) == {"p1": 64}
        go_on.set()
        await until(lambda: it.handoffs.releases.stranded.tokens(0.0) == {})
        assert len(p1.calls) == 1
        unknown = await ask(it.http, it.url, body={**COMPLETION, "model": "nobody's"})
        no_tokens = await ask(it.http, it.url, body={**COMPLETION, "max_tokens": 0})
        assert (unknown.status, no_tokens.status) == (404, 400)
        assert len(p1.calls) == 1, "nothing was computed for those"


async def test_p3_a_lease_that_ends_before_the_decode_request_is_written_gives_no_wrong_text() -> None:
    """P3: the deadline is past when the decode worker could be told. The params are dropped, the text is right, and
    so is that of the next request there.
    """
    pd = PdConfig(policy="always-remote", lease_s=0.4, lease_margin_s=0.4)
    async with Fleet(pd=pd, p1=prefill(kv_lease_s=0.4), d1=decode()) as it, FakeVllm(engine()) as alone:
        expected = (await ask(it.http, alone.url)).text
        for _ in range(2):
            told = await ask(it.http, it.url)
            assert (told.text, told.went) == (expected, ("local", "lease_over"))
        # What is given back may come after the lease, which harms nobody; nothing was read.
        assert [sum(side.transfers.bytes.counts) for side in it.engines["d1"].nixl] == [0]
        await until(lambda: it.engines["p1"].held_blocks == 0)


async def test_p4_128_handoffs_at_once_all_end() -> None:
    """P4: none hangs, and nothing stays held."""
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as it:
        prompts = [f"{i} " + LONG for i in range(128)]
        asked = [ask(it.http, it.url, body={**BODIES["/v1/completions"], "prompt": text}) for text in prompts]
        told = await asyncio.wait_for(asyncio.gather(*asked), 60)
        assert all(each.text for each in told)
        assert {each.went for each in told} == {("remote", "policy")}
        await until(lambda: it.engines["p1"].held_blocks == 0)
        assert it.core.planner.in_flight() == 0


@pytest.mark.parametrize("restarted", ["p1", "d1"])
async def test_p6_a_peer_that_restarts_at_its_address_harms_nobody_for_long(restarted: str) -> None:
    """P6: whatever the pair is worth then, every answer is right, and handoffs work again."""
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as it:
        first = await ask(it.http, it.url)
        assert first.went == ("remote", "policy")
        await it.engines[restarted].restart()
        for _ in range(3):
            assert (await ask(it.http, it.url)).text == first.text
        await until(lambda: it.core.scraper.counters["restarts"] == 1)
        assert (await ask(it.http, it.url)).went == ("remote", "policy")


@pytest.mark.parametrize("restarted", ["source", "pod"])
async def test_p6_a_source_that_restarts_at_its_address_harms_nobody_for_long(restarted: str) -> None:
    """P6, between two that decode: a sidecar whose peer, or whose own engine, is a new process."""
    pd = PdConfig(allow=("127.0.0.0/8:*",))
    async with FakeVllm(engine(kv_connector=True)) as source, Pod(engine(kv_connector=True), pd=pd) as pod:
        named = {KV_SOURCE: source.url.removeprefix("http://")}
        first = await ask(pod.http, pod.url(), body=BODIES["/v1/completions"], **named)
        assert first.went == ("peer", "hint")
        await until(lambda: all(worker.stats is not None for worker in pod.core.fleet.workers.values()))
        await (source if restarted == "source" else pod.engines[0]).restart()
        for _ in range(3):
            again = await ask(pod.http, pod.url(), body=BODIES["/v1/completions"], **named)
            assert (again.status, again.text) == (200, first.text)
        await until(lambda: pod.core.scraper.counters["restarts"] == 1)
        async with asyncio.timeout(20):  # Until what the new process holds is known here.
            for number in itertools.count():
                body = {**BODIES["/v1/completions"], "prompt": f"{number} {LONG}"}
                alone = await ask(pod.http, source.url, body=body)
                told = await ask(pod.http, pod.url(), body=body, **named)
                assert told.text == alone.text
                if told.went[0] == "peer":
                    break


@pytest.mark.parametrize(
    "failed",
    [
        answers({"choices": [{"index": 0, "text": "", "finish_reason": "error"}]}),
        streams(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}\n\n', b"data: [DONE]\n\n"),
    ],
    ids=["whole", "stream"],
)
async def test_p7_a_failed_generation_said_with_200_is_no_answer(failed: Any) -> None:
    """P7: it is tried again before the client sees a byte, without the transfer that failed."""

    async def script(call: Call) -> None:
        await (failed if b"kv_transfer_params" in call.body else answers(GOOD))(call)

    async with Stub(offers()) as p1, Stub(refusing_releases(script)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", "kv_load_failed"))


async def test_p9_engines_that_refuse_each_other_are_found_out_by_trying() -> None:
    """P9: their options differ in what nobody can see from outside. The text is right, and the pair is left alone."""
    hidden = {"dev_mode": False}
    async with Fleet(pd=REMOTE, p1=prefill(dtype="torch.float16", **hidden), d1=decode(**hidden)) as it:
        async with FakeVllm(engine()) as alone:
            expected = (await ask(it.http, alone.url)).text
        told = [await ask(it.http, it.url) for _ in range(3)]
        assert [each.text for each in told] == [expected] * 3
        assert [each.outcome["reason"] for each in told] == ["kv_load_failed", "kv_load_failed", "pair_broken"]


async def test_p10_several_samples_are_one_engines_work() -> None:
    """P10: three choices of a chat come from the decode worker alone."""
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as it:
        path = "/v1/chat/completions"
        told = await ask(it.http, it.url, path, {**BODIES[path], "n": 3, "temperature": 1})
        assert told.went == ("local", "n_sequences")
        assert [choice["index"] for choice in json.loads(told.body)["choices"]] == [0, 1, 2]
        assert len(it.engines["p1"].requests) == 0


async def test_p12_a_decode_worker_does_not_wait_for_a_prefill_that_failed() -> None:
    """P12: it is asked after the prefill has worked, and not at all if the failure is the request's end."""
    pd = PdConfig(policy="always-remote", on_prefill_failure="fail")
    broken = answers(b"{}", "500 Internal Server Error")
    async with Stub(broken) as p1, Stub(answers(GOOD)) as d1, world(pd, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.status, json.loads(told.body)["error"]["code"]) == (502, "prefill_failed")
        assert d1.connections == 0
        assert it.load() == {"p1": 0, "d1": 0}


@pytest.mark.parametrize("limits", [{}, {"max_completion_tokens": 9}, {"max_tokens": 9}, {"max_tokens": None}])
async def test_p13_the_decode_leg_has_the_clients_limits_and_no_others(limits: dict[str, Any]) -> None:
    """P13: what was absent is absent again, not 0."""
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}], **limits}
    async with Stub(offers()) as p1, Stub(answers(GOOD)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        assert (await ask(it.http, it.url, "/v1/chat/completions", body)).went == ("remote", "policy")
        (decoded,) = bodies(d1)
        del decoded["kv_transfer_params"]
        assert decoded == body
        assert bodies(p1)[0]["max_tokens"] == 1


@pytest.mark.parametrize(("field", "reason"), [({"prompt_logprobs": 1}, "prompt_logprobs"), ({"echo": True}, "echo")])
async def test_p15_what_needs_the_whole_prompts_logits_stays_in_one_engine(field: dict[str, Any], reason: str) -> None:
    """P15: prompt logprobs and echo."""
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as it:
        told = await ask(it.http, it.url, body={**BODIES["/v1/completions"], **field})
        assert (told.status, told.went) == (200, ("local", reason))
        assert len(it.engines["p1"].requests) == 0


@pytest.mark.parametrize(("at_prefill", "at_decode", "told_cached"), [(1000, 49, 64), (-1, 49, 0), (7, -1, 7)])
async def test_p16_cached_tokens_stay_within_the_prompt(at_prefill: int, at_decode: int, told_cached: int) -> None:
    """P16: numbers below 0 or above the prompt are clamped, in the answer and in the statistics."""

    def usage(cached: int) -> dict[str, Any]:
        return {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}

    async with (
        Stub(offers(usage=usage(at_prefill))) as p1,
        Stub(answers({**GOOD, "usage": usage(at_decode)})) as d1,
        world(REMOTE, p1=p1, d1=d1) as it,
    ):
        told = await ask(it.http, it.url, body=COMPLETION)
        assert told.prompt_and_cached == (64, told_cached)
        await until(it.is_idle)
        for stats in it.hits.workers.values():
            assert stats.actual_tokens >= 0
            assert stats.over_tokens >= 0
            assert stats.under_tokens >= 0


async def test_p18_the_first_request_after_an_idle_time_meets_no_dead_connection() -> None:
    """P18: the prefill server has closed the idle connection. The leg goes out once more on a new one."""
    offer, silent = offers(), asyncio.Event()

    async def closes_idle(call: Call) -> None:
        await offer(call)
        call.writer.transport.close()
        silent.set()

    async with Stub(closes_idle) as p1, Stub(answers(GOOD)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        for _ in range(4):
            told = await ask(it.http, it.url, body=COMPLETION)
            assert (told.text, told.went) == ("right", ("remote", "policy"))
            await silent.wait()
        assert len(bodies(d1)) == 4


async def test_p19_when_every_pair_is_broken_requests_are_still_served() -> None:
    """P19: a burst of failures opens all breakers. Prompts are computed locally meanwhile, and each pair is probed."""
    async with Fleet(pd=REMOTE, p1=prefill(), p2=prefill(), d1=decode()) as it:
        prefills = [it.engines[name] for name in ("p1", "p2")]
        pairs = it.core.planner.pairs.pairs
        for i, server in enumerate(prefills):
            server.faults.offer = {"remote_engine_id": f"another-life-{i}"}

        async def burst(n: int) -> set[str]:
            asked = [ask(it.http, it.url, body={**BODIES["/v1/completions"], "seed": i}) for i in range(n)]
            told = await asyncio.gather(*asked)
            assert all(each.text for each in told)
            return {each.outcome["reason"] for each in told}

        await burst(40)
        assert {pair.state(0.0) for pair in pairs.values()} == {"open"}
        for pair in pairs.values():
            pair.retry_at_s = time.monotonic() + 1000
        assert await burst(5) == {"pair_broken"}
        for server in prefills:
            server.faults.offer = None
        for pair in pairs.values():
            pair.retry_at_s = time.monotonic()
        assert "policy" in await burst(5)
        for _ in range(4):
            await burst(1)
        assert await burst(5) == {"policy"}


# ---- security --------------------------------------------------------------------------------------------------------


async def test_o5_only_allowed_prefill_targets_are_asked() -> None:
    """O5: the gateway never obeys the header. A sidecar obeys it for host and port together: not for another port of
    an allowed host, nor for a second value or header beside a good one.
    """
    header = "x-prefiller-host-port"
    async with FakeVllm(prefill()) as good, FakeVllm(prefill()) as rogue:
        good_at, rogue_at = (server.url.removeprefix("http://") for server in (good, rogue))
        async with Fleet(pd=PdConfig(policy="local"), d1=decode()) as it:
            told = await ask(it.http, it.url, **{header: rogue_at})
            assert told.went[0] == "local"
        async with Pod(decode(), pd=PdConfig(allow=(good_at,))) as pod:
            for values in ([rogue_at], [f"{rogue_at}, {rogue_at}"], [rogue_at, f" {rogue_at} "], ["[::1]:1"]):
                assert (await pod.complete(*((header, value) for value in values)))[0] == 403
            for values in ([good_at], [f"{rogue_at} , {good_at}"], [rogue_at, good_at], [good_at, "[::1]:1"]):
                status, _, headers = await pod.complete(*((header, value) for value in values), prompt=LONG)
                assert (status, "choice=remote;reason=hint" in headers["x-warmroute-outcome"]) == (200, True)
        assert len(rogue.requests) == 0
        assert len(good.requests) == 4
