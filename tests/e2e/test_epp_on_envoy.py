"""A real Envoy, two pickers, sidecars, and real prefill and decode servers behind them."""

from __future__ import annotations

import contextlib
import pathlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from api_client import APIS, Answer, ask, request_body
from engines import BLOCK_TOKENS
from gateway_process import Epp, Sidecar, poll, report
from pd_fleet import DEADLINE_S, LEASE_FLAGS, PdFleet, text_of

from bench.epp.envoy import Envoy, at, cluster, fit, shipped

SEEDS = random.Random(83)
PROMPT_WORDS = 90
LONG_ANSWER_TOKENS = 1200
PATIENT = ("--gateway-connect-timeout-s", "30")
"""Engines and all that stands before them share two cores: a connection may take its time."""


class Front(NamedTuple):
    """What clients meet, and who stands behind it."""

    envoy: Envoy
    pickers: list[Epp]
    sidecars: list[Sidecar]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.envoy.port}"

    def healthy(self) -> int:
        """Pickers that Envoy sends to."""
        return self.envoy.stats("^cluster.picker.membership_healthy$")["cluster.picker.membership_healthy"]

    def wait_until_all_pick(self) -> None:
        poll(lambda: self.healthy() == len(self.pickers), DEADLINE_S, lambda: f"{self.healthy()} pickers are healthy")

    def wait_until_nothing_is_booked(self) -> None:
        for picker in self.pickers:
            picker.wait_until_nothing_is_booked()


