"""What stands around a handoff and is none of ours: engines that fail by themselves, servers of other manners, faces of
ours before and behind us.
"""

import asyncio
import gzip
import json
import logging
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bench.engine.server import FakeVllm
from gateway.config.schema import PdConfig
from gateway.engine.health import State
from gateway.sidecar.hints import PREFILLER
from scorer.pairs import FAILURES
from tests.support.gateway_world import decode, engine, prefill
from tests.support.handoff_world import (
    BODIES,
    IDS,
    LONG,
    ROLES,
    answers,
    ask,
    bodies,
    offers,
    refusing_releases,
    releases,
    streams,
    usage_of,
    world,
)
from tests.support.proxy_world import Call, Stub, World, until
from tests.support.sidecar_world import Pod

REMOTE = PdConfig(policy="always-remote")
COMPLETION = {"model": "m", "prompt": IDS}
CHAT = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
GOOD = {"choices": [{"index": 0, "text": "right", "finish_reason": "length"}]}
PAIR = ("p1", "d1")


def decoder() -> Stub:
    return Stub(refusing_releases(answers(GOOD)))


def is_leg(call: Call) -> bool:
    return b"kv_transfer_params" in call.body


# ---- what is no failure of the pair, and what is ---------------------------------------------------------------------

ECHOED = {"metadata": {"finish_reason": "error"}, "usage": usage_of("/v1/responses", 64, 1), "output": []}
_CREATED = {"type": "response.created", "response": ECHOED}
_DELTA = {"type": "response.output_text.delta", "delta": "right"}
_DONE = {"type": "response.completed", "response": ECHOED}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_has_called_an_error_is_none(stream: bool) -> None:
    events = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in (_CREATED, _DELTA, _DONE)]
    script = streams(*events) if stream else answers(ECHOED)
    async with Stub(offers()) as p1, Stub(script) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        body = {"model": "m", "input": LONG, "metadata": {"finish_reason": "error"}, "stream": stream}
        for _ in range(FAILURES + 1):
            told = await ask(it.http, it.url, "/v1/responses", body)
            assert (told.status, told.went) == (200, ("remote", "policy"))
            assert '"finish_reason": "error"' in told.body or '"finish_reason":"error"' in told.body
        assert len(d1.calls) == FAILURES + 1
        assert it.planner.pairs.pairs[PAIR].failed == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_ended_in_error_is_a_failure(path: str, stream: bool) -> None:
    choice = {"index": 0, "finish_reason": "error", "text": "", "message": {"content": ""}, "delta": {}}
    bad = {"choices": [choice]}
    failed = streams(b"data: " + json.dumps(bad).encode() + b"\n\n") if stream else answers(bad)

    async def script(call: Call) -> None:
        await (failed if is_leg(call) else answers(GOOD))(call)

    async with Stub(offers()) as p1, Stub(refusing_releases(script)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, path, {**COMPLETION, **CHAT, "stream": stream})
        assert told.went == ("local", "kv_load_failed")
        assert json.loads(told.body) == GOOD
        assert it.planner.pairs.pairs[PAIR].failed == 1


