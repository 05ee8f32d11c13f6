"""The picker, one request at a time: what goes on, what stays, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.config.schema import EppConfig, PdConfig, QueueConfig, TenancyConfig
from gateway.extproc.types import Pick, Refusal
from gateway.request import RequestReader
from gateway.sidecar.hints import read_plan
from gateway.stored import Place
from scorer.answers import Answer
from scorer.ledger import Booking
from scorer.queue import AGEING
from tests.support.epp_world import BASE, P, Pool, answer, decode, get, prefill, request
from tests.support.fleets import prompt

LONG = prompt(4000)


async def test_control_headers_end_here_and_the_identity_stays() -> None:
    headers = {
        "x-llm-d-inference-objective": "a",
        "x-gateway-inference-fairness-id": "b",
        "x-llm-d-model-name-rewrite": BASE,
        "x-tenant": "acme",
        "traceparent": "00-1-2-3",
    }
    async with Pool(P(), tenancy=TenancyConfig(header="x-tenant")) as pool:
        pick = await pool.picked(request(headers=headers))
        assert set(pick.remove_headers) == set(headers) - {"traceparent"}
        assert "x-request-id" not in pick.set_headers
        pick.watch.aborted()


async def test_a_request_without_an_id_gets_one() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(headers={"x-request-id": ""}))
        pick.watch.aborted()
        pick = await pool.picked(get("/version", headers={"x-request-id": "mine"}))
        assert pick.set_headers == {}
        pick.watch.ended()


async def test_our_plan_goes_beside_llm_ds_headers() -> None:
    async with Pool(prefill(), decode(queue=2), pd=PdConfig(policy="always-remote")) as pool:
        pick = await pool.expect_route(request(LONG), 1)
        assert pick.set_headers["x-prefiller-host-port"] == "192.168.1.1:8000"
        assert "x-kv-cache-source-host-port" not in pick.set_headers
        plan = pick.set_headers["x-warmroute-plan"]
        assert (read_plan(plan) or ("", ""))[0] == "remote"
        assert plan.endswith(";n=4000;hd=0;hp=0")
        assert pool.load() == {"p0": 1, "p1": 1}
        pick.watch.aborted()
        assert pool.is_idle()


async def test_a_local_plan_says_so() -> None:
    async with Pool(prefill(), decode()) as pool:
        pool.hold("p1", LONG)
        pick = await pool.expect_route(request(LONG), 1)
        plan = pick.set_headers["x-warmroute-plan"]
        assert (read_plan(plan) or ("", ""))[0] == "local"
        assert ";hd=3984;" in plan
        assert "x-prefiller-host-port" not in pick.set_headers
        pick.watch.aborted()


async def test_a_peer_is_named_as_the_source() -> None:
    text = prompt(40_000)
    async with Pool(*[P(nixl=True, kv_blocks=40_000)] * 2, pd=PdConfig(policy="cost")) as pool:
        pool.hold("p0", text)
        load = pool.fleet.workers["p0"].loads[0]
        for _ in range(10):
            Booking(load, 0.0, 40_000, time.monotonic(), answer=Answer(256)).first_token(time.monotonic())
        pick = await pool.expect_route(request(text), 1)
        assert pick.set_headers["x-kv-cache-source-host-port"] == "192.168.1.1:8000"
        assert "x-prefiller-host-port" not in pick.set_headers
        assert ";choice=remote;" in pick.set_headers["x-warmroute-plan"]
        pick.watch.aborted()
        assert pool.planner.in_flight() == 0


async def test_a_rank_is_named_where_there_are_several() -> None:
    async with Pool(P(ranks=2), P()) as pool:
        pool.hold("p0", LONG, rank=1)
        pick = await pool.expect_route(request(LONG), 0)
        assert pick.set_headers["x-data-parallel-rank"] == "1"
        pick.watch.aborted()
        pool.hold("p1", prompt(4000, 7))
        pick = await pool.expect_route(request(prompt(4000, 7)), 1)
        assert "x-data-parallel-rank" not in pick.set_headers
        pick.watch.aborted()


async def test_the_cache_decides() -> None:
    async with Pool(P(), P(), P()) as pool:
        pool.hold("p2", LONG)
        for _ in range(5):
            pick = await pool.expect_route(request(LONG), 2)
            pick.watch.aborted()


async def test_a_burst_does_not_see_the_same_idle_pod() -> None:
    async with Pool(P(), P(), P(), P()) as pool:
        picks = await asyncio.gather(*(pool.picked(request(prompt(2000, i))) for i in range(8)))
        assert pool.load() == {"p0": 2, "p1": 2, "p2": 2, "p3": 2}
        for pick in picks:
            answer(pick, b"{}")
        assert pool.is_idle()


async def test_fallbacks_are_the_plans_next_best() -> None:
    async with Pool(P(queue=5), P(), P(queue=9), epp=EppConfig(fallback_endpoints=1)) as pool:
        pick = await pool.picked(request())
        assert pick.endpoints == ("192.168.1.2:8000", "192.168.1.1:8000")
        pick.watch.aborted()


async def test_case_20_scores_of_the_candidates_are_told_where_they_are_asked_for() -> None:
    async with Pool(P(kv=0.1), P(queue=5, kv=0.5), epp=EppConfig(emit_scores=True)) as pool:
        pick = await pool.picked(request())
        assert set(pick.scores) == {pool.endpoint(0), pool.endpoint(1)}
        assert 0 < pick.scores[pool.endpoint(1)] < pick.scores[pool.endpoint(0)] <= 1
        pick.watch.aborted()
    async with Pool(P(kv=0.1), P(queue=5, kv=0.5)) as pool:
        pick = await pool.picked(request())
        assert pick.scores == {}
        pick.watch.aborted()


async def test_a_body_goes_on_byte_by_byte_and_numbers_keep_their_spelling() -> None:
    raw = b'{ "model":"old","prompt":"x", "temperature": 1.0e0, "seed":12345678901234567890 }'
    async with Pool(P(), epp=EppConfig(rewrites=("old=foo",))) as pool:
        pick = await pool.picked(request(raw=raw))
        assert pick.body == raw.replace(b'"old"', b'"foo"')
        assert pick.rename == ("foo", "old")
        pick.watch.aborted()


FORM = (
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF\r\n'
    b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nold\r\n--B--\r\n'
)


@pytest.mark.parametrize("headers", [{}, {"x-llm-d-model-name-rewrite": "foo"}])
async def test_the_model_of_a_form_is_rewritten_too(headers: dict[str, str]) -> None:
    epp = EppConfig(rewrites=() if headers else ("old=foo",))
    asked = request(
        path="/v1/audio/transcriptions",
        raw=FORM,
        headers={"content-type": "multipart/form-data; boundary=B", **headers},
    )
    async with Pool(P(), epp=epp) as pool:
        pick = await pool.picked(asked)
        assert pick.body == FORM.replace(b"\r\nold\r\n", b"\r\nfoo\r\n")
        assert pick.rename == ("foo", "old")
        pick.watch.aborted()


@pytest.mark.parametrize(("model", "asks"), [("old", False), ("foo", True)])
async def test_who_is_to_be_told_another_name_gets_it_uncompressed(model: str, asks: bool) -> None:
    async with Pool(P(), epp=EppConfig(rewrites=("old=foo",))) as pool:
        pick = await pool.picked(request(model=model, headers={"Accept-Encoding": "gzip"}))
        assert ("accept-encoding" not in pick.remove_headers) == asks
        pick.watch.aborted()


async def test_transfer_params_of_clients_do_not_pass() -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(kv_transfer_params={"remote_host": "192.0.2.1"}))
        assert pick.body is not None
        assert "kv_transfer_params" not in json.loads(pick.body)
        pick.watch.aborted()


async def test_tenants_are_salted_and_told_apart() -> None:
    settings = TenancyConfig(header="x-tenant", salt="derive")
    async with Pool(P(), tenancy=settings) as pool:
        salts = set()
        for tenant in ("a", "b"):
            pick = await pool.picked(request(headers={"x-tenant": tenant}))
            assert pick.body is not None
            salts.add(json.loads(pick.body)["cache_salt"])
            pick.watch.aborted()
        assert len(salts) == 2


async def test_who_must_say_who_it_is_and_does_not() -> None:
    async with Pool(P(), tenancy=TenancyConfig(header="x-tenant", required=True)) as pool:
        await pool.expect_refusal(request(), 401)
        await pool.expect_refusal(get("/v1/models"), 401)
        assert pool.is_idle()


async def test_weights_share_the_requests_of_a_model() -> None:
    pod = P(adapters=("a", "b", "never"))
    async with Pool(pod, epp=EppConfig(rewrites=("m=a*3", "m=b", "m=never*0"))) as pool:
        counts: dict[str, int] = {}
        for _ in range(200):
            pick = await pool.picked(request(model="m"))
            assert pick.rename is not None
            counts[pick.rename[0]] = counts.get(pick.rename[0], 0) + 1
            pick.watch.aborted()
        assert set(counts) == {"a", "b"}
        assert 120 < counts["a"] < 180


async def test_the_header_beats_the_rules() -> None:
    async with Pool(P(adapters=("a", "b")), epp=EppConfig(rewrites=("m=a",))) as pool:
        pick = await pool.picked(request(model="m", headers={"x-llm-d-model-name-rewrite": "b"}))
        assert pick.rename == ("b", "m")
        pick.watch.aborted()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("x-llm-d-model-name-rewrite", 400),
        ("x-llm-d-inference-objective", None),
        ("x-llm-d-inference-fairness-id", None),
        ("x-session-id", None),
        ("x-request-id", None),
    ],
)
async def test_bytes_that_are_no_text_in_a_header_are_no_fault_of_ours(name: str, status: int | None) -> None:
    async with Pool(P()) as pool:
        asked = request(headers={name: "\udcff"})
        if status is not None:
            await pool.expect_refusal(asked, status)
        else:
            (await pool.picked(asked)).watch.aborted()
        assert pool.is_idle()


async def test_the_objective_is_the_place_in_the_queue() -> None:
    settings = EppConfig(objectives=("urgent=5", "batch=-1"))
    queue = QueueConfig(waiting_per_worker=1)
    async with Pool(P(queue=4, running=1), epp=settings, queue=queue) as pool:
        order: list[str] = []

        async def ask(name: str) -> None:
            pick = await pool.picked(request(headers={"x-gateway-inference-objective": name} if name else {}))
            order.append(name)
            answer(pick, b"{}")

        tasks = [asyncio.create_task(ask("")), asyncio.create_task(ask("urgent"))]
        while pool.queue.n_waiting < 2:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.002)
        await pool.expect_refusal(
            request(headers={"x-llm-d-inference-objective": "batch"}), 429, dropped="rejected-saturated"
        )
        pool.say("p0", P())
        await asyncio.gather(*tasks)
        assert order == ["urgent", ""]
        assert pool.value("warmroute_requests_rejected_total", reason="saturated") == 1
        assert pool.value("warmroute_epp_objectives_total", objective="known") == 2
        assert pool.is_idle()


async def test_an_objective_below_zero_is_served_while_there_is_room() -> None:
    async with Pool(P(), epp=EppConfig(objectives=("batch=-1",))) as pool:
        pick = await pool.expect_route(request(headers={"x-llm-d-inference-objective": "batch"}), 0)
        pick.watch.aborted()


async def test_who_waits_too_long_is_told_to_come_back() -> None:
    queue = QueueConfig(waiting_per_worker=1, max_wait_s=0.05)
    async with Pool(P(queue=4, running=1), queue=queue) as pool:
        refusal = await pool.expect_refusal(request(), 429, dropped="rejected-ttl-expired")
        assert int(CIMultiDict(refusal.headers)["retry-after"]) >= 1
        assert pool.is_idle()


async def test_a_client_that_leaves_the_queue_leaves_nothing() -> None:
    async with Pool(P(queue=4, running=1), queue=QueueConfig(waiting_per_worker=1)) as pool:
        task = asyncio.create_task(pool.pick(request()))
        while not pool.queue.n_waiting:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.is_idle()
        assert pool.value("warmroute_answers_cut_total", reason="client_left") == 1


# ---- evictions -------------------------------------------------------------------------------------------------------

BATCH = {"x-llm-d-inference-objective": "batch"}
EVICTING = QueueConfig(waiting_per_worker=1, evict_after_s=0.02)


def evicting(*pods: P, queue: QueueConfig = EVICTING) -> Pool:
    return Pool(*(pods or (P(),)), epp=EppConfig(objectives=("batch=-1", "urgent=5")), queue=queue)


class Proxy:
    """Whoever carries picks out; `refused` by it in place of responses."""

    def __init__(self) -> None:
        self.refused: list[Refusal] = []

    def bind(self, pick: Pick) -> None:
        def refuse(refusal: Refusal) -> bool:
            self.refused.append(refusal)
            pick.watch.recalled()
            return True

        assert pick.recall is not None
        pick.recall.bind(refuse)


async def test_case_22_a_sheddable_request_gives_its_place_to_one_that_is_not() -> None:
    async with evicting() as pool:
        proxy = Proxy()
        low = await pool.picked(request(headers=BATCH))
        proxy.bind(low)
        pool.say("p0", P(queue=1, running=1))
        high = await pool.picked(request())
        (refusal,) = proxy.refused
        assert (refusal.status, json.loads(refusal.body)["error"]["code"]) == (429, "evicted")
        assert "request evicted by flow control" in refusal.body.decode()
        assert refusal.headers["x-llm-d-request-dropped-reason"] == "evicted-priority"
        assert int(refusal.headers["Retry-After"]) >= 1
        assert refusal.details == "epp_evicted"
        assert pool.n_running == 1
        answer(high, b"{}")
        assert pool.is_idle()
        assert pool.value("warmroute_requests_rejected_total", reason="evicted") == 1
        assert not pool.value("warmroute_answers_cut_total", reason="aborted")
        first, second = await pool.records()
        assert (first["status"], first["error"], first["cut"]) == (429, "evicted", "evicted")
        assert second["status"] == 200
        assert second["queued_ms"] >= 20


async def test_a_place_that_was_made_goes_to_whom_it_was_made_for() -> None:
    """Not to another model of the same pods, looked at after it."""
    async with evicting(P(adapters=("bar",))) as pool:
        proxy = Proxy()
        proxy.bind(await pool.picked(request(headers=BATCH)))
        pool.say("p0", P(queue=1, running=1))
        urgent = asyncio.create_task(pool.pick(request(headers={"x-llm-d-inference-objective": "urgent"})))
        usual = asyncio.create_task(pool.pick(request(model="bar")))
        await asyncio.wait({urgent, usual}, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        assert len(proxy.refused) == 1
        assert (urgent.done(), usual.done()) == (True, False)
        for task in (urgent, usual):
            pick = await task
            assert isinstance(pick, Pick)
            answer(pick, b"{}")


async def test_a_place_that_was_made_goes_to_the_priority_it_was_made_for_though_the_turn_is_by_age() -> None:
    async with evicting() as pool:
        proxy = Proxy()
        proxy.bind(await pool.picked(request(headers=BATCH)))
        pool.say("p0", P(queue=1, running=1))
        pool.queue._evicts_again_s = math.inf  # Until both wait.
        usual = asyncio.create_task(pool.pick(request()))
        while pool.queue.n_waiting < 1:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.002)
        urgent = asyncio.create_task(pool.pick(request(headers={"x-llm-d-inference-objective": "urgent"})))
        while pool.queue.n_waiting < 2:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.002)
        (lane,) = [lane for lane in pool.queue.lanes.values() if lane.queue]
        lane.queue._served = pool.queue._let_go_so_far = AGEING - 1
        pool.queue._evicts_again_s = 0.0
        await asyncio.wait({usual, urgent}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert len(proxy.refused) == 1
        assert (usual.done(), urgent.done()) == (False, True)
        pick = await urgent
        assert isinstance(pick, Pick)
        answer(pick, b"{}")
        pool.say("p0", P())
        pick = await asyncio.wait_for(usual, 60)
        assert isinstance(pick, Pick)
        answer(pick, b"{}")


async def test_nobody_goes_from_a_pod_that_the_proxy_does_not_allow_to_who_waits() -> None:
    async with evicting(P(), P()) as pool:
        lows, proxies = [], [Proxy(), Proxy()]
        for i in (0, 1):  # The last would go first.
            lows.append(await pool.picked(request(headers=BATCH, subset=(pool.endpoint(i),))))
            proxies[i].bind(lows[i])
        for name in ("p0", "p1"):
            pool.say(name, P(queue=1, running=1))
        pick = await pool.picked(request(subset=(pool.endpoint(0),)))
        assert pick.endpoints == (pool.endpoint(0),)
        assert [len(proxy.refused) for proxy in proxies] == [1, 0]
        for each in (lows[1], pick):
            answer(each, b"{}")


@pytest.mark.parametrize("way", ["responded", "unseen", "aborted"])
async def test_what_has_begun_or_is_over_is_not_taken_back(way: str) -> None:
    async with evicting() as pool:
        low = await pool.picked(request(headers=BATCH))
        assert len(pool.queue.evictables) == 1
        if way == "responded":
            low.watch.responded(200, CIMultiDict(), None)
        else:
            getattr(low.watch, way)()
        assert not len(pool.queue.evictables)
        if way == "responded":
            low.watch.ended()


async def test_what_fails_after_its_booking_is_nobodys_to_take_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("gateway.epp.picker.Watched", fail)
    async with evicting() as pool:
        refusal = await pool.pick(request(headers=BATCH))
        assert isinstance(refusal, Refusal)
        assert refusal.status == 500
        assert not len(pool.queue.evictables)
        assert pool.is_idle()


async def test_a_proxy_for_whom_it_is_too_late_is_not_asked_twice() -> None:
    async with evicting(P(), P()) as pool:
        low = [await pool.picked(request(headers=BATCH)) for _ in range(2)]  # Of streams that nobody has bound.
        for name in ("p0", "p1"):
            pool.say(name, P(queue=1, running=1))
        task = asyncio.create_task(pool.pick(request()))
        while len(pool.queue.evictables):  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.002)
        assert not task.done()
        assert not pool.value("warmroute_requests_rejected_total", reason="evicted")
        answer(low[0], b"{}")
        pick = await task
        assert isinstance(pick, Pick)
        for each in (low[1], pick):
            answer(each, b"{}")
        assert [record.get("cut") for record in await pool.records()] == [None] * 3


@pytest.mark.parametrize(
    ("queue", "headers"),
    [(QueueConfig(), BATCH), (EVICTING, {}), (EVICTING, {"x-llm-d-inference-objective": "urgent"})],
)
async def test_others_have_no_recall(queue: QueueConfig, headers: dict[str, str]) -> None:
    async with evicting(queue=queue) as pool:
        pick = await pool.picked(request(headers=headers))
        assert pick.recall is None
        assert not len(pool.queue.evictables)
        answer(pick, b"{}")


async def test_a_decision_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(RequestReader, "read", hang)
    async with Pool(P(), epp=EppConfig(decision_deadline_s=0.02)) as pool:
        refusal = await pool.expect_refusal(request(), 503, dropped="rejected-ttl-expired")
        assert b"decision_timeout" in refusal.body
        assert pool.is_idle()


async def test_what_goes_wrong_here_is_a_500_and_books_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    async with Pool(P()) as pool:
        monkeypatch.setattr("gateway.epp.carrying.plan_headers", fail)
        refusal = await pool.expect_refusal(request(), 500)
        assert b"boom" not in refusal.body
        assert pool.is_idle()


async def test_a_pod_that_has_not_said_what_it_serves_is_not_picked() -> None:
    async with Pool(P(asked=False)) as pool:
        await pool.expect_refusal(request(), 503, dropped="rejected-no-endpoints")


async def test_a_stored_response_is_where_it_was_made() -> None:
    async with Pool(P(), P(queue=3), P()) as pool:
        pick = await pool.picked(request("hi", path="/v1/responses", input="hi", subset=(pool.endpoint(1),)))
        answer(pick, b'{"id":"resp_1","object":"response"}')
        assert pool.stored.find("resp_1", 0.0) == Place("p1", 0)
        for asked in (get("/v1/responses/resp_1"), request(path="/v1/responses/resp_1/cancel", raw=b"")):
            pick = await pool.expect_route(asked, 1)
            pick.watch.ended()
        pick = await pool.expect_route(request(path="/v1/responses", input="more", previous_response_id="resp_1"), 1)
        pick.watch.aborted()
        elsewhere = request(path="/v1/responses", input="x", previous_response_id="resp_1", subset=(pool.endpoint(0),))
        await pool.expect_refusal(elsewhere, 503, dropped="rejected-no-endpoints")
        assert pool.is_idle()


@pytest.mark.parametrize(
    ("method", "path", "raw"),
    [
        ("GET", "/v1/responses/resp_1", b""),
        ("GET", "/v1/%72esponses/resp_1", b""),
        ("GET", "/v1/responses/%72esp_1?stream=true", b""),
        ("GET", "/v1/responses%2Fresp_1", b""),
        ("GET", "/team/v1/responses/resp_1", b""),
        ("GET", "/v1/responses/resp_1", b"{}"),
        ("POST", "/v1/responses/resp_1/cancel", b""),
        ("POST", "/v1/responses/resp_1/cancel", b"{}"),
        ("POST", "/v1/responses/resp_1/%63ancel", b'{"model":"foo"}'),
        ("POST", "/team/v1/responses/resp_1/cancel", b'{"model":"foo"}'),
        ("DELETE", "/team/v1/responses/resp_1", b""),
        ("POST", "/v1/%72esponses", b'{"model":"foo","input":"x","previous_response_id":"resp_1"}'),
    ],
)
async def test_a_stored_response_is_its_tenants_alone_however_its_path_is_written(
    method: str, path: str, raw: bytes
) -> None:
    async with Pool(P(queue=3), P(queue=3), P(), tenancy=TenancyConfig(header="x-tenant")) as pool:
        pool.stored.remember("resp_1", Place("p1", 0), time.monotonic(), "alice")
        for who, pod in (("alice", 1), ("bob", None), ("", None)):
            asked = request(path=path, method=method, raw=raw, headers={"x-tenant": who})
            if pod is None:
                refused = await pool.expect_refusal(asked, 404)
                assert b"response_not_found" in refused.body
            else:
                (await pool.expect_route(asked, pod)).watch.aborted()
        assert pool.is_idle()


@pytest.mark.parametrize("path", ["/v1/render", "/v1/responses/render"])
async def test_what_only_looks_like_a_stored_response_is_none(path: str) -> None:
    async with Pool(P(), tenancy=TenancyConfig(header="x-tenant")) as pool:
        (await pool.expect_route(request(path=path), 0)).watch.aborted()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/%63ompletions", "/team/v1/completions", "/v9/of_next_year"])
async def test_a_body_is_salted_however_its_path_is_written(path: str) -> None:
    async with Pool(P(), tenancy=TenancyConfig(header="x-tenant", salt="derive")) as pool:
        pick = await pool.picked(request(path=path, headers={"x-tenant": "a"}, cache_salt="mine"))
        assert pick.body is not None
        assert len(json.loads(pick.body)["cache_salt"]) == 43
        pick.watch.aborted()
        await pool.expect_refusal(request(path=path, headers={"x-tenant": "a"}, raw=b"[1]"), 400)
        for saltless in ("/v2/embed", "/team/cohere/v2/chat", "/cohere/v2/%63hat"):
            await pool.expect_refusal(request(path=saltless, headers={"x-tenant": "a"}), 400)
        assert pool.is_idle()


async def test_where_a_header_names_tenants_a_client_names_none() -> None:
    """By llm-d's header, which clients may send."""
    async with Pool(P(), tenancy=TenancyConfig(header="x-tenant")) as pool:
        headers = {"x-llm-d-inference-fairness-id": "alice"}
        pick = await pool.picked(request(path="/v1/responses", input="x", headers=headers))
        answer(pick, b'{"id":"resp_1","object":"response"}')
        assert isinstance(pool.stored.find("resp_1", time.monotonic(), None), Place)
        assert pool.stored.find("resp_1", time.monotonic(), "alice") is None


