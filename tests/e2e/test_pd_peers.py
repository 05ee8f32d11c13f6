"""A real engine that decodes fetches a prompt from another one that decodes too and holds it."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator

import pytest
from api_client import ask, request_body
from engines import BLOCK_TOKENS, VllmServer, free_port, serving
from gateway_process import Sidecar, poll
from pd_fleet import DEADLINE_S, LEASE_FLAGS, pd_server, text_of

SEEDS = random.Random(67)
SOURCE = "x-kv-cache-source-host-port"


@pytest.fixture(scope="module")
def peers(engine_logs: pathlib.Path) -> Iterator[list[VllmServer]]:
    """Two servers of the deprecated `kv_both`, which engines do not enforce."""
    servers = [pd_server(f"peer{number}", engine_logs, "kv_both") for number in range(2)]
    with serving(servers):
        yield servers


@pytest.fixture(scope="module")
def sidecar(peers: list[VllmServer], engine_logs: pathlib.Path) -> Iterator[Sidecar]:
    """Before the second one."""
    sidecar = Sidecar(peers[1].url, engine_logs, "--pd-allow", peers[0].worker, *LEASE_FLAGS, prefill=[])
    sidecar.start()
    yield sidecar
    sidecar.stop()


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_prefix_is_pulled_from_the_peer_that_holds_it(api: str, peers: list[VllmServer], sidecar: Sidecar) -> None:
    source, decode = peers
    body = request_body(api, SEEDS.randrange(10**9), n_words=200)
    right = ask(source.url, api, body)  # It computes the prompt itself, and holds it from then on.
    assert right.prompt_tokens is not None
    held = (right.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert held > 8 * BLOCK_TOKENS
    hits = source.metric("vllm:prefix_cache_hits_total")
    moved = decode.metric("vllm:external_prefix_cache_hits_total")
    moved_bytes = decode.metric("vllm:nixl_bytes_transferred_sum")

    answer = ask(sidecar.url, api, body, headers=[(SOURCE, source.worker)])
    assert text_of(answer) == text_of(right)
    assert (answer.choice, answer.outcome["prefiller"]) == (("peer", "hint"), source.worker)
    assert (answer.prompt_tokens, answer.cached_tokens) == (right.prompt_tokens, held)
    assert source.metric("vllm:prefix_cache_hits_total") == hits + held, "the source computes one block"
    assert decode.metric("vllm:external_prefix_cache_hits_total") == moved + right.prompt_tokens
    assert decode.metric("vllm:nixl_bytes_transferred_sum") > moved_bytes
    poll(
        lambda: not any(server.metric("vllm:kv_cache_usage_perc") for server in peers),
        DEADLINE_S,
        lambda: "the source still holds it",
    )
    again = ask(decode.url, api, body)
    assert text_of(again) == text_of(right), "what was pulled is right, and cached"
    assert again.cached_tokens == held


def test_source_nobody_allowed_is_not_asked(peers: list[VllmServer], sidecar: Sidecar) -> None:
    body = request_body("completions", SEEDS.randrange(10**9), n_words=200)
    for value in ("192.0.2.7:8000", f"127.0.0.1:{free_port()}", "nonsense"):
        answer = ask(sidecar.url, "completions", body, headers=[(SOURCE, value)])
        assert answer.choice == ("local", "no_hint"), value
        assert text_of(answer) == text_of(ask(peers[0].url, "completions", body))
