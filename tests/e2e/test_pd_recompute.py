"""A decode server with `kv_load_failure_policy=recompute`: it computes by itself what it cannot fetch, and no error
tells anybody so.
"""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator

import pytest
from api_client import APIS, ask, request_body
from engines import serving
from gateway_process import Sidecar, poll, report
from pd_fleet import DEADLINE_S, LEASE_FLAGS, PdFleet, pd_server, text_of
from tampering_proxy import Edit, TamperingProxy, out_of_range_blocks, wrong_engine_id

SEEDS = random.Random(61)
HINT = "x-prefiller-host-port"
FAILED = "vllm:nixl_num_failed_transfers_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


@pytest.fixture(scope="module")
def recomputing(pd_servers: PdFleet, engine_logs: pathlib.Path) -> Iterator[PdFleet]:
    """The prefill servers of all tests, with one decode server of this kind."""
    server = pd_server("recomputing", engine_logs, "kv_consumer", load_failure_policy="recompute")
    with serving([server]):
        yield pd_servers.with_decode(server)


@pytest.fixture(scope="module")
def sidecar(recomputing: PdFleet, proxy: TamperingProxy, engine_logs: pathlib.Path) -> Iterator[Sidecar]:
    """It knows no other prefill server than the one behind the proxy."""
    sidecar = Sidecar(recomputing.decode[0].url, engine_logs, *LEASE_FLAGS, prefill=[proxy.url])
    try:
        sidecar.start()
        yield sidecar
    finally:
        sidecar.stop()


@pytest.mark.parametrize("edit", [wrong_engine_id, out_of_range_blocks])
def test_failed_transfer_is_recomputed_by_the_engine(
    edit: Edit, sidecar: Sidecar, proxy: TamperingProxy, recomputing: PdFleet
) -> None:
    """P7: the first answer is the right one; the engine's cache is right; what the prefill server held is free in the
    end; and an honest transfer between the two works before and after.
    """
    fleet, prefill, (decode,) = recomputing, recomputing.prefill[1], recomputing.decode
    expired = prefill.metric(EXPIRED)

    def pulled_bytes(api: str, *, stream: bool) -> float:
        """Of one request, whose answer is right and which the sidecar sent once, with what the proxy made of it."""
        body = request_body(api, SEEDS.randrange(10**9))
        right, (before, _), n_legs = fleet.expected(api, body), fleet.moved(), len(proxy.bodies)
        answer = ask(sidecar.url, api, body, stream=stream, headers=[(HINT, proxy.worker)])
        assert text_of(answer) == right, (api, stream)
        assert answer.choice == ("remote", "hint"), (api, stream)
        assert len(proxy.bodies) == n_legs + 1
        fleet.assert_alive()
        moved = fleet.moved()[0] - before
        fleet.assert_cache_is_right(api, body)
        return moved

    proxy.honest()
    assert pulled_bytes("chat", stream=False) > 0
    failed = decode.metric(FAILED)
    proxy.edit = edit
    try:
        cases = [(api, stream) for api in APIS for stream in (False, True)]
        assert [pulled_bytes(api, stream=stream) for api, stream in cases] == [0] * len(cases)
    finally:
        proxy.honest()
    poll(
        lambda: decode.metric(FAILED) >= failed + len(cases),
        DEADLINE_S,
        lambda: f"{decode.metric(FAILED) - failed} of {len(cases)} transfers failed",
    )
    assert pulled_bytes("chat", stream=True) > 0
    fleet.wait_until_nothing_is_held()
    report(
        f"recomputed {len(cases)} prompts: {prefill.metric(EXPIRED) - expired:.0f} of them held until the lease ended"
    )
