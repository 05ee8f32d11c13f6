"""What becomes of picks: given back on every way out, learned from where it says something."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from multidict import CIMultiDict

from gateway.config.schema import PdConfig
from gateway.engine.health import State
from gateway.epp.local_reply import is_local_reply, what_failed
from gateway.epp.outcome import read_outcome
from scorer.calibrate import Part
from scorer.types import PdReason
from tests.support.epp_world import P, Pool, answer, decode, prefill, request
from tests.support.fleets import prompt

SSE = {"content_type": "text/event-stream; charset=utf-8"}
USAGE = b'{"id":"x","usage":{"prompt_tokens":400,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":320}}}'
REMOTE = PdConfig(policy="always-remote")
DEAD = (
    b"upstream connect error or disconnect/reset before headers. retried and the latest reset reason: remote "
    b"connection failure, transport failure reason: delayed connect error: Connection refused"
)


async def test_a_whole_answer_is_learned_from() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(prompt(400)))
        answer(pick, USAGE[:40], USAGE[40:])
        assert pool.is_idle()
        await pool.access.close()
        line = json.loads(pool.log.getvalue())
        assert (line["worker"], line["status"], line["cached_tokens"], line["output_tokens"]) == ("p0", 200, 320, 7)
        assert pool.hits.workers["p0"].actual_tokens == 320


async def test_a_stream_has_a_first_token() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(prompt(400), stream=True))
        load = pool.fleet.workers["p0"].loads[0]
        assert (len(load.prefills), load.streams) == (1, 0)
        pick.watch.responded(200, CIMultiDict({"content-type": "text/event-stream"}), None)
        assert load.streams == 0
        pick.watch.chunk(b'data: {"choices":[]}\n\n')
        assert (len(load.prefills), load.streams) == (0, 1)
        for _ in range(40):
            pick.watch.chunk(b'data: {"choices":[]}\n\n')
        pick.watch.chunk(b"data: " + USAGE + b"\n\ndata: [DONE]\n\n")
        pick.watch.ended()
        assert pool.is_idle()
        assert pool.value("warmroute_time_to_first_token_seconds_count") == 1


_USED = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":10,"total_tokens":15}}\n\n'
_TEXT = b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
_DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("chunks", "output_tokens"),
    [
        ((_USED, _DONE), 10),
        ((_TEXT, _USED, _DONE), 10),
        ((_TEXT + _USED[:20], _USED[20:], _DONE[:5], _DONE[5:]), 10),
        ((_USED + b"data: [DONE]",), 10),
        ((_TEXT, _DONE), None),
    ],
)
async def test_case_19_26_usage_of_a_stream(chunks: tuple[bytes, ...], output_tokens: int | None) -> None:
    async with Pool(P()) as pool:
        answer(await pool.picked(request(stream=True)), *chunks, **SSE)
        assert pool.is_idle()
        told = output_tokens is not None
        for what, n_tokens in (("input", 5), ("output", 10)):
            assert pool.value(f"warmroute_request_{what}_tokens_count") == told
            assert pool.value(f"warmroute_request_{what}_tokens_sum") == n_tokens * told
        assert not pool.value("warmroute_request_cached_tokens_count")
        await pool.access.close()
        assert json.loads(pool.log.getvalue()).get("output_tokens") == output_tokens


async def test_case_19_input_tokens_are_a_histogram() -> None:
    async with Pool(P()) as pool:
        usage = b'data: {"usage":{"prompt_tokens":7,"total_tokens":17,"completion_tokens":10}}\ndata: [DONE]'
        answer(await pool.picked(request(stream=True)), b"data: {}\n\n", usage, b"", **SSE)
        assert pool.value("warmroute_request_input_tokens_sum") == 7
        assert pool.value("warmroute_request_input_tokens_count") == 1
        assert pool.value("warmroute_request_input_tokens_bucket", le="16.0") == 1
        assert pool.value("warmroute_request_output_tokens_sum") == 10


async def test_tokens_count_whoever_has_served_and_only_those_of_good_answers() -> None:
    async with Pool(P(), P()) as pool:
        usage = b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}'
        pick = await pool.picked(request())
        (other,) = {pool.endpoint(0), pool.endpoint(1)} - set(pick.endpoints)
        answer(pick, usage, served=other)
        answer(await pool.picked(request()), usage, status=500)
        for what, n_tokens in (("input", 7), ("cached", 4), ("output", 2)):
            assert pool.value(f"warmroute_request_{what}_tokens_count") == 1
            assert pool.value(f"warmroute_request_{what}_tokens_sum") == n_tokens


@pytest.mark.parametrize("way", ["ended", "aborted", "unseen", "recalled"])
@pytest.mark.parametrize("status", [None, 200, 400, 500, 503])
@pytest.mark.parametrize("remote", [False, True])
async def test_every_way_out_gives_everything_back(way: str, status: int | None, remote: bool) -> None:
    async with Pool(prefill(), decode(), pd=REMOTE if remote else None) as pool:
        for stream in (False, True):
            pick = await pool.picked(request(prompt(400), stream=stream))
            assert pool.load()["p0"] == remote
            if status is not None:
                pick.watch.responded(status, CIMultiDict({"content-type": "text/plain"}), None)
                pick.watch.chunk(b"x")
            getattr(pick.watch, way)()
            if way == "unseen":
                pool.unseen.look(time.monotonic() + 1000)
        assert pool.is_idle()
        assert pool.planner.pairs.pairs == {} or all(not pair.failures for pair in pool.planner.pairs.pairs.values())


async def test_an_answer_of_the_engine_with_an_error_is_the_engines() -> None:
    async with Pool(P(), P()) as pool:
        for _ in range(3):
            pick = await pool.picked(request(subset=(pool.endpoint(0),)))
            answer(pick, b'{"error":{}}', status=500)
        other = await pool.picked(request(subset=(pool.endpoint(1),)))
        answer(other, b"{}")
        pool.health.tick(time.monotonic())
        assert pool.health.state("p0").state is State.EJECTED
        pick = await pool.expect_route(request(), 1)
        pick.watch.aborted()
        assert pool.is_idle()


async def test_a_local_reply_about_a_dead_endpoint_ejects_it() -> None:
    async with Pool(P(), P()) as pool:
        for _ in range(2):
            pick = await pool.picked(request(subset=(pool.endpoint(0),)))
            answer(pick, DEAD[:60], DEAD[60:], status=503, content_type="text/plain")
            other = await pool.picked(request(subset=(pool.endpoint(1),)))
            answer(other, b"{}")
        pool.health.tick(time.monotonic())
        assert pool.health.state("p0").state is State.EJECTED
        assert pool.value("warmroute_epp_local_replies_total", what="connect") == 2
        assert pool.is_idle()


async def test_the_proxys_own_limits_are_nobodys_fault() -> None:
    async with Pool(P(), P()) as pool:
        for _ in range(5):
            pick = await pool.picked(request(subset=(pool.endpoint(0),)))
            text = b"upstream connect error or disconnect/reset before headers. reset reason: overflow"
            answer(pick, text, status=503, content_type="text/plain")
            other = await pool.picked(request(subset=(pool.endpoint(1),)))
            answer(other, b"{}")
        pool.health.tick(time.monotonic())
        assert pool.health.state("p0").state is State.HEALTHY
        assert pool.is_idle()


def test_local_replies_are_told_from_engines() -> None:
    assert is_local_reply(503, CIMultiDict({"Content-Type": "text/plain"}))
    assert is_local_reply(504, CIMultiDict())
    assert not is_local_reply(503, CIMultiDict({"content-type": "application/json"}))
    assert not is_local_reply(503, CIMultiDict({"content-type": "text/plain", "x-envoy-upstream-service-time": "3"}))
    assert not is_local_reply(500, CIMultiDict({"content-type": "text/plain"}))
    assert what_failed(503, DEAD)[1] == "connect"
    assert what_failed(503, b"no healthy upstream")[1] == "connect"
    assert what_failed(504, b"upstream request timeout")[1] == "timeout"
    assert what_failed(502, b"... reset reason: connection termination")[1] == "disconnected"
    assert what_failed(503, b"... reset reason: overflow") == (None, "overflow")


async def test_served_by_another_endpoint_it_is_booked_there_and_times_teach_nothing() -> None:
    async with Pool(P(), P(queue=9)) as pool:
        pick = await pool.expect_route(request(prompt(400), stream=True), 0)
        pick.watch.responded(200, CIMultiDict({"content-type": "text/event-stream"}), pool.endpoint(1))
        assert pool.load() == {"p0": 0, "p1": 1}
        pick.watch.chunk(b"data: {}\n\n")
        assert pool.fleet.workers["p1"].loads[0].streams == 1
        pick.watch.ended()
        assert pool.is_idle()
        assert pool.value("warmroute_epp_served_elsewhere_total") == 1
        assert {part for part, _ in pool.planner.calibration.factors()} <= {Part.OUTPUT}


async def test_times_of_an_answer_that_was_seen_do() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(prompt(400), stream=True))
        answer(pick, b"data: {}\n\n", **SSE)
        learned = {part for part, _ in pool.planner.calibration.factors()}
        assert learned & {Part.FRONT, Part.FLOOR}  # By how long this machine took from the pick to here.


async def test_a_stream_that_the_proxy_held_to_its_end_teaches_no_times() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(prompt(400), stream=True))
        answer(pick, b'data: {"choices":[]}\n\n' * 40 + b"data: " + USAGE + b"\n\ndata: [DONE]\n\n", **SSE)
        assert {part for part, _ in pool.planner.calibration.factors()} == {Part.OUTPUT}
        assert pool.hits.workers["p0"].actual_tokens == 320
        assert pool.is_idle()


async def test_served_by_an_endpoint_we_do_not_know_nothing_stays_booked() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(prompt(400)))
        pick.watch.responded(200, CIMultiDict(), "192.0.2.1:8000")
        assert pool.load() == {"p0": 0}
        pick.watch.chunk(USAGE)
        pick.watch.ended()
        assert pool.is_idle()
        assert pool.hits.workers["p0"].actual_tokens == 0


async def test_served_as_picked_is_no_other_endpoint() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(prompt(400)))
        answer(pick, USAGE, served=pool.endpoint(0))
        assert pool.value("warmroute_epp_served_elsewhere_total") == 0
        assert pool.hits.workers["p0"].actual_tokens == 320


# ---- what a sidecar says ---------------------------------------------------------------------------------------------


def plan_id(headers: dict[str, str]) -> str:
    return headers["x-warmroute-plan"].split(";")[1].removeprefix("id=")


async def test_the_sidecar_did_as_planned() -> None:
    async with Pool(prefill(), decode(), pd=REMOTE) as pool:
        pick = await pool.picked(request(prompt(4000), stream=True))
        said = f"id={plan_id(pick.set_headers)};choice=remote;reason=hint;prefiller=192.168.1.1:8000;prefill_ms=123.5"
        pick.watch.responded(200, CIMultiDict({"content-type": "text/event-stream", "x-warmroute-outcome": said}), None)
        assert pool.load() == {"p0": 0, "p1": 1}
        pick.watch.chunk(b"data: {}\n\n")
        pick.watch.ended()
        assert pool.is_idle()
        assert pool.value("warmroute_epp_sidecar_outcomes_total", outcome="as_planned") == 1


async def test_the_sidecar_had_to_compute_it_itself() -> None:
    async with Pool(prefill(), decode(), pd=REMOTE) as pool:
        pick = await pool.picked(request(prompt(4000), stream=True))
        said = f"id={plan_id(pick.set_headers)};choice=local;reason=prefill_failed"
        pick.watch.responded(200, CIMultiDict({"content-type": "text/event-stream", "x-warmroute-outcome": said}), None)
        assert pool.load() == {"p0": 0, "p1": 1}
        assert pool.planner.pairs.pairs[("p0", "p1")].failures == 1
        pick.watch.chunk(b"data: {}\n\n")
        pick.watch.ended()
        assert pool.is_idle()
        assert pool.value("warmroute_epp_sidecar_outcomes_total", outcome="otherwise") == 1
        await pool.access.close()
        line = json.loads(pool.log.getvalue())
        assert (line["choice"], line["pd_reason"]) == ("local", "prefill_failed")


@pytest.mark.parametrize(
    ("said", "outcome"), [("id=another;choice=local;reason=cost", "of_another"), ("nonsense", "malformed")]
)
async def test_what_it_says_of_others_changes_nothing(said: str, outcome: str) -> None:
    async with Pool(prefill(), decode(), pd=REMOTE) as pool:
        pick = await pool.picked(request(prompt(4000), stream=True))
        answer(pick, b"data: {}\n\n", x_warmroute_outcome=said, **SSE)
        assert pool.is_idle()
        assert pool.value("warmroute_epp_sidecar_outcomes_total", outcome=outcome) == 1
        assert all(not pair.failures for pair in pool.planner.pairs.pairs.values())


async def test_a_prefill_worker_is_free_before_a_whole_answer_is_there() -> None:
    async with Pool(prefill(), decode(), pd=REMOTE) as pool:
        pick = await pool.picked(request(prompt(400)))
        assert pool.load() == {"p0": 1, "p1": 1}
        async with asyncio.timeout(10):
            while pool.load()["p0"]:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.01)
        assert pool.load()["p1"] == 1
        answer(pick, b"{}")
        assert pool.is_idle()


def test_outcomes_are_read_strictly() -> None:
    found = read_outcome("id=a%3B;choice=peer;reason=cost;prefill_ms=1.5;later=x")
    assert found is not None
    assert (found.plan_id, found.choice, found.reason, found.prefill_s) == ("a%3B", "peer", PdReason.COST, 0.0015)
    for text in ("", "id=a", "choice=local", "id=a;choice=maybe", "id=a;choice=local" + ";x=y" * 500):
        assert read_outcome(text) is None
    assert read_outcome("id=a;choice=local;reason=unheard-of;prefill_ms=nan") is not None
    for ms in ("nan", "-1", "inf", "1e12", "x"):
        odd = read_outcome(f"id=a;choice=local;prefill_ms={ms}")
        assert odd is not None
        assert odd.prefill_s is None


# ---- responses nobody shows ------------------------------------------------------------------------------------------


async def test_unseen_bookings_end_when_the_engine_has_fewer_inside() -> None:
    async with Pool(P()) as pool:
        for i in range(4):
            (await pool.picked(request(prompt(400, i)))).watch.unseen()
        assert pool.load() == {"p0": 4}
        assert pool.unseen.problem is not None
        now_s = time.monotonic()
        pool.say("p0", P(running=1, queue=1), age_s=-2.0)
        pool.unseen.look(now_s + 2.0)
        assert pool.load() == {"p0": 2}
        pool.say("p0", P(), age_s=-2.0)
        pool.unseen.look(now_s + 2.0)
        assert pool.is_idle()


async def test_unseen_bookings_end_by_time() -> None:
    async with Pool(P()) as pool:
        (await pool.picked(request(prompt(400), max_tokens=10))).watch.unseen()
        now_s = time.monotonic()
        pool.say("p0", P(running=5), age_s=-100)
        load = pool.fleet.workers["p0"].loads[0]
        pool.unseen.look(now_s + 0.9)
        assert (len(load.prefills), load.streams) == (0, 1)
        pool.unseen.look(now_s + 20)
        assert pool.is_idle()
        assert pool.value("warmroute_epp_responses_unseen_total") == 1


async def test_silence_of_the_unseen_is_no_stall() -> None:
    async with Pool(P(), P()) as pool:
        (await pool.picked(request(subset=(pool.endpoint(0),)))).watch.unseen()
        other = await pool.picked(request(subset=(pool.endpoint(1),)))
        answer(other, b"{}")
        for seconds in range(1, 60):
            pool.health.tick(time.monotonic() + seconds)
        assert pool.health.state("p0").state is State.HEALTHY
