"""Whose answer is it: prefills of other prompts, of other requests, of other lives and of other times."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import aiohttp
import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig
from scorer.pairs import FAILURES
from scorer.types import ChangeKind, Role, WorkerChange
from tests.support.gateway_world import Fleet, decode, engine, prefill
from tests.support.handoff_world import (
    BODIES,
    IDS,
    LONG,
    N_TOKENS,
    answers,
    ask,
    bodies,
    offered,
    offers,
    refusing_releases,
    usage_of,
    world,
)
from tests.support.proxy_world import Call, Script, Stub, World, until

REMOTE = PdConfig(policy="always-remote")
COMPLETION = {"model": "m", "prompt": IDS}
GOOD = {"choices": [{"index": 0, "text": "right", "finish_reason": "length"}]}
PAIR = ("p1", "d1")


def decoder() -> Stub:
    return Stub(refusing_releases(answers(GOOD)))


# ---- a hop that mixes answers up -------------------------------------------------------------------------------------


class Hop:
    """Stands before a server and hands everything on. While `crossing`, the answers of two prefill legs that are under
    way at the same time are each given to the other.
    """

    def __init__(self, server: FakeVllm, http: aiohttp.ClientSession) -> None:
        self.crossing = False
        self._server = server
        self._http = http
        self._waiting: tuple[asyncio.Future[bytes], bytes] | None = None

    async def script(self, call: Call) -> None:
        method, path, _ = call.line.split(" ")
        passing = {n: v for n, v in call.headers if n.lower() not in ("host", "content-length", "expect")}
        data = call.body or None
        async with self._http.request(method, self._server.url + path, data=data, headers=passing) as response:
            body = await response.read()
        if self.crossing and b'"do_remote_decode":true' in call.body:
            body = await self._cross(body)
        await call.ok(body, status=f"{response.status} Whatever")

    async def _cross(self, body: bytes) -> bytes:
        if self._waiting is None:
            other: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._waiting = other, body
            return await other
        (waiting, theirs), self._waiting = self._waiting, None
        waiting.set_result(body)
        return theirs


@asynccontextmanager
async def behind_a_hop() -> AsyncIterator[tuple[Fleet, FakeVllm, Hop]]:
    """A fleet whose p1 is reached through a hop."""
    async with FakeVllm(prefill()) as p1, aiohttp.ClientSession() as http:
        hop = Hop(p1, http)
        async with Stub(hop.script) as front, Fleet(pd=REMOTE, d1=decode()) as fleet:
            await join(fleet, "p1", front.url)
            yield fleet, p1, hop


async def join(fleet: Fleet, name: str, url: str) -> None:
    fleet.core.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, url=url, role=Role.PREFILL))
    await until(lambda: name in fleet.core.capabilities)
    await until(lambda: fleet.core.fleet.workers[name].stats is not None)


def about(path: str, prompt: Any) -> dict[str, Any]:
    body = dict(BODIES[path])
    if "messages" in body:
        return {**body, "messages": [{"role": "user", "content": prompt}]}
    return {**body, "input" if "input" in body else "prompt": prompt}


OTHERS = {"shorter": "q" + LONG[:-60], "longer": "q" + LONG + "and on " * 9, "as_long": "q" + LONG[1:]}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("path", BODIES)
async def test_the_prefill_of_another_prompt_is_nobodys(path: str, other: str) -> None:
    asked = [about(path, LONG), about(path, OTHERS[other])]
    async with behind_a_hop() as (fleet, _, hop), FakeVllm(engine()) as alone:
        expected = [(await ask(fleet.http, alone.url, path, body)).text for body in asked]
        hop.crossing = True
        told = await asyncio.gather(*(ask(fleet.http, fleet.url, path, body) for body in asked))
        assert [each.text for each in told] == expected
        assert [each.went for each in told] == [("local", "bad_params")] * 2
        d1 = fleet.engines["d1"]
        assert not any(seen.leg == "decode" for seen in d1.requests), "none was let near the engine"
        assert not d1.dead
        pair = fleet.core.planner.pairs.pairs["p1", "d1"]
        assert (pair.failures, pair.state(time.monotonic())) == (0, "closed"), "the two can do nothing about it"
        hop.crossing = False
        after = [await ask(fleet.http, fleet.url, path, body) for body in asked]
        assert [each.text for each in after] == expected, "nothing wrong was left in a cache"
        assert [each.went for each in after] == [("remote", "policy")] * 2


@pytest.mark.parametrize("path", BODIES)
async def test_the_prefill_of_the_same_prompt_for_another_gives_the_right_text(path: str) -> None:
    """Where both sides say the same ids it does; where none tells, the request's id does not fit, and it is refused."""
    async with behind_a_hop() as (fleet, _, hop):
        first = await ask(fleet.http, fleet.url, path)
        assert first.went == ("remote", "policy")
        hop.crossing = True
        told = await asyncio.gather(*(ask(fleet.http, fleet.url, path) for _ in range(2)))
        assert {each.went for each in told} <= {("remote", "policy"), ("local", "bad_params")}
        assert [each.text for each in told] == [first.text] * 2
        assert not fleet.engines["d1"].dead


