"""`warmroute sidecar` in front of a real decode server, told by llm-d's headers where a prompt is to be computed."""

from __future__ import annotations

import pathlib
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_client import APIS, ask, request_body
from engines import free_port
from gateway_process import Sidecar, poll
from pd_fleet import DEADLINE_S, LEASE_FLAGS, PdFleet, text_of

SEEDS = random.Random(59)
HINT = "x-prefiller-host-port"


@pytest.fixture(scope="module")
def sidecar(pd_servers: PdFleet, engine_logs: pathlib.Path) -> Iterator[Sidecar]:
    """The first prefill server is known from the start, the second allowed by its address."""
    known, allowed = pd_servers.prefill
    sidecar = Sidecar(
        pd_servers.decode[0].url, engine_logs, "--pd-allow", allowed.worker, *LEASE_FLAGS, prefill=[known.url]
    )
    sidecar.start()
    yield sidecar
    sidecar.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_hint_names_the_prefill_server(api: str, stream: bool, sidecar: Sidecar, fleet: PdFleet) -> None:
    for server in fleet.prefill:
        body = request_body(api, SEEDS.randrange(10**9))
        tokens = server.metric("vllm:prompt_tokens_total")
        moved = fleet.decode[0].metric("vllm:external_prefix_cache_hits_total")
        answer = ask(sidecar.url, api, body, stream=stream, headers=[(HINT, server.worker)])
        assert text_of(answer) == fleet.expected(api, body)
        assert answer.choice == ("remote", "hint")
        assert answer.outcome["prefiller"] == server.worker
        assert answer.prompt_tokens is not None
        assert server.metric("vllm:prompt_tokens_total") == tokens + answer.prompt_tokens
        assert fleet.decode[0].metric("vllm:external_prefix_cache_hits_total") == moved + answer.prompt_tokens


def test_without_a_hint_the_prompt_is_computed_here(sidecar: Sidecar, fleet: PdFleet) -> None:
    body = request_body("chat", SEEDS.randrange(10**9))
    for headers in ([], [(HINT, "")], [(HINT, " , ")]):
        answer = ask(sidecar.url, "chat", body, headers=headers)
        assert text_of(answer) == fleet.expected("chat", body)
        assert answer.choice == ("local", "no_hint")


@pytest.mark.parametrize(
    "target", ["192.0.2.7:8000", "127.0.0.1:9", "[::1]:8000", "localhost:9", "metadata.internal:80"]
)
def test_target_nobody_allowed_is_denied(target: str, sidecar: Sidecar, fleet: PdFleet) -> None:
    """O5: the header is not a way to make us call any host."""
    answer = ask(sidecar.url, "chat", request_body("chat", 1), headers=[(HINT, target)])
    assert answer.status == 403, answer
    assert answer.error["code"] == "prefill_target_denied"


def test_several_targets_are_tried_in_their_order(sidecar: Sidecar, fleet: PdFleet) -> None:
    """A list, several lines, spaces; who is not allowed or does not answer is passed over."""
    first, second = (server.worker for server in fleet.prefill)
    for headers, expected in (
        ([(HINT, f"{second}, {first}")], second),
        ([(HINT, first), (HINT, second)], first),
        ([(HINT, f" {second} ")], second),
        ([(HINT, f"192.0.2.7:8000,{first}")], first),
    ):
        body = request_body("completions", SEEDS.randrange(10**9))
        answer = ask(sidecar.url, "completions", body, headers=headers)
        assert text_of(answer) == fleet.expected("completions", body), headers
        assert (answer.choice, answer.outcome["prefiller"]) == (("remote", "hint"), expected), headers


def test_dead_target_is_passed_over(fleet: PdFleet, engine_logs: pathlib.Path) -> None:
    """Nobody listens at the first; the next computes the prompt, and without a next the decode server."""
    dead = f"127.0.0.1:{free_port()}"
    sidecar = Sidecar(
        fleet.decode[0].url, engine_logs, "--pd-allow", dead, *LEASE_FLAGS, prefill=[fleet.prefill[0].url]
    )
    sidecar.start()
    try:
        for targets, choices in (
            (f"{dead},{fleet.prefill[0].worker}", ["remote"]),
            (dead, ["local"]),
        ):
            body = request_body("chat", SEEDS.randrange(10**9))
            answer = ask(sidecar.url, "chat", body, headers=[(HINT, targets)])
            assert text_of(answer) == fleet.expected("chat", body)
            assert answer.choice[0] in choices, (targets, answer.choice)
    finally:
        sidecar.stop()


def test_own_engine_as_target_is_local(sidecar: Sidecar, fleet: PdFleet) -> None:
    body = request_body("chat", SEEDS.randrange(10**9))
    for target in (fleet.decode[0].worker, f"127.0.0.1:{sidecar.port}"):
        answer = ask(sidecar.url, "chat", body, headers=[(HINT, target)])
        assert text_of(answer) == fleet.expected("chat", body)
        assert answer.choice[0] == "local"


def test_data_parallel_headers(sidecar: Sidecar, fleet: PdFleet) -> None:
    """One rank here: its number is right, any other is nobody's."""
    body = request_body("completions", SEEDS.randrange(10**9))
    right = fleet.expected("completions", body)
    assert text_of(ask(sidecar.url, "completions", body, headers=[("x-data-parallel-rank", "0")])) == right
    for headers in ([("x-data-parallel-rank", "7")], [("x-data-parallel-host-port", "192.0.2.7:8000")]):
        answer = ask(sidecar.url, "completions", body, headers=headers)
        assert answer.status == 400, (headers, answer)


def test_everything_else_is_the_engines_own(sidecar: Sidecar, fleet: PdFleet) -> None:
    engine = fleet.decode[0]
    for path in ("/v1/models", "/version"):
        ours, theirs = sidecar.get(f"{sidecar.url}{path}"), engine.get(path).body
        for each in ours.get("data", []) + theirs.get("data", []):
            each.pop("created"), each.pop("permission")
        assert ours == theirs, path
    status, _, tokens = sidecar.post("/tokenize", {"model": "tiny", "prompt": "alpha beta"})
    assert (status, tokens) == (200, engine.post("/tokenize", {"model": "tiny", "prompt": "alpha beta"}).body)


def test_openai_client_streams_through(sidecar: Sidecar, fleet: PdFleet) -> None:
    client = openai.OpenAI(base_url=f"{sidecar.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
    body = request_body("chat", SEEDS.randrange(10**9))
    kwargs: Any = {**body, "extra_headers": {HINT: fleet.prefill[0].worker}}
    with client.chat.completions.with_streaming_response.create(
        **kwargs, stream=True, stream_options={"include_usage": True}
    ) as response:
        assert ";choice=remote;" in response.headers["x-warmroute-outcome"]
        chunks = list(response.parse())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == fleet.expected("chat", body)
    assert chunks[-1].usage is not None


def test_health_is_the_engines(sidecar: Sidecar, fleet: PdFleet) -> None:
    """A frozen engine makes the pod unready, and it comes back."""

    def status() -> int:
        try:
            with urllib.request.urlopen(f"{sidecar.url}/health", timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert status() == 200
    fleet.decode[0].sigstop()
    try:
        poll(lambda: status() == 503, DEADLINE_S, lambda: f"/health says {status()}")
    finally:
        fleet.decode[0].sigcont()
    poll(lambda: status() == 200, DEADLINE_S, lambda: f"/health says {status()}")