async def test_conformance_picks_what_the_test_says() -> None:
    async with Pool(P(asked=False), P(asked=False), epp=EppConfig(conformance=True)) as pool:
        for named, pods in (
            ("192.168.1.2", {1}),
            ("192.168.1.1:8000", {0}),
            ("192.168.1.1:8000,192.168.1.2:8000", {0, 1}),
        ):
            headers = {"test-epp-endpoint-selection": named}
            picks = [await pool.picked(request(headers=headers, subset=(pool.endpoint(0),))) for _ in range(10)]
            assert {pick.endpoints for pick in picks} == {(pool.endpoint(pod),) for pod in pods}
            for pick in picks:
                pick.watch.ended()
        await pool.expect_refusal(
            request(headers={"test-epp-endpoint-selection": "192.168.1.9"}), 503, dropped="rejected-no-endpoints"
        )


async def test_elsewhere_that_header_means_nothing() -> None:
    async with Pool(P(), P(queue=5)) as pool:
        pick = await pool.expect_route(request(headers={"test-epp-endpoint-selection": "192.168.1.2"}), 0)
        assert "test-epp-endpoint-selection" in pick.remove_headers
        pick.watch.aborted()


async def test_a_refusal_is_as_the_apis_errors_are() -> None:
    async with Pool() as pool:
        refusal = await pool.refused(request())
        assert CIMultiDict(refusal.headers)["content-type"] == "application/json"
        assert refusal.headers["x-request-id"] == "test-request-id"
        assert CIMultiDict(refusal.headers)["retry-after"] == "1"
        assert refusal.details == "epp_no_worker"
        assert pool.value("warmroute_requests_total", worker="none", status="503") == 1


