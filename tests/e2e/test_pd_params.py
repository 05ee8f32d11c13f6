"""Transfer params that must not reach an engine: from clients, and from prefill servers gone wrong. Each of these kills
or poisons a real decode server when it gets through.
"""

from __future__ import annotations

import json
import pathlib
import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from api_client import APIS, Answer, ask, request_body
from engines import free_port
from gateway_process import Face, Gateway, Sidecar
from pd_fleet import LEASE_FLAGS, PdFleet, text_of
from tampering_proxy import Edit, Params, TamperingProxy, out_of_range_blocks, wrong_engine_id

SEEDS = random.Random(43)
HINT = "x-prefiller-host-port"
ALONE = {"do_remote_prefill": True}
CLIENTS: dict[str, dict[str, Any]] = {
    "remote_prefill_alone": ALONE,
    "nulls": {
        **ALONE, "do_remote_decode": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None,
        "remote_port": None,
    },
    "no_request_id": {
        **ALONE, "do_remote_decode": False, "remote_engine_id": str(uuid.uuid4()), "remote_block_ids": [[1, 2, 3]],
        "remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 1,
    },
    "remote_decode": {"do_remote_decode": True},
    "token_ids": {"do_remote_prefill": False, "prompt_token_ids": [400] * 40},
}  # fmt: skip


@pytest.fixture(scope="module")
def faces(pd_servers: PdFleet, engine_logs: pathlib.Path) -> Iterator[dict[str, Face]]:
    """A gateway and a sidecar, both of which send away what they can."""
    prefill, decode = ([server.url for server in role] for role in (pd_servers.prefill, pd_servers.decode))
    flags = ("--pd-policy", "always-remote", *LEASE_FLAGS)
    gateway = Gateway([], engine_logs, *flags, prefill=prefill, decode=decode)
    sidecar = Sidecar(decode[0], engine_logs, *flags, prefill=prefill)
    try:
        for face in (gateway, sidecar):
            face.start()
        yield {"gateway": gateway, "sidecar": sidecar}
    finally:
        gateway.stop()
        sidecar.stop()


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("command", ["gateway", "sidecar"])
def test_params_from_clients_reach_no_engine(
    command: str, api: str, name: str, faces: dict[str, Face], fleet: PdFleet
) -> None:
    params = CLIENTS[name]
    body = request_body(api, SEEDS.randrange(10**9))
    right = fleet.expected(api, body)
    for stream in (False, True):
        answer = ask(faces[command].url, api, {**body, "kv_transfer_params": params}, stream=stream)
        assert text_of(answer) == right
        assert b'"remote_block_ids"' not in answer.raw


@pytest.mark.parametrize("command", ["gateway", "sidecar"])
def test_params_smuggled_in_other_ways(command: str, faces: dict[str, Face], fleet: PdFleet) -> None:
    """Under a key written twice or with escapes, in `vllm_xargs`, through paths that take the same bodies."""
    url = faces[command].url
    body = request_body("completions", SEEDS.randrange(10**9))
    right = fleet.expected("completions", body)
    plain = json.dumps(body)[:-1]
    params = json.dumps(ALONE)
    raw = [
        f'{plain}, "kv_transfer_params": null, "kv_transfer_params": {params}}}',
        f'{plain}, "kv_transfer_params": {params}, "kv_transfer_params": {params}}}',
        f'{plain}, "kv_transfer_param\\u0073": {params}}}',
        f'{plain}, "vllm_xargs": {{"kv_transfer_params": "x"}}}}',
        f'{plain}, "vllm_xargs": {{"kv_transfer_params": ["x"]}}}}',
        f'{plain}, "vllm_xargs": {{"kv_transfer_params": {params}}}}}',
        f'{plain}, "ec_transfer_params": {params}}}',
    ]
    for text in raw:
        answer = ask(url, "completions", text.encode())
        assert answer.status == 400 or text_of(answer) == right, text
    ids = [400 + i for i in range(100)]
    generate = {"model": "tiny", "token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 0}}
    chat = request_body("chat", 1)
    others: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions/batch", {**chat, "messages": [chat["messages"]], "kv_transfer_params": ALONE}),
        ("/invocations", {**body, "kv_transfer_params": ALONE}),
        ("/invocations", {**chat, "kv_transfer_params": ALONE}),
        ("/inference/v1/generate", {**generate, "kv_transfer_params": ALONE}),
        (
            "/inference/v1/generate",
            {**generate, "sampling_params": {"max_tokens": 1, "extra_args": {"kv_transfer_params": ALONE}}},
        ),
        ("/v1/completions?x=1", {**body, "kv_transfer_params": ALONE}),
        ("/v1/completions/", {**body, "kv_transfer_params": ALONE}),
        ("//v1/completions", {**body, "kv_transfer_params": ALONE}),
        ("/v1/./completions", {**body, "kv_transfer_params": ALONE}),
        ("/v1/%63ompletions", {**body, "kv_transfer_params": ALONE}),
    ]
    for path, other in others:
        answer = ask(url, "completions", other, path=path)
        assert answer.status < 500, (path, answer)
        fleet.assert_alive()
    fleet.wait_until_nothing_is_held()