@pytest.mark.parametrize("always", [True, False])
async def test_only_what_fails_with_params_alone_is_the_pairs_fault(always: bool) -> None:
    error = answers(b'{"error": {"type": "InternalServerError"}}', "500 Internal Server Error")

    async def script(call: Call) -> None:
        await (error if always or is_leg(call) else answers(GOOD))(call)

    async with Stub(offers()) as p1, Stub(refusing_releases(script)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = [await ask(it.http, it.url, body=COMPLETION) for _ in range(FAILURES + 1)]
        assert {each.status for each in told} == ({500} if always else {200})
        broken = 0 if always else 1
        n_tried = len(told) - broken
        assert [each.went[1] for each in told] == ["kv_load_failed"] * n_tried + ["pair_broken"] * broken
        assert len(p1.calls) == n_tried
        await until(it.is_idle)


# ---- servers of other manners ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["413 Content Too Large", "417 Expectation Failed", "431 Headers Too Large"])
@pytest.mark.parametrize("always", [True, False])
async def test_a_refusal_that_may_be_about_what_we_added(status: str, always: bool) -> None:
    refusal = answers(b'{"error": "too much"}', status)

    async def script(call: Call) -> None:
        await (refusal if always or is_leg(call) or call.header("Expect") else answers(GOOD))(call)

    async with Stub(offers()) as p1, Stub(refusing_releases(script)) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION)
        assert told.went == ("local", "decode_failed")
        assert (told.status, json.loads(told.body)) == (
            (int(status[:3]), {"error": "too much"}) if always else (200, GOOD)
        )
        assert bodies(d1)[1:] == [COMPLETION], "once more, as the client has sent it"
        assert [call.header("Expect") for call in d1.calls if not is_leg(call)] == [None]
        await until(lambda: len(releases(d1)) == 1)
        assert it.planner.pairs.pairs[PAIR].failed == 0
        await until(it.is_idle)


