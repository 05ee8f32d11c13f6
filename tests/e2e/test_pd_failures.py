"""Real engines that die, restart, freeze or are cut off in the middle of a handoff; leases that end; clients that
leave. Right text or a clear error, and never a decode cache with wrong blocks in it.
"""

from __future__ import annotations

import pathlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from api_client import APIS, Answer, ask, leave_after, request_body
from engines import VllmServer, free_port
from gateway_process import Face, Gateway, Sidecar, poll, report
from pd_fleet import DEADLINE_S, LEASE_FLAGS, LEASE_S, PdFleet, text_of
from tampering_proxy import TamperingProxy
from tcp_relay import TcpRelay

SEEDS = random.Random(47)
HINT = "x-prefiller-host-port"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


@pytest.fixture
def sidecar(proxy: TamperingProxy, fleet: PdFleet, engine_logs: pathlib.Path) -> Iterator[Sidecar]:
    """Before the second decode server. New for each test: what the last one broke is forgotten."""
    sidecar = Sidecar(fleet.decode[1].url, engine_logs, *LEASE_FLAGS, prefill=[proxy.url])
    sidecar.start()
    yield sidecar
    proxy.honest()
    sidecar.stop()


def hinted(proxy: TamperingProxy) -> list[tuple[str, str]]:
    return [(HINT, proxy.worker)]


@contextmanager
def asked(
    face: Face, proxy: TamperingProxy, *cases: tuple[str, dict[str, Any], bool]
) -> Iterator[list[Future[Answer]]]:
    """Requests (API, body, whether streamed). Inside, the prefill server has answered all of them, and the answers are
    held up until `proxy.gate` is set, or the end.
    """
    n_answered = proxy.n_answered
    proxy.gate.clear()
    with ThreadPoolExecutor(len(cases)) as pool:
        try:
            answers = [
                pool.submit(ask, face.url, api, body, stream=stream, headers=hinted(proxy))
                for api, body, stream in cases
            ]
            poll(
                partial(proxy.has_answered, n_answered + len(cases)), DEADLINE_S, lambda: "the prefill does not answer"
            )
            yield answers
        finally:
            proxy.gate.set()


def ids(n: int) -> list[int]:
    return [SEEDS.randrange(300, 2000) for _ in range(n)]


def right_or_error(answer: Answer, right: str) -> None:
    """No wrong text; and an error is one that a client can tell from an answer."""
    if answer.status == 200 and answer.error is None:
        assert answer.text == right
    else:
        assert answer.status >= 500 or answer.error is not None, answer


def lease_is_over(server: VllmServer, expired_before: float) -> None:
    """Wait until the server has given up what it held."""
    poll(lambda: server.metric(EXPIRED) > expired_before, DEADLINE_S, lambda: f"{server.name} still waits")


# ---- the prefill server ----------------------------------------------------------------------------------------------


def test_prefill_server_killed_between_the_legs_and_restarted(
    sidecar: Sidecar, proxy: TamperingProxy, fleet: PdFleet
) -> None:
    """P6: first its params name a dead peer: the decode server computes the prompt. Once it is back in place it is used
    again, but not what still comes from its earlier life: those blocks are gone, and the address is that of one that is
    well.
    """
    prefill = fleet.prefill[1]
    proxy.edit = dict
    streamed = {"completions": False, "responses": True}
    cases = [(api, request_body(api, SEEDS.randrange(10**9)), stream) for api, stream in streamed.items()]
    of_old, of_new, last = ({"model": "tiny", "prompt": ids(170), "max_tokens": 8, "temperature": 0} for _ in range(3))
    assert ask(sidecar.url, "completions", of_old, headers=hinted(proxy)).choice == ("remote", "hint")
    old = {**proxy.edited[-1], "remote_request_id": "cmpl-never-used-0-00000000"}
    try:
        with asked(sidecar, proxy, *cases) as answers:
            prefill.kill()
        for (api, body, _), answer in zip(cases, answers, strict=True):
            assert text_of(answer.result(DEADLINE_S)) == fleet.expected(api, body)
            assert answer.result().choice == ("local", "kv_load_failed")
    finally:
        prefill.restart_in_place()

    def is_used_again() -> bool:
        answer = ask(sidecar.url, "completions", of_new, headers=hinted(proxy))
        assert text_of(answer) == fleet.expected("completions", of_new)
        return answer.choice == ("remote", "hint")

    poll(is_used_again, DEADLINE_S, lambda: f"{prefill.name} gets no prompt any more:\n{sidecar.log_tail()}")
    proxy.edit = lambda params: old
    late = ask(sidecar.url, "completions", last, headers=hinted(proxy))
    assert text_of(late) == fleet.expected("completions", last)
    assert late.choice == ("local", "bad_params")
    for api, body, _ in (*cases, ("completions", last, False)):
        fleet.assert_cache_is_right(api, body)