@pytest.fixture(scope="module")
def front(pd_servers: PdFleet, engine_logs: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with contextlib.ExitStack() as stack:
        sidecars = []
        for server in pd_servers.decode:
            sidecar = Sidecar(
                server.url, engine_logs, *LEASE_FLAGS, *PATIENT, prefill=[s.url for s in pd_servers.prefill]
            )
            stack.callback(sidecar.stop)
            sidecar.start()
            sidecars.append(sidecar)
        decode = list(zip(sidecars, pd_servers.decode, strict=True))
        pickers = [Epp(pd_servers.prefill, decode, engine_logs) for _ in range(2)]
        for picker in pickers:
            stack.callback(picker.stop)
            picker.start()
        config = shipped("standalone")
        fit(config, picker=pickers[0].port)
        at(cluster(config, "picker"), *(picker.port for picker in pickers))
        cluster(config, "pods")["connect_timeout"] = "30s"
        envoy = stack.enter_context(Envoy(config, tmp_path_factory.mktemp("envoy")))
        front = Front(envoy, pickers, sidecars)
        front.wait_until_all_pick()
        yield front


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_a_cold_prompt_is_computed_elsewhere_and_a_warm_one_at_home(
    api: str, stream: bool, front: Front, fleet: PdFleet
) -> None:
    """The picker decides once, and the sidecar does as it says; the next turn finds its cache."""
    body = request_body(api, SEEDS.randrange(10**9), n_words=PROMPT_WORDS)
    right = fleet.expected(api, body)
    bytes_before, tokens_before = fleet.moved()
    first = ask(front.url, api, body, stream=stream)
    assert text_of(first) == right
    assert first.choice == ("remote", "hint"), first.headers
    assert first.outcome["prefiller"] in {server.worker for server in fleet.prefill}
    bytes_after, tokens_after = fleet.moved()
    assert bytes_after > bytes_before
    assert first.prompt_tokens is not None
    assert tokens_after - tokens_before == first.prompt_tokens

    whole_blocks = (first.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def is_known_at(n_servers: int) -> bool:  # By both, to the last block: else it would be worth a hand-over again.
        held = [list(picker.explain(body).values()) for picker in front.pickers]
        return all(tokens.count(whole_blocks) >= n_servers for tokens in held)

    if api in ("chat", "completions"):
        # A server that seems busy or slow may lose a turn to another one, which is cold then, but never to a third.
        for n_servers in range(1, len(front.sidecars) + 1):
            poll(
                lambda n=n_servers: is_known_at(n),
                DEADLINE_S,
                lambda: f"{[picker.explain(body) for picker in front.pickers]}",
            )
            front.wait_until_nothing_is_booked()
            again = ask(front.url, api, body, stream=stream)
            assert text_of(again) == right
            if again.choice[0] == "local":
                break
        assert again.choice[0] == "local"
        assert again.cached_tokens == whole_blocks
    front.wait_until_nothing_is_booked()


def test_many_at_once_are_right_and_leave_nothing(front: Front, fleet: PdFleet) -> None:
    bodies = [request_body("completions", SEEDS.randrange(10**9), n_words=n) for n in (10, 40, 70) for _ in range(4)]
    expected = [fleet.expected("completions", body) for body in bodies]
    answers: list[Answer | None] = [None] * len(bodies)

    def run(number: int) -> None:
        answers[number] = ask(front.url, "completions", bodies[number], stream=number % 2 == 0)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [None if answer is None else text_of(answer) for answer in answers] == expected
    report(f"through Envoy at once: {Counter(answer.choice for answer in answers if answer is not None)}")
    front.wait_until_nothing_is_booked()
    fleet.wait_until_nothing_is_held()


def test_a_picker_that_is_killed_cuts_its_answers_and_the_other_goes_on(front: Front, fleet: PdFleet) -> None:
    """docs/envoy.md: full duplex, an answer passes through its picker, and ends with it. Whoever asks then is served by
    the other one; the engines stop what nobody reads, and the killed picker comes back.
    """
    victim, other = front.pickers
    cut: list[Answer] = []

    def stream() -> None:
        body = request_body(
            "completions", SEEDS.randrange(10**9), n_words=20, max_tokens=LONG_ANSWER_TOKENS, ignore_eos=True
        )
        cut.append(ask(front.url, "completions", body, stream=True))

    threads = [threading.Thread(target=stream) for _ in range(4)]
    for thread in threads:
        thread.start()

    def both_have_some() -> bool:
        return all(picker.metric("warmroute_requests_in_flight") > 0 for picker in front.pickers)

    poll(both_have_some, DEADLINE_S, lambda: "the pickers do not share the streams")
    victim.kill()
    try:
        for thread in threads:
            thread.join(DEADLINE_S)
        # One that had no byte of its answer yet is refused by Envoy, with nothing to read.
        ends = Counter("cut" if answer.error or answer.status >= 500 else "whole" for answer in cut)
        report(f"one of two pickers killed under 4 streams: {dict(ends)}")
        assert ends["cut"] >= 1
        assert ends["whole"] >= 1

        poll(lambda: front.healthy() == 1, DEADLINE_S, lambda: "Envoy does not see that a picker is gone")
        for _ in range(4):
            body = request_body("chat", SEEDS.randrange(10**9))
            assert text_of(ask(front.url, "chat", body)) == fleet.expected("chat", body)
        other.wait_until_nothing_is_booked()
        fleet.wait_until_nothing_is_held()
    finally:
        victim.start()
    front.wait_until_all_pick()
    for _ in range(4):
        body = request_body("chat", SEEDS.randrange(10**9))
        assert text_of(ask(front.url, "chat", body)) == fleet.expected("chat", body)
    front.wait_until_nothing_is_booked()


def test_a_decode_server_that_is_gone_is_not_picked_for_long(front: Front, fleet: PdFleet) -> None:
    """Its sidecar stops: Envoy's own answers about it eject it, and the rest is served by the other."""
    gone, _ = front.sidecars
    gone.stop()
    try:
        name = gone.url.removeprefix("http://")
        served = Counter(
            ask(front.url, "completions", request_body("completions", SEEDS.randrange(10**9), n_words=10)).status
            for _ in range(12)
        )
        report(f"a sidecar gone, 12 requests: {dict(served)}")
        assert set(served) <= {200, 502, 503}
        poll(
            lambda: not any(picker.usable(name) for picker in front.pickers),
            DEADLINE_S,
            lambda: f"{[picker.workers() for picker in front.pickers]}",
        )
        for _ in range(4):
            body = request_body("completions", SEEDS.randrange(10**9), n_words=10)
            assert text_of(ask(front.url, "completions", body)) == fleet.expected("completions", body)
    finally:
        gone.start()
    poll(
        lambda: all(picker.usable(name) for picker in front.pickers),
        DEADLINE_S,
        lambda: f"{[picker.workers() for picker in front.pickers]}",
    )