@asynccontextmanager
async def bare(expecting: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that says `expecting` to heads with an Expect and closes; to all others `GOOD`."""
    heads: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head.lower())
            if b"100-continue" in heads[-1]:
                writer.write(expecting)
            else:
                length = next(row for row in heads[-1].split(b"\r\n") if row.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                body = json.dumps(GOOD).encode()
                rows = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d"
                writer.write(rows % len(body) + b"\r\n\r\n" + body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


EXPECTED = {
    "continue_then_close": b"HTTP/1.1 100 Continue\r\n\r\n",
    "417_at_the_head": b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("case", EXPECTED)
async def test_the_second_try_at_the_only_decode_worker_is_local(case: str) -> None:
    async with (
        bare(EXPECTED[case]) as (url, heads),
        Stub(offers()) as p1,
        World({"p1": p1.url, "d1": url}, pd=REMOTE, roles=ROLES) as it,
    ):
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("local", "decode_failed"))
        assert len(p1.calls) == 1
        assert b"100-continue" in heads[0]
        await until(it.is_idle)


async def test_a_server_that_did_not_ask_for_a_body_is_given_another_chance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.handoff.watch.LEAVE_S", 0.1)
    asked: list[bool] = []

    class Watched(Stub):
        async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wait = reader.readuntil

            async def readuntil(separator: bytes = b"\n") -> bytes:
                head = await wait(separator)
                asked.append(b"100-continue" in head.lower())
                return head

            reader.readuntil = readuntil  # type: ignore[method-assign,assignment]
            await super()._accept(reader, writer)

    async with (
        Stub(offers()) as p1,
        Watched(refusing_releases(answers(GOOD))) as d1,
        world(REMOTE, p1=p1, d1=d1) as it,
    ):
        d1.continues = False
        with caplog.at_level(logging.WARNING, "gateway.handoff.fetch"):
            for _ in range(2):
                told = await ask(it.http, it.url, body=COMPLETION)
                assert (told.text, told.went) == ("right", ("remote", "policy"))
        assert asked == [True, False, False], "found out once"
        assert [record.args for record in caplog.records if "does not ask" in record.msg] == [("d1",)]
        upstream = it.upstreams.get("d1")
        assert upstream is not None
        assert time.monotonic() < upstream.deaf_until_s < time.monotonic() + 3600
        upstream.deaf_until_s = time.monotonic()  # It is some minutes later.
        d1.continues = True
        assert (await ask(it.http, it.url, body=COMPLETION)).went == ("remote", "policy")
        assert asked[3:] == [True]


async def test_a_compressed_stream_passes_at_once_and_unchanged() -> None:
    """What it is made of may look like lines with a figure that we would set right."""
    event = json.dumps({"choices": [], "usage": usage_of("", 64, 49)}).encode()
    text = [b"data: {}\n\ndata: " + event + b"\n\n" for _ in range(2)]
    packer = zlib.compressobj(level=0, wbits=31)
    pieces = [packer.compress(line) + packer.flush(zlib.Z_SYNC_FLUSH) for line in text]
    pieces[1] += packer.flush()
    seen = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        await call.chunk(pieces[0])
        await seen.wait()
        await call.chunk(pieces[1])
        await call.end_stream()

    async with Stub(offers()) as p1, Stub(script) as d1, world(REMOTE, p1=p1, d1=d1) as it:
        asked = it.http.post(it.url + "/v1/completions", json={**COMPLETION, "stream": True})
        async with asyncio.timeout(20), asked as response:
            assert "choice=remote" in response.headers["x-warmroute-outcome"]
            got = bytearray()
            while len(got) < len(pieces[0]):
                got += await response.content.readany()
            seen.set()
            got += await response.content.read()
        assert bytes(got) == b"".join(pieces)
        assert gzip.decompress(got) == b"".join(text)


# ---- prefill workers that stop ---------------------------------------------------------------------------------------


async def hangs(call: Call) -> None:
    await call.wait_hang_up()


def down(it: World) -> None:
    it.down.add("p1")


def ejected(it: World) -> None:
    """Its neighbours answer, and it cannot be reached."""
    at_s = time.monotonic()
    it.health.checked("p1", False, at_s)
    it.health.checked("p2", True, at_s)
    it.health.checked("p1", False, at_s)
    assert it.health.state("p1").state is State.EJECTED


@pytest.mark.parametrize("how", [down, ejected])
async def test_requests_leave_a_frozen_prefill_worker_when_it_is_known_to_be(how: Callable[[World], None]) -> None:
    """Long before `pd.prefill_timeout_s`."""
    async with Stub(hangs) as p1, Stub(offers()) as p2, decoder() as d1, world(REMOTE, p1=p1, p2=p2, d1=d1) as it:
        it.down.add("p2")
        asked = [asyncio.create_task(ask(it.http, it.url, body=COMPLETION)) for _ in range(3)]
        await until(lambda: len(p1.calls) == 3)
        it.down.discard("p2")
        how(it)
        for told in await asyncio.wait_for(asyncio.gather(*asked), 30):
            assert (told.text, told.went, told.outcome["prefiller"]) == ("right", ("remote", "policy"), "p2")
        await until(lambda: all(call.hung_up.is_set() for call in p1.calls))
        assert it.value("warmroute_pd_retries_total", stage="prefill", reason="prefill_timeout") == 3
        await until(it.is_idle)


async def test_the_probe_of_a_prefill_worker_takes_the_time_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else may go there meanwhile; that is no reason to leave."""
    monkeypatch.setattr("gateway.handoff.handoff._LOOK_S", 0.01)
    offer = offers()

    async def slow(call: Call) -> None:
        came_s = time.monotonic()
        await until(lambda: time.monotonic() > came_s + 0.2)
        await offer(call)

    async with Stub(slow) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        it.health.add("p2", time.monotonic())
        ejected(it)
        it.health.tick(time.monotonic() + 1.5)
        assert it.health.state("p1").state is State.HALF_OPEN
        told = await ask(it.http, it.url, body=COMPLETION)
        assert (told.text, told.went) == ("right", ("remote", "policy"))
        assert it.health.state("p1").state is State.HEALTHY


# ---- faces of ours before and behind us ------------------------------------------------------------------------------

LEG = "x-warmroute-leg"


async def test_a_prefill_leg_is_carried_out_where_it_arrives() -> None:
    async with Stub(offers()) as p1, decoder() as d1, world(REMOTE, p1=p1, d1=d1) as it:
        told = await ask(it.http, it.url, body=COMPLETION, x_warmroute_leg="prefill")
        assert (told.text, told.went) == ("right", ("local", "plan"))
        assert p1.calls == []
        assert d1.calls[0].header(LEG) is None
        assert (await ask(it.http, it.url, body=COMPLETION)).went == ("remote", "policy")
        assert (p1.calls[0].header(LEG), d1.calls[1].header(LEG)) == ("prefill", None)


async def test_a_prefill_leg_stays_in_the_pod_it_is_sent_to() -> None:
    async with FakeVllm(prefill()) as p1, Pod(decode(), pd=PdConfig(policy="always-remote", allow=("*",))) as pod:
        hint = (PREFILLER, p1.url.removeprefix("http://"))
        status, _, headers = await pod.complete(hint, (LEG, "prefill"), prompt=LONG)
        assert status == 200
        assert "choice=local" in headers["x-warmroute-outcome"]
        assert list(p1.requests) == []
        assert LEG not in {name.lower() for name in pod.engines[0].requests[0].headers}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_two_faces_that_name_each_other(path: str) -> None:
    body = COMPLETION if path == "/v1/completions" else CHAT
    async with decoder() as d1, world(REMOTE, d1=d1) as one, world(REMOTE, d1=d1) as other:
        one.add("p1", other.url)
        other.add("p1", one.url)
        told = await asyncio.wait_for(ask(one.http, one.url, path, body), 20)
        assert (told.status, told.went) == (200, ("local", "no_params"))
        assert json.loads(told.body) == GOOD
        assert [is_leg(call) for call in d1.calls] == [False, False], "after one hop it was done where it was"
        await until(lambda: one.is_idle() and other.is_idle())


async def test_a_face_that_names_itself() -> None:
    async with decoder() as d1, world(REMOTE, d1=d1) as it:
        it.add("p1", it.url.replace("127.0.0.1", "localhost"))
        told = await asyncio.wait_for(ask(it.http, it.url, body=COMPLETION), 20)
        assert (told.text, told.went) == ("right", ("local", "no_params"))
        assert len(d1.calls) == 2
        await until(it.is_idle)


async def test_a_pod_that_is_named_under_an_address_it_does_not_know_as_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service's address, say: the hint leads back here."""
    async with Pod(decode(), pd=PdConfig(allow=("*",))) as pod:
        monkeypatch.setattr(pod.sidecar.pod, "is_self", lambda *_: False)
        here = f"127.0.0.1:{pod.sidecar.ports[0]}"
        status, _, headers = await asyncio.wait_for(pod.complete((PREFILLER, here), prompt=LONG), 20)
        assert status == 200
        assert "choice=local;reason=no_params" in headers["x-warmroute-outcome"]
        assert len(pod.engines[0].requests) == 2


@pytest.mark.parametrize("engine_too", [True, False])
async def test_a_decode_worker_that_is_a_sidecar_is_found_out(engine_too: bool) -> None:
    """It lets no params through: its engine computes the prompt itself, and only another can give back what is held."""
    async with FakeVllm(prefill()) as p1, FakeVllm(decode()) as d2, Pod(decode()) as pod, FakeVllm(engine()) as alone:
        workers = {"p1": p1.url, "d1": pod.url()} | ({"d2": d2.url} if engine_too else {})
        async with World(workers, model="tiny", pd=REMOTE, roles=ROLES) as it:
            if engine_too:
                it.fleet.workers["d2"].draining = True
            body = BODIES["/v1/completions"]
            expected = (await ask(it.http, alone.url, body=body)).text
            first = await ask(it.http, it.url, body=body)
            assert (first.text, first.went) == (expected, ("remote", "policy"))
            assert not any(seen.leg == "decode" for seen in pod.engines[0].requests)
            second = await ask(it.http, it.url, body=body)
            assert (second.text, second.went) == (expected, ("local", "pair_incompatible"))
            assert sum(seen.leg == "prefill" for seen in p1.requests) == 1
            labels = {"prefill": "p1", "decode": "d1", "outcome": "pair_incompatible"}
            assert it.value("warmroute_pd_handoffs_total", **labels) == 1
            outcome = "ok" if engine_too else "failed"
            await until(lambda: it.value("warmroute_pd_releases_total", outcome=outcome) == 1)
            assert (p1.held_blocks == 0) is engine_too
            held = it.handoffs.releases.stranded.tokens(time.monotonic())
            assert list(held) == ([] if engine_too else ["p1"])
            await until(it.is_idle)