async def test_without_ids_to_compare_the_requests_own_id_must_be_in_the_answer() -> None:
    """The prompt's ids are not known here, and two answers of equal length look alike."""
    theirs = offers(remote_request_id="cmpl-somebody-else-0")
    async with Stub(theirs) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        chat = {**BODIES["/v1/chat/completions"], "model": "m"}
        told = await ask(it.http, it.url, "/v1/chat/completions", chat)
        assert (told.text, told.went) == ("right", ("local", "bad_params"))
        assert "p1" in it.handoffs.releases.stranded.tokens(time.monotonic())


async def test_ids_in_a_request_are_the_prompt_whatever_the_prefill_worker_says() -> None:
    said = list(reversed(IDS))

    async def script(call: Call) -> None:
        choice = {"index": 0, "text": "a", "finish_reason": "length", "prompt_token_ids": said}
        usage = usage_of("", N_TOKENS, 0)
        await call.ok(json.dumps({"choices": [choice], "usage": usage, "kv_transfer_params": offered()}).encode())

    async with Stub(script) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", "bad_params"))
        said[:] = IDS
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("remote", "policy"))
        assert [body["prompt"] for body in bodies(d1)] == [IDS, IDS]
        assert it.planner.pairs.pairs[PAIR].failed == 0


@pytest.mark.parametrize("n_tokens", [N_TOKENS - 16, N_TOKENS - 1, N_TOKENS + 1, N_TOKENS + 16])
async def test_a_prefill_of_another_length_is_of_another_prompt(n_tokens: int) -> None:
    """All it says fits together. No ids come with it where the request has brought them."""
    blocks = [list(range(-(-n_tokens // 16)))]
    offer = offers(usage=usage_of("", n_tokens, 0), remote_num_tokens=n_tokens, remote_block_ids=blocks)
    async with Stub(offer) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        for _ in range(FAILURES + 1):
            told = await ask(it.http, it.url, body=COMPLETION)
            assert (told.text, told.went) == ("right", ("local", "bad_params"))
        assert all(body == COMPLETION for body in bodies(d1))
        assert it.planner.pairs.pairs[PAIR].failed == 0


async def test_bad_params_of_the_workers_own_making_count_for_the_pair() -> None:
    async with Stub(offers(remote_port=0)) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        went = [(await ask(it.http, it.url, body=COMPLETION)).went for _ in range(FAILURES + 1)]
        assert went == [("local", "bad_params")] * FAILURES + [("local", "pair_broken")]
        assert len(p1.calls) == FAILURES


# ---- prompts whose ids nobody knows ----------------------------------------------------------------------------------


async def test_messages_stay_local_where_no_ids_are_known() -> None:
    """Their answers bring none, so the two engines might make different prompts of one text."""
    async with Stub(offers()) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        body = {"model": "m", "messages": [{"role": "user", "content": LONG}], "max_tokens": 5}
        assert (await ask(it.http, it.url, "/v1/messages", body)).went == ("local", "not_readable")
        assert p1.calls == []
        assert bodies(d1) == [body]
        assert (await ask(it.http, it.url, "/v1/chat/completions", body)).went == ("remote", "policy")


# ---- answers nobody asked for ----------------------------------------------------------------------------------------


def strays(first: Script, stray: dict[str, Any], delay_s: float) -> tuple[Script, asyncio.Event]:
    """Answers by `first`, and on the first connection a second time after `delay_s`; the event: it is out."""
    sent = asyncio.Event()

    async def script(call: Call) -> None:
        await first(call)
        if not sent.is_set():
            await asyncio.sleep(delay_s)
            await call.ok(json.dumps(stray).encode())
            sent.set()

    return script, sent


def came(it: World, name: str) -> bool:
    """Whether a pooled connection holds what nobody has asked for."""
    upstream = it.upstreams.get(name)
    assert upstream is not None
    return upstream.idle_connections == 0


STRAY = {"choices": [{"index": 0, "text": "somebody else's", "finish_reason": "length"}]}
DELAYS_S = (0.001, 0.05)


@pytest.mark.parametrize("delay_s", DELAYS_S)
@pytest.mark.parametrize("policy", ["local", "always-remote"])
async def test_a_second_answer_of_a_decode_worker_is_not_the_next_requests(policy: str, delay_s: float) -> None:
    script, sent = strays(answers(GOOD), STRAY, delay_s)
    async with Stub(offers()) as p1, Stub(script) as d1, world(PdConfig(policy=policy), p1=p1, d1=d1) as it:
        assert (await ask(it.http, it.url, body=COMPLETION)).text == "right"
        await until(sent.is_set)
        await until(lambda: came(it, "d1"))
        assert (await ask(it.http, it.url, body=COMPLETION)).text == "right"
        assert (len(d1.calls), d1.connections) == (2, 2)


@pytest.mark.parametrize("delay_s", DELAYS_S)
async def test_a_second_answer_of_a_prefill_worker_is_not_the_next_requests(delay_s: float) -> None:
    stray = {"usage": usage_of("", N_TOKENS, 0), "kv_transfer_params": offered(remote_request_id="somebody-elses")}
    script, sent = strays(offers(), stray, delay_s)
    async with Stub(script) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        await ask(it.http, it.url, body=COMPLETION)
        await until(sent.is_set)
        await until(lambda: came(it, "p1"))
        assert (await ask(it.http, it.url, body=COMPLETION)).went == ("remote", "policy")
        used = [body["kv_transfer_params"]["remote_request_id"] for body in bodies(d1)]
        assert len(used) == 2
        assert "somebody-elses" not in used
        assert (len(p1.calls), p1.connections) == (2, 2)


# ---- workers that come again, and engines of two names ---------------------------------------------------------------


async def test_a_worker_that_is_removed_and_added_again_goes_on() -> None:
    """Its engine has lived on all the while, with its id."""
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as fleet:
        p1, d1 = fleet.engines["p1"], fleet.engines["d1"]
        assert (await ask(fleet.http, fleet.url)).went == ("remote", "policy")
        for _ in range(2):
            fleet.core.apply(WorkerChange(kind=ChangeKind.REMOVED, worker="p1"))
            assert (await ask(fleet.http, fleet.url)).went == ("local", "no_prefill_worker")
            await join(fleet, "p1", p1.url)
            assert (await ask(fleet.http, fleet.url)).went == ("remote", "policy")
        used = [seen.body["kv_transfer_params"] for seen in d1.requests if seen.leg == "decode"]
        assert {params["remote_engine_id"] for params in used} == {p1.nixl[0].engine_id}


async def test_one_engine_may_be_named_twice() -> None:
    async with Fleet(pd=REMOTE, p1=prefill(), d1=decode()) as fleet:
        p1, names = fleet.engines["p1"], ("p1", "again")
        await join(fleet, "again", p1.url.replace("127.0.0.1", "localhost"))
        for name in (*names, *names):
            for each in names:
                fleet.core.fleet.workers[each].draining = each != name
            told = await ask(fleet.http, fleet.url, body=about("/v1/completions", f"{name} " + LONG))
            assert (told.went, told.outcome["prefiller"]) == (("remote", "policy"), name)
            assert told.text
        states = {pair.state(time.monotonic()) for pair in fleet.core.planner.pairs.pairs.values()}
        assert states == {"closed"}


# ---- answers that were long on their way -----------------------------------------------------------------------------


async def test_a_lease_is_over_by_the_time_the_answer_took_to_come() -> None:
    """The prefill engine was done at once, and its answer has lain somewhere for most of the lease."""
    lease_s, margin_s = 2.0, 1.5
    held_s = lease_s - margin_s + 0.1
    clock_s = time.time()

    async def late(call: Call) -> None:
        came_s = time.monotonic()
        await until(lambda: time.monotonic() > came_s + held_s)
        offer = offered(remote_request_id=f"cmpl-{call.header('X-Request-Id')}-0")
        body = json.dumps({"usage": usage_of("", N_TOKENS, 0), "kv_transfer_params": offer}).encode()
        await call.ok(body, f"Date: {formatdate(clock_s - 100, usegmt=True)}")

    pd = PdConfig(policy="always-remote", lease_s=lease_s, lease_margin_s=margin_s)
    async with Stub(late) as p1, decoder() as d1, world(pd, p1=p1, d1=d1) as it:
        it.handoffs.clock.seen("p1", formatdate(clock_s, usegmt=True))  # A scrape, answered at once.
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", "lease_over"))
        assert ["kv_transfer_params" in body for body in bodies(d1)] == [False]


# ---- what a client calls its request ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["a;choice=local;reason=plan", "a; prefiller=evil", 'a"b";x=1', "a=b", "a%3Bchoice=local", "\u00e4;id=b"],
)
async def test_a_request_id_adds_nothing_to_the_outcome(name: str) -> None:
    async with Stub(offers()) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION, X_Request_Id=name)
        shown = told.headers["x-warmroute-outcome"]
        fields = [part.partition("=") for part in shown.split(";")]
        assert [field for field, _, _ in fields] == ["id", "choice", "reason", "prefiller", "prefill_ms"]
        assert not any(mark in value for _, _, value in fields for mark in '=;" ')
        assert told.went == ("remote", "policy") or not name.isascii()
        for stub in (p1, d1):
            assert stub.calls[0].header("X-Request-Id") is not None