# ---- prefill servers gone wrong --------------------------------------------------------------------------------------


def without(name: str) -> Edit:
    return lambda params: {key: value for key, value in params.items() if key != name}


def replaced(**values: Any) -> Edit:
    return lambda params: {**params, **values}


def blocks(change: Any) -> Edit:
    return lambda params: {**params, "remote_block_ids": change(params["remote_block_ids"])}


WRONG: dict[str, tuple[Edit, str]] = {
    "too_few_blocks": (blocks(lambda ids: [ids[0][:-1]]), "bad_params"),
    "too_many_blocks": (blocks(lambda ids: [[*ids[0], max(ids[0]) + 1]]), "bad_params"),
    "no_blocks": (blocks(lambda ids: [[]]), "bad_params"),
    "flat_blocks": (blocks(lambda ids: ids[0]), "bad_params"),
    "negative_block": (blocks(lambda ids: [[-1, *ids[0][1:]]]), "bad_params"),
    "out_of_range_blocks": (out_of_range_blocks, "kv_load_failed"),
    "remote_prefill_alone": (lambda params: ALONE, "bad_params"),
    "no_request_id": (without("remote_request_id"), "bad_params"),
    "no_engine_id": (without("remote_engine_id"), "bad_params"),
    "wrong_engine_id": (wrong_engine_id, "kv_load_failed"),
    "foreign_host": (replaced(remote_host="192.0.2.7"), "bad_params"),
    "closed_port": (
        lambda params: {**params, "remote_port": free_port(), "remote_engine_id": str(uuid.uuid4())},
        "kv_load_failed",
    ),
    "wrong_token_count": (replaced(remote_num_tokens=32), "bad_params"),
    "null": (lambda params: None, "no_params"),
    "a_text": (lambda params: "yes", "prefill_failed"),
    "a_list": (lambda params: [params], "prefill_failed"),
}


@pytest.fixture(scope="module")
def hinted_sidecar(proxy: TamperingProxy, pd_servers: PdFleet, engine_logs: pathlib.Path) -> Iterator[Sidecar]:
    """It knows no other prefill server than the one behind the proxy."""
    sidecar = Sidecar(pd_servers.decode[1].url, engine_logs, *LEASE_FLAGS, prefill=[proxy.url])
    sidecar.start()
    yield sidecar
    sidecar.stop()
    pd_servers.wait_until_nothing_is_held()


@pytest.fixture
def tampered(proxy: TamperingProxy, hinted_sidecar: Sidecar, fleet: PdFleet) -> Iterator[Sidecar]:
    """The sidecar, after an honest handoff: a pair that failed before has another chance."""
    proxy.honest()
    body = request_body("completions", SEEDS.randrange(10**9))
    answer = remote(hinted_sidecar, proxy, "completions", body)
    assert text_of(answer) == fleet.expected("completions", body)
    assert answer.choice == ("remote", "hint")
    yield hinted_sidecar
    proxy.honest()


def remote(sidecar: Sidecar, proxy: TamperingProxy, api: str, body: dict[str, Any], *, stream: bool = False) -> Answer:
    return ask(sidecar.url, api, body, stream=stream, headers=[(HINT, proxy.worker)])