def test_prefill_server_killed_under_load(fleet: PdFleet, engine_logs: pathlib.Path) -> None:
    """Every answer is right: the other one, or the decode servers themselves, take over."""
    prefill, decode = ([server.url for server in role] for role in (fleet.prefill, fleet.decode))
    gateway = Gateway([], engine_logs, "--pd-policy", "always-remote", *LEASE_FLAGS, prefill=prefill, decode=decode)
    gateway.start()
    try:
        bodies = [request_body(APIS[i % 4], SEEDS.randrange(10**9)) for i in range(24)]
        right = [fleet.expected(APIS[i % 4], body) for i, body in enumerate(bodies)]
        killer = threading.Thread(target=fleet.prefill[0].kill)
        with ThreadPoolExecutor(6) as pool:
            answers = []
            for i, body in enumerate(bodies):
                answers.append(pool.submit(ask, gateway.url, APIS[i % 4], body, stream=i % 3 == 0))
                if i == 8:
                    answers[4].result(DEADLINE_S)
                    killer.start()
            texts = [text_of(answer.result(DEADLINE_S)) for answer in answers]
        killer.join(DEADLINE_S)
        report(f"prefill server killed under load: {Counter(answer.result().choice for answer in answers)}")
        assert texts == right
    finally:
        gateway.stop()
        fleet.prefill[0].restart_in_place()


# ---- the lease -------------------------------------------------------------------------------------------------------


def test_decode_request_that_comes_too_late(sidecar: Sidecar, proxy: TamperingProxy, fleet: PdFleet) -> None:
    """P3: the prefill server's answer was held up until its lease was over and its blocks were reused."""
    prefill = fleet.prefill[1]
    body = request_body("completions", SEEDS.randrange(10**9))
    expired = prefill.metric(EXPIRED)
    with asked(sidecar, proxy, ("completions", body, False)) as (answer,):
        lease_is_over(prefill, expired)
        fleet.reuse_all_blocks(prefill)
    right_or_error(answer.result(DEADLINE_S), fleet.expected("completions", body))
    fleet.assert_cache_is_right("completions", body)


def cut_off(
    face: Face, proxy: TamperingProxy, fleet: PdFleet, api: str, stall: Callable[[], None], resume: Callable[[], None]
) -> None:
    """The decode server is out of reach from the end of the prefill until the lease is over and the blocks are reused;
    what is sent meanwhile gets there afterwards.
    """
    prefill, decode = fleet.prefill[1], fleet.decode[1]
    body = request_body(api, SEEDS.randrange(10**9))
    right = fleet.expected(api, body)
    expired = prefill.metric(EXPIRED)
    with asked(face, proxy, (api, body, True)) as (answer,):
        stall()
        try:
            proxy.gate.set()
            lease_is_over(prefill, expired)
            fleet.reuse_all_blocks(prefill)
        finally:
            resume()
    right_or_error(answer.result(DEADLINE_S), right)
    report(f"decode server out of reach past the lease: {answer.result().status} {answer.result().choice}")
    poll(lambda: decode.metric("vllm:num_requests_running") == 0, DEADLINE_S, lambda: f"{decode.name} still runs it")
    fleet.assert_cache_is_right(api, body)


