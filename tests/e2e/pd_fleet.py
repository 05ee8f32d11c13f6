"""Two prefill and two decode servers with NIXL, and one plain server whose answers are the right ones."""

from __future__ import annotations

import copy
import pathlib
import random
from collections.abc import Mapping
from typing import Any

from api_client import Answer, ask
from engines import BLOCK_TOKENS, VllmServer, start_all
from gateway_process import poll

# Long enough for a leg on a busy machine of two cores, short enough to wait for.
LEASE_S = 8
MARGIN_S = 2
DEADLINE_S = 120.0
# One of the blocks is the engine's own.
NUM_BLOCKS = 160
LEASE_FLAGS = ("--pd-lease-s", str(LEASE_S), "--pd-lease-margin-s", str(MARGIN_S))


def pd_server(name: str, log_dir: pathlib.Path, role: str, *, load_failure_policy: str | None = None) -> VllmServer:
    return VllmServer(
        name,
        log_dir,
        num_blocks=NUM_BLOCKS,
        kv_role=role,
        kv_connector_extra={"kv_lease_duration": LEASE_S},
        kv_load_failure_policy=load_failure_policy,
        # Opens /inference/v1/generate, which takes transfer params too.
        args=["--enable-scale-out"],
    )


class PdFleet:
    """The servers, and what must hold of them whatever was asked."""

    def __init__(self, plain: VllmServer, log_dir: pathlib.Path) -> None:
        self.plain = plain
        self.prefill = [pd_server(f"prefill{number}", log_dir, "kv_producer") for number in range(2)]
        self.decode = [pd_server(f"decode{number}", log_dir, "kv_consumer") for number in range(2)]

    def with_decode(self, server: VllmServer) -> PdFleet:
        """The same prefill servers, and another decode server in place of the two."""
        fleet = copy.copy(self)
        fleet.decode = [server]
        return fleet

    @property
    def servers(self) -> list[VllmServer]:
        return [*self.prefill, *self.decode]

    def expected(self, api: str, body: Mapping[str, Any]) -> str:
        """What a server by itself says."""
        answer = ask(self.plain.url, api, body)
        assert answer.status == 200, answer
        return answer.text

    def moved(self) -> tuple[float, float]:
        """(bytes pulled by NIXL, prompt tokens that came from outside) of all decode servers so far."""
        return (
            sum(server.metric("vllm:nixl_bytes_transferred_sum") for server in self.decode),
            sum(server.metric("vllm:external_prefix_cache_hits_total") for server in self.decode),
        )

    def held_blocks(self) -> list[int]:
        """Blocks in use on each server: with nothing running, what it holds for another."""
        return [round(s.metric("vllm:kv_cache_usage_perc") * (NUM_BLOCKS - 1)) for s in self.servers if s.alive]

    def wait_until_nothing_is_held(self, deadline_s: float = DEADLINE_S) -> None:
        poll(lambda: not any(self.held_blocks()), deadline_s, lambda: f"still held: {self.held_blocks()} blocks")

    def assert_alive(self) -> None:
        """Every engine answers. One that does not is started again, so that only the test that killed it fails."""
        alive = {server.name: server.alive and server.healthy(timeout_s=30.0) for server in self.servers}
        dead = [server for server in self.servers if not alive[server.name]]
        for server in dead:
            server.stop()
        start_all(dead)
        assert not dead, alive

    def reuse_all_blocks(self, server: VllmServer) -> None:
        """Fill the server's cache with other prompts, so that nothing it held before is there any more."""
        rng = random.Random()
        for _ in range(-(-NUM_BLOCKS * BLOCK_TOKENS // 2000) + 1):
            prompt = [rng.randrange(300, 2000) for _ in range(2000)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            assert server.post("/v1/completions", body, timeout_s=DEADLINE_S).status == 200

    def assert_cache_is_right(self, api: str, body: Mapping[str, Any]) -> None:
        """No decode server has kept wrong blocks of this prompt: asked directly, each says what the plain one says."""
        right = self.expected(api, body)
        assert [ask(server.url, api, body).text for server in self.decode] == [right] * len(self.decode)


def text_of(answer: Answer) -> str:
    """Of an answer that is neither an error nor cut."""
    assert (answer.status, answer.error) == (200, None), answer
    return answer.text