@pytest.mark.parametrize("name", WRONG)
def test_wrong_params_from_a_prefill_server(
    name: str, tampered: Sidecar, proxy: TamperingProxy, fleet: PdFleet
) -> None:
    """The decode server computes the prompt itself, and its cache is right afterwards."""
    proxy.edit, reason = WRONG[name]
    n_edited = len(proxy.edited)
    body = request_body("chat", SEEDS.randrange(10**9))
    answer = remote(tampered, proxy, "chat", body)
    assert text_of(answer) == fleet.expected("chat", body)
    assert len(proxy.edited) == n_edited + 1
    assert answer.choice == ("local", reason)
    fleet.assert_alive()
    fleet.assert_cache_is_right("chat", body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_failed_transfer_is_retried_before_any_byte(
    api: str, stream: bool, tampered: Sidecar, proxy: TamperingProxy, fleet: PdFleet
) -> None:
    """P7: the engine's 500, or the error it streams after a 200, is not the client's answer."""
    proxy.edit, _ = WRONG["wrong_engine_id"]
    body = request_body(api, SEEDS.randrange(10**9))
    answer = remote(tampered, proxy, api, body, stream=stream)
    assert text_of(answer) == fleet.expected(api, body)
    assert answer.choice == ("local", "kv_load_failed")
    fleet.assert_cache_is_right(api, body)


def test_params_used_twice(tampered: Sidecar, proxy: TamperingProxy, fleet: PdFleet) -> None:
    """What the prefill server answered to an earlier prompt comes again for another one of the same length."""
    first, second = ({"model": "tiny", "prompt": ids(170), "max_tokens": 8, "temperature": 0} for _ in range(2))
    proxy.edit = lambda params: params
    assert remote(tampered, proxy, "completions", first).choice == ("remote", "hint")
    used: Params = proxy.edited[-1]
    proxy.edit = lambda params: used
    answer = remote(tampered, proxy, "completions", second)
    assert text_of(answer) == fleet.expected("completions", second)
    assert answer.choice == ("local", "bad_params")
    fleet.assert_cache_is_right("completions", second)


def ids(n: int) -> list[int]:
    return [SEEDS.randrange(300, 2000) for _ in range(n)]


@pytest.mark.parametrize("status", [500, 503])
def test_failing_prefill_server_is_replaced(
    status: int, proxy: TamperingProxy, fleet: PdFleet, engine_logs: pathlib.Path
) -> None:
    """D6: the next one computes the prompt; with none left the decode server, or an error if that is wanted."""
    decode = [fleet.decode[1].url]

    def ask_failing(args: tuple[str, ...], prefill: list[str]) -> tuple[Answer, str, bool]:
        """The first answer of a gateway, the right text, and whether the failing server was asked for it."""
        gateway = Gateway(
            [], engine_logs, "--pd-policy", "always-remote", *args, *LEASE_FLAGS, prefill=prefill, decode=decode
        )
        gateway.start()
        proxy.status, n_asked = status, len(proxy.bodies)
        try:
            body = request_body("completions", SEEDS.randrange(10**9))
            answer = ask(gateway.url, "completions", body)
            return answer, fleet.expected("completions", body), len(proxy.bodies) > n_asked
        finally:
            proxy.honest()
            gateway.stop()

    proxy.honest()
    for _ in range(20):  # Of two that are as good, either may be the first, and stays it once it is known to work.
        answer, right, was_asked = ask_failing((), [proxy.url, fleet.prefill[0].url])
        assert text_of(answer) == right
        assert answer.choice == ("remote", "policy")
        if was_asked:
            break
    assert was_asked
    answer, right, was_asked = ask_failing((), [proxy.url])
    assert was_asked
    assert text_of(answer) == right
    assert answer.choice == ("local", "prefill_failed")
    answer, _, was_asked = ask_failing(("--on-prefill-failure", "fail"), [proxy.url])
    assert was_asked
    assert answer.status == 502
    assert answer.error["code"] == "prefill_failed"


def test_servers_without_connector(fleet: PdFleet, engine_logs: pathlib.Path) -> None:
    """A plain server has no params to give and ignores those it gets: right text either way, and known after a try."""
    for prefill, decode in ((fleet.plain, fleet.decode[0]), (fleet.prefill[0], fleet.plain)):
        gateway = Gateway(
            [], engine_logs, "--pd-policy", "always-remote", *LEASE_FLAGS, prefill=[prefill.url], decode=[decode.url]
        )
        gateway.start()
        try:
            for stream in (False, True):
                body = request_body("chat", SEEDS.randrange(10**9))
                assert text_of(ask(gateway.url, "chat", body, stream=stream)) == fleet.expected("chat", body)
        finally:
            gateway.stop()
    fleet.wait_until_nothing_is_held()
