"""What goes wrong with a handoff ends in the right text or a clear error, and never in a dead engine."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig
from gateway.sidecar.hints import Hints
from tests.support.gateway_world import Fleet, decode, engine, prefill, until
from tests.support.handoff_world import (
    BODIES,
    IDS,
    answers,
    ask,
    bodies,
    offers,
    refusing_releases,
    resets,
    stages,
    world,
)
from tests.support.proxy_world import Call, Script, Stub

REMOTE = PdConfig(policy="always-remote")
COMPLETION = {"model": "m", "prompt": IDS}
GOOD = {"choices": [{"index": 0, "text": "right", "finish_reason": "length"}]}


def pd(**changes: Any) -> PdConfig:
    return PdConfig(policy="always-remote", **changes)


def decoder() -> Stub:
    return Stub(refusing_releases(answers(GOOD)))


# ---- the prefill leg -------------------------------------------------------------------------------------------------


async def sleeps(call: Call) -> None:
    await call.wait_hang_up()


async def cuts(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    call.reset()


BAD_PREFILLS: dict[str, tuple[Script | None, str]] = {
    "refused": (None, "prefill_failed"),
    "timeout": (sleeps, "prefill_timeout"),
    "500": (answers(b"{}", "500 Internal Server Error"), "prefill_failed"),
    "503": (answers(b"{}", "503 Service Unavailable", "Retry-After: 1"), "prefill_failed"),
    "cut": (cuts, "prefill_failed"),
    "reset": (resets(), "prefill_failed"),
    "not_json": (answers(b"<html>"), "prefill_failed"),
    "not_an_object": (answers(b"[1]"), "prefill_failed"),
    "empty": (answers(b""), "prefill_failed"),
    "redirect": (answers(b"", "307 Temporary Redirect", "Location: http://127.0.0.1:1/"), "prefill_failed"),
    "error_with_200": (answers({"error": {"message": "no"}}), "prefill_failed"),
    "no_params": (answers({"usage": {"prompt_tokens": 64}}), "no_params"),
    "null_params": (answers({"usage": {"prompt_tokens": 64}, "kv_transfer_params": None}), "no_params"),
    "empty_params": (answers({"usage": {"prompt_tokens": 64}, "kv_transfer_params": {}}), "no_params"),
    "params_of_another_kind": (answers({"kv_transfer_params": "yes"}), "prefill_failed"),
}


MAY_HOLD = ("cut", "not_json", "not_an_object", "empty", "error_with_200", "params_of_another_kind")
"""The work was done; only an answer that can be read tells what is held for it."""


class Two:
    """A data plane with a bad p1, a good p2 and d1."""

    def __init__(self, case: str, config: PdConfig, *, second: bool = True) -> None:
        self._script, self.reason = BAD_PREFILLS[case]
        self._config, self._second = config, second

    async def __aenter__(self) -> "Two":
        self.p1 = Stub(self._script or answers())
        self.p2, self.d1 = Stub(offers(remote_engine_id="engine-of-p2")), decoder()
        for stub in (self.p1, self.p2, self.d1):
            await stub.__aenter__()
        if self._script is None:
            self.p1._server.close()  # type: ignore[union-attr]
        stubs = {"p1": self.p1, "p2": self.p2, "d1": self.d1} if self._second else {"p1": self.p1, "d1": self.d1}
        self.world = await world(self._config, **stubs).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.world.__aexit__()
        for stub in (self.p1, self.p2, self.d1):
            await stub.__aexit__()

    async def ask(self, **headers: str) -> Any:
        self.world.hints = Hints(prefill=("p1", "p2"))  # In this order.
        told = await ask(self.world.http, self.world.url, body=COMPLETION, **headers)
        await until(self.world.is_idle)
        assert not [pair for pair in self.world.planner.pairs.pairs.values() if pair.probing]
        return told


@pytest.mark.parametrize("case", BAD_PREFILLS)
async def test_a_bad_prefill_goes_to_the_next_worker(case: str) -> None:
    async with Two(case, pd(prefill_timeout_s=1.0)) as it:
        told = await it.ask()
        assert told.text == "right"
        assert told.went == ("remote", "hint")
        assert told.outcome["prefiller"] == "p2"
        (body,) = bodies(it.d1)
        assert body["kv_transfer_params"]["remote_engine_id"] == "engine-of-p2"
        assert it.world.value("warmroute_pd_retries_total", stage="prefill", reason=it.reason) == 1
        labels = {"prefill": "p1", "decode": "d1", "outcome": it.reason}
        assert it.world.value("warmroute_pd_handoffs_total", **labels) == 1


@pytest.mark.parametrize("case", BAD_PREFILLS)
async def test_with_no_next_worker_the_decode_worker_computes_the_prompt(case: str) -> None:
    async with Two(case, pd(prefill_timeout_s=1.0), second=False) as it:
        told = await it.ask()
        assert told.text == "right"
        assert told.went == ("local", it.reason)
        assert told.outcome["prefiller"] == "p1", "who was asked"
        assert bodies(it.d1) == [COMPLETION]
        stranded = it.world.handoffs.releases.stranded.total_tokens
        assert stranded == (64 if case in MAY_HOLD else 0)


@pytest.mark.parametrize(
    ("on_prefill_failure", "asked_next", "status", "went"),
    [
        ("next,local", True, 200, ("remote", "hint")),
        ("next,fail", True, 200, ("remote", "hint")),
        ("local", False, 200, ("local", "prefill_failed")),
        ("fail", False, 502, None),
    ],
)
async def test_what_is_done_about_a_failure_is_configured(
    on_prefill_failure: Any, asked_next: bool, status: int, went: tuple[str, str] | None
) -> None:
    async with Two("500", pd(on_prefill_failure=on_prefill_failure)) as it:
        told = await it.ask()
        assert told.status == status
        assert (len(it.p2.calls) == 1) is asked_next
        assert len(bodies(it.d1)) == (status == 200)
        if went is not None:
            assert told.went == went
        else:
            assert json.loads(told.body)["error"]["code"] == "prefill_failed"
            assert stages(it.world) == {("prefill", "prefill_failed"): 1}
            assert "prefill_failed" in json.loads(told.body)["error"]["message"]
            assert told.outcome["prefiller"] == "p1"
            assert told.headers["Retry-After"]


@pytest.mark.parametrize(("case", "status"), [("500", 502), ("refused", 502), ("timeout", 504), ("no_params", 502)])
async def test_without_local_the_last_failure_is_the_requests(case: str, status: int) -> None:
    async with Two(case, pd(prefill_timeout_s=1.0, on_prefill_failure="next,fail"), second=False) as it:
        told = await it.ask()
        assert told.status == status
        assert told.outcome["prefiller"] == "p1"
        assert json.loads(told.body)["error"]["type"] == "upstream_error"
        assert it.d1.calls == []


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "401 Unauthorized", "422 Unprocessable Entity"])
async def test_a_prefill_4xx_is_the_clients_answer(status: str) -> None:
    body = b'{"error": {"message": "as the engine says", "code": 400}}'
    async with (
        Stub(answers(body, status, "X-Engine: 1")) as p1,
        decoder() as d1,
        world(REMOTE, p1=p1, d1=d1) as it,
    ):
        told = await ask(it.http, it.url, body=COMPLETION, X_Request_Id="mine")
        assert (told.status, told.body.encode()) == (int(status[:3]), body)
        assert told.headers["X-Engine"] == "1"
        assert told.headers["Content-Type"] == "application/json"
        assert told.headers["X-Request-Id"] == "mine"
        assert told.went == ("remote", "policy")
        assert told.outcome["prefiller"] == "p1"
        assert d1.calls == []
        await until(it.is_idle)
        assert it.value("warmroute_pd_handoffs_total", prefill="p1", decode="d1", outcome="refused") == 1
        assert stages(it) == {("prefill", "refused"): 1}


async def test_not_every_prefill_worker_is_asked_for_one_request() -> None:
    bad = answers(b"{}", "500 Internal Server Error")
    async with Stub(bad) as p1, Stub(bad) as p2, Stub(bad) as p3, Stub(bad) as p4, decoder() as d1:
        it = world(REMOTE, p1=p1, p2=p2, p3=p3, d1=d1)
        it._workers["p4"] = p4.url
        it._roles = {**it._roles, "p4": it._roles["p1"]}
        async with it:
            assert (await ask(it.http, it.url, body=COMPLETION)).went == ("local", "prefill_failed")
            assert sum(len(stub.calls) for stub in (p1, p2, p3, p4)) == 3


async def test_a_pooled_connection_closed_by_the_prefill_worker_is_replaced_once() -> None:
    """An idle server closes; the next request finds that out."""
    good = offers()

    async def closes_with_the_second(call: Call) -> None:
        if call is not first(p1):
            call.reset()
            return
        await good(call)

    def first(stub: Stub) -> Call:
        """The first of its connection."""
        return next(c for c in stub.calls if c.writer is stub.calls[-1].writer)

    async with Stub(closes_with_the_second) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        for _ in range(2):
            assert (await ask(it.http, it.url, body=COMPLETION)).went == ("remote", "policy")
        assert (len(p1.calls), p1.connections, len(bodies(d1))) == (3, 2, 2)


# ---- what the prefill worker offers ----------------------------------------------------------------------------------

BAD_OFFERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "only_do_remote_prefill": lambda it: {"do_remote_prefill": True},
    "no_request_id": lambda it: {k: v for k, v in it.items() if k != "remote_request_id"},
    "no_engine_id": lambda it: {**it, "remote_engine_id": None},
    "no_blocks": lambda it: {**it, "remote_block_ids": None},
    "empty_group": lambda it: {**it, "remote_block_ids": [[]]},
    "flat_blocks": lambda it: {**it, "remote_block_ids": it["remote_block_ids"][0]},
    "too_few_blocks": lambda it: {**it, "remote_block_ids": [it["remote_block_ids"][0][:-1]]},
    "too_many_blocks": lambda it: {**it, "remote_block_ids": [[*it["remote_block_ids"][0], 999]]},
    "negative_block": lambda it: {**it, "remote_block_ids": [[-1, *it["remote_block_ids"][0][1:]]]},
    "block_twice": lambda it: {**it, "remote_block_ids": [[*it["remote_block_ids"][0][:-1], 1]]},
    "another_prompt": lambda it: {**it, "remote_num_tokens": it["remote_num_tokens"] - 1},
    "foreign_host": lambda it: {**it, "remote_host": "10.1.2.3"},
    "no_port": lambda it: {**it, "remote_port": 0},
    "not_for_decoding": lambda it: {**it, "do_remote_prefill": False},
    "push": lambda it: {**it, "transfer_mode": "push"},
}


@pytest.mark.parametrize("case", BAD_OFFERS)
async def test_bad_params_never_reach_an_engine(case: str) -> None:
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as fleet, FakeVllm(engine()) as alone:
        expected = (await ask(fleet.http, alone.url)).text
        p1, d1 = fleet.engines["p1"], fleet.engines["d1"]
        p1.faults.offer = BAD_OFFERS[case]
        told = await ask(fleet.http, fleet.url)
        assert told.text == expected
        assert told.went == ("local", "bad_params")
        assert [seen.leg for seen in d1.requests] == ["plain"]
        stranded = fleet.core.handoffs.releases.stranded
        assert stranded.total_tokens == told.prompt_and_cached[0], "nobody can give those back"
        p1.faults.offer = None
        assert (await ask(fleet.http, fleet.url)).went == ("remote", "policy")
        assert not d1.dead


@pytest.mark.parametrize(
    "offer",
    [
        lambda it: {**it, "remote_engine_id": "another-life"},
        lambda it: {**it, "remote_block_ids": [[90_000 + i for i in it["remote_block_ids"][0]]]},
        lambda it: {**it, "remote_port": 1},
    ],
    ids=["engine_id", "blocks_out_of_range", "dead_side_channel"],
)
async def test_params_only_an_engine_can_see_through_fail_there_and_are_made_good(offer: Any) -> None:
    """Wrong engine id, blocks out of range, a dead side channel: the fetch fails, the decode worker computes."""
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as fleet, FakeVllm(engine()) as alone:
        p1, d1 = fleet.engines["p1"], fleet.engines["d1"]
        for path in BODIES:
            for stream in (False, True):
                body = {**BODIES[path], "stream": stream}
                expected = (await ask(fleet.http, alone.url, path, body)).text
                fleet.core.planner.pairs.forget("p1")
                p1.faults.offer = offer
                told = await ask(fleet.http, fleet.url, path, body)
                assert told.text == expected
                assert told.went == ("local", "kv_load_failed")
                p1.faults.offer = None
                assert (await ask(fleet.http, fleet.url, path, body)).text == expected
        assert not d1.dead
        await until(lambda: fleet.core.planner.in_flight() == 0)


async def test_an_offer_made_twice_is_used_once() -> None:
    async with (
        Stub(offers(remote_request_id="cmpl-the-same-0")) as p1,
        decoder() as d1,
        world(REMOTE, p1=p1, d1=d1) as it,
    ):
        for went in (("remote", "policy"), ("local", "bad_params")):
            assert (await ask(it.http, it.url, body=COMPLETION, X_Request_Id="the-same")).went == went
        assert ["kv_transfer_params" in body for body in bodies(d1)] == [True, False]