async def test_a_hint_at_a_subset_does_not_pass_the_queue() -> None:
    async with Pool(P(queue=4, running=1), queue=QueueConfig(waiting_per_worker=1, max_wait_s=0.05)) as pool:
        asked = request(subset=(pool.endpoint(0),))
        await pool.expect_refusal(asked, 429, dropped="rejected-ttl-expired")


async def test_a_websocket_goes_where_its_model_is_and_may_be_silent() -> None:
    async with Pool(P(), P(queue=5, adapters=("voice",))) as pool:
        pick = await pool.expect_route(get("/v1/realtime?model=voice"), 1)
        assert pool.load() == {"p0": 0, "p1": 1}
        pick.watch.responded(101, CIMultiDict(), None)
        assert pool.health.state("p1").in_flight == 0
        assert pool.fleet.workers["p1"].loads[0].streams == 1
        pick.watch.chunk(b"\x81\x00")
        pick.watch.ended()
        assert pool.is_idle()
        await pool.expect_refusal(get("/v1/realtime?model=nobody"), 404)


async def test_a_websocket_is_refused_where_it_cannot_be_salted() -> None:
    async with Pool(P(), tenancy=TenancyConfig(header="x-tenant", salt="derive")) as pool:
        for path in ("/v1/realtime", "/v1/%72ealtime", "/team/v1/realtime?model=voice"):
            await pool.expect_refusal(get(path, headers={"x-tenant": "a"}), 400)


@pytest.mark.parametrize(("length", "status"), [(1024, None), (1025, 400), (1 << 20, 400)])
async def test_a_name_that_would_come_back_with_every_token_is_bounded(length: int, status: int | None) -> None:
    async with Pool(P(), epp=EppConfig(rewrites=("old=foo",))) as pool:
        asked = request(model="m" * length, headers={"x-llm-d-model-name-rewrite": "foo"})
        if status is None:
            (await pool.picked(asked)).watch.aborted()
        else:
            await pool.expect_refusal(asked, status)
        assert pool.is_idle()


async def test_a_body_of_a_million_members_is_not_taken_apart_to_rename_its_model() -> None:
    body = b'{"model":"front",' + b",".join(b'"k%d":1' % i for i in range(150_000)) + b"}"
    async with Pool(P(), epp=EppConfig(rewrites=(f"front={BASE}",))) as pool:
        refused = await pool.expect_refusal(request(raw=body), 400)
        assert b"too many members" in refused.body