@pytest.mark.parametrize("api", ["completions", "messages"])
def test_decode_server_frozen_past_the_lease(api: str, sidecar: Sidecar, proxy: TamperingProxy, fleet: PdFleet) -> None:
    """P3: our request lies in its socket when it wakes up. It must not fetch what is in the blocks by then."""
    cut_off(sidecar, proxy, fleet, api, fleet.decode[1].sigstop, fleet.decode[1].sigcont)


def test_frozen_decode_server_is_replaced(proxy: TamperingProxy, fleet: PdFleet, engine_logs: pathlib.Path) -> None:
    """With another one there, the client gets its answer; the prompt is prefilled anew for it or computed there."""
    decode = [server.url for server in fleet.decode]
    gateway = Gateway([], engine_logs, "--pd-policy", "always-remote", *LEASE_FLAGS, prefill=[proxy.url], decode=decode)
    gateway.start()
    try:
        body = request_body("chat", SEEDS.randrange(10**9))
        with asked(gateway, proxy, ("chat", body, False)) as (answer,):
            name = "warmroute_worker_booked_kv_tokens"
            chosen = next(server for server in fleet.decode if gateway.metric(name, f'"{server.worker}"'))
            chosen.sigstop()
            try:
                proxy.gate.set()
                text = text_of(answer.result(DEADLINE_S))
            finally:
                chosen.sigcont()
        assert text == fleet.expected("chat", body)
        assert answer.result().headers["x-warmroute-worker"] != chosen.worker
        report(f"frozen decode server replaced: {answer.result().choice}")
    finally:
        gateway.stop()
    poll(lambda: chosen.metric("vllm:num_requests_running") == 0, DEADLINE_S, lambda: f"{chosen.name} still runs it")
    fleet.assert_cache_is_right("chat", body)


def test_network_to_the_decode_server_stalls_past_the_lease(
    proxy: TamperingProxy, fleet: PdFleet, engine_logs: pathlib.Path
) -> None:
    """P3: as with a frozen server, but what was sent is on its way."""
    with TcpRelay(fleet.decode[1].url, free_port()) as relay:
        face = Sidecar(relay.url, engine_logs, *LEASE_FLAGS, prefill=[proxy.url])
        face.start()
        try:
            cut_off(face, proxy, fleet, "chat", relay.open.clear, relay.open.set)
        finally:
            face.stop()


def test_decode_queued_longer_than_the_lease(sidecar: Sidecar, proxy: TamperingProxy, fleet: PdFleet) -> None:
    """P4: what a decode server has, it renews the lease of; waiting there is not being late."""
    prefill, decode = fleet.prefill[1], fleet.decode[1]
    for _ in range(3):  # On a machine with other work the leg itself may come too late, and then nothing was shown.
        body = request_body("chat", SEEDS.randrange(10**9))
        right = fleet.expected("chat", body)
        expired = prefill.metric(EXPIRED)
        with ThreadPoolExecutor(20) as pool, asked(sidecar, proxy, ("chat", body, False)) as (answer,):
            # As many as it runs at once, and some that wait: longer than the lease, then their clients leave.
            long = [
                request_body("completions", SEEDS.randrange(10**9), n_words=5, max_tokens=1900, ignore_eos=True)
                for _ in range(20)
            ]
            for each in long:
                pool.submit(leave_after, decode.url, "completions", each, 2.0 * LEASE_S, stream=False)
            poll(lambda: decode.metric("vllm:num_requests_waiting") > 0, DEADLINE_S, lambda: "it is not busy")
            began_s = time.monotonic()
            proxy.gate.set()
            assert text_of(answer.result(DEADLINE_S)) == right
            queued_s = time.monotonic() - began_s
        fleet.assert_cache_is_right("chat", body)
        report(f"{queued_s:.1f} s in a decode queue with a lease of {LEASE_S} s: {answer.result().choice}")
        if answer.result().choice == ("remote", "hint") and queued_s > LEASE_S:
            break
    else:
        raise AssertionError("no handoff outlasted its lease in the queue")
    assert prefill.metric(EXPIRED) == expired


# ---- clients that leave ----------------------------------------------------------------------------------------------


def test_client_leaves_while_the_prefill_answers(sidecar: Sidecar, proxy: TamperingProxy, fleet: PdFleet) -> None:
    """Nobody will come for the blocks: they are given back, or counted as stranded until the lease is over."""
    for _ in range(3):
        n_answered = proxy.n_answered
        proxy.gate.clear()
        body = request_body("chat", SEEDS.randrange(10**9), max_tokens=200)
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(leave_after, sidecar.url, "chat", body, 1.0, headers=hinted(proxy))
            poll(partial(proxy.has_answered, n_answered + 1), DEADLINE_S, lambda: "the prefill does not answer")
            assert left.result(DEADLINE_S) == 0
            proxy.gate.set()
    fleet.wait_until_nothing_is_held()
    sidecar.wait_until_nothing_is_booked()


def test_client_leaves_while_the_decode_streams(sidecar: Sidecar, proxy: TamperingProxy, fleet: PdFleet) -> None:
    """Both engines are free long before the lease is over."""
    prefill, decode = fleet.prefill[1], fleet.decode[1]
    expired = prefill.metric(EXPIRED)
    for api in APIS:
        body = request_body(api, SEEDS.randrange(10**9), max_tokens=1500, ignore_eos=True)
        assert leave_after(sidecar.url, api, body, DEADLINE_S, headers=hinted(proxy), enough_bytes=2000) >= 2000
    poll(lambda: decode.metric("vllm:num_requests_running") == 0, DEADLINE_S, lambda: f"{decode.name} still runs it")
    fleet.wait_until_nothing_is_held()
    assert prefill.metric(EXPIRED) == expired
    sidecar.wait_until_nothing_is_booked()


def test_200_at_once_of_which_a_fifth_leaves(fleet: PdFleet, engine_logs: pathlib.Path) -> None:
    """Who stays gets the right text; afterwards nothing is booked, and no engine holds anything."""
    prefill, decode = ([server.url for server in role] for role in (fleet.prefill, fleet.decode))
    gateway = Gateway([], engine_logs, "--pd-policy", "always-remote", *LEASE_FLAGS, prefill=prefill, decode=decode)
    gateway.start()
    rng = random.Random(53)
    bodies = [(api, request_body(api, rng.randrange(10**9))) for api in APIS for _ in range(10)]
    right = [fleet.expected(api, body) for api, body in bodies]
    before = fleet.moved()

    def one(number: int) -> Answer | None:
        api, body = bodies[number % len(bodies)]
        if number % 5 == 0:
            leave_after(gateway.url, api, {**body, "ignore_eos": True}, rng.random() * 8, stream=number % 2 == 0)
            return None
        return ask(gateway.url, api, body, stream=number % 3 == 0)

    try:
        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(one, range(200)))
        for number, answer in enumerate(answers):
            if answer is not None:
                assert text_of(answer) == right[number % len(bodies)], number
        choices = Counter(answer.choice for answer in answers if answer is not None)
        report(f"200 at once: {choices}")
        assert choices["remote", "policy"] > choices.total() // 2
        assert fleet.moved() > before
        fleet.wait_until_nothing_is_held()
        gateway.wait_until_nothing_is_booked()
        report(f"200 at once: releases {gateway.metric('warmroute_pd_releases_total', 'ok')}")
    finally:
        gateway.stop()
