"""What can go wrong with a pull between fake servers: leases, failures, engines that die, clients that leave."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bench.engine.server import FakeVllm
from tests.support.engine_pair import (
    GREEDY,
    OFFER,
    PROMPT,
    RECORDED,
    Pair,
    a_pair,
    config,
    metric,
    request_of,
    until,
)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with a_pair() as found:
        yield found


@pytest.fixture
async def truth(pair: Pair) -> str:
    """The right answer, from a server of its own."""
    async with FakeVllm(config()) as alone:
        return await pair.text(server=alone)


# --- leases -----------------------------------------------------------------------------------------------------------


async def test_the_lease_ends_if_no_decode_comes() -> None:
    async with a_pair(kv_lease_s=0.02) as pair:
        await pair.offer()
        await until(lambda: not pair.prefill.held_blocks)
        assert pair.prefill.nixl[0].expired == 1
        assert await metric(pair, pair.prefill, "nixl_num_kv_expired_reqs_total") == 1


async def test_heartbeats_keep_the_lease_of_a_queued_decode() -> None:
    """Queued for three leases, then pulled: as recorded with 27.7 s against 6 s."""
    lease_s = 0.2
    async with a_pair(decode={"kv_lease_s": lease_s}, kv_lease_s=lease_s) as pair:
        params = await pair.offer()
        engine = pair.decode.drivers[0].engine
        blocks, _ = engine.pool.allocate(engine.pool.num_free)  # nothing can be admitted
        waiting = asyncio.create_task(pair.text(params))
        over_s = asyncio.get_running_loop().time() + 3 * lease_s
        await until(lambda: asyncio.get_running_loop().time() > over_s)
        assert pair.prefill.held_blocks == 16
        assert not waiting.done()
        engine.pool.free(blocks)
        await pair.decoded(None, prompt=[7] * 40)  # has the engine look again
        assert await waiting == await pair.text(server=pair.prefill)
        assert pair.prefill.nixl[0].expired == 0


async def use_up(pair: Pair, server: FakeVllm) -> None:
    """Hand every block of the pool out again."""
    for start in range(3000, 3008):
        await pair.post(server, {**GREEDY, "prompt": list(range(start, start + 500)), "max_tokens": 1})


async def test_a_late_decode_gets_wrong_text_and_poisons_the_cache(truth: str) -> None:
    async with a_pair(kv_lease_s=0.02) as pair:
        params = await pair.offer()
        await until(lambda: pair.prefill.nixl[0].expired)
        await use_up(pair, pair.prefill)
        late = await pair.text(params)
        again = await pair.text()  # the same prompt without params, on the decode server
        assert truth not in (late, again)
        assert late != again  # its last, partial block was computed anew
        assert await metric(pair, pair.prefill, "nixl_num_notifications_after_expiry_total") == 1
        assert await metric(pair, pair.decode, "nixl_num_failed_transfers_total") == 0
        longer = {**GREEDY, "prompt": [*PROMPT, *range(700, 800)], "max_tokens": 20}
        wrong, right = [(await pair.post(it, longer))[1]["choices"][0]["text"] for it in (pair.decode, pair.prefill)]
        assert wrong != right
        pair.decode.reset_prefix_cache()
        assert await pair.text() == truth


async def test_a_late_decode_is_right_as_long_as_the_blocks_are_untouched(truth: str) -> None:
    async with a_pair(kv_lease_s=0.02) as pair:
        params = await pair.offer()
        await until(lambda: pair.prefill.nixl[0].expired)
        assert await pair.text(params) == truth
        assert pair.prefill.nixl[0].late == 1


async def test_params_used_twice(pair: Pair, truth: str) -> None:
    params = await pair.offer()
    assert await pair.text(params) == truth
    pair.decode.reset_prefix_cache()
    assert await pair.text(params) == truth
    assert pair.prefill.nixl[0].late == 1
    pair.decode.reset_prefix_cache()
    await use_up(pair, pair.prefill)
    assert await pair.text(params) != truth


@pytest.mark.parametrize("change", ["other blocks", "other prompt"])
async def test_somebody_elses_blocks_give_wrong_text(pair: Pair, truth: str, change: str) -> None:
    first, second = await pair.offer(), await pair.offer(prompt=PROMPT[::-1])
    params = {**first, "remote_block_ids": second["remote_block_ids"]} if change == "other blocks" else second
    assert await pair.text(params) != truth
    assert pair.decode.nixl[0].failed == 0


# --- failures ---------------------------------------------------------------------------------------------------------


def broken(params: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        "dead peer": {**params, "remote_port": 1},
        "restarted peer": {**params, "remote_engine_id": "no-such-engine"},
        "out of range": {**params, "remote_block_ids": [list(range(5000, 5016))]},
    }[kind]


BROKEN = ("dead peer", "restarted peer", "out of range")


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_failed_pull_fails_the_request(pair: Pair, kind: str) -> None:
    params = broken(await pair.offer(), kind)
    recorded = RECORDED["errors"]["decode_bad_port"]
    assert await pair.decoded(params) == (recorded["status"], recorded["response"])
    # A second failure is that of telling the prefill server, as far as there is none.
    failures = 1 if kind == "out of range" else 2
    assert await metric(pair, pair.decode, "nixl_num_failed_transfers_total") == failures
    assert pair.prefill.held_blocks == (0 if kind == "out of range" else 16)
    assert await metric(pair, pair.decode, 'request_success_total{finished_reason="error"}') == 1
    assert pair.decode.drivers[0].engine.pool.num_used == 0
    assert not pair.decode.dead


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_failed_pull_is_recomputed(truth: str, kind: str) -> None:
    async with a_pair(decode={"kv_load_failure_policy": "recompute"}) as pair:
        params = broken(await pair.offer(), kind)
        assert await pair.text(params) == truth
        assert await metric(pair, pair.decode, "nixl_num_failed_transfers_total") == 1
        assert await metric(pair, pair.decode, "external_prefix_cache_hits_total") == 500
        source = 'prompt_tokens_by_source_total{source="%s"}'
        assert await metric(pair, pair.decode, source % "local_compute") == 500
        assert await metric(pair, pair.decode, source % "external_kv_transfer") == 0
        assert pair.prefill.held_blocks == 16  # nobody told it


async def test_messages_errors_are_anthropics(pair: Pair) -> None:
    _, prefill = await pair.post(pair.prefill, request_of("messages", kv_transfer_params=OFFER), "/v1/messages")
    body = request_of("messages", kv_transfer_params=broken(prefill["kv_transfer_params"], "dead peer"))
    told = {"type": "error", "error": {"type": "InternalServerError", "message": "Internal server error"}}
    assert await pair.post(pair.decode, body, "/v1/messages") == (500, told)


async def test_a_restarted_prefill_server_is_another_engine(pair: Pair) -> None:
    params = await pair.offer()
    before = pair.prefill.nixl[0].engine_id
    await pair.prefill.restart()
    assert pair.prefill.nixl[0].engine_id != before
    assert (await pair.offer())["remote_port"] == params["remote_port"]
    assert (await pair.decoded(params))[0] == 500


@pytest.mark.parametrize("field", [{"kv_cache_dtype": "fp8"}, {"dtype": "torch.float32"}, {"version": "0.31.0"}])
async def test_servers_of_other_kinds_cannot_pull(field: dict[str, Any]) -> None:
    async with a_pair(**field) as pair:
        assert (await pair.decoded(await pair.offer()))[0] == 500
        assert pair.decode.nixl[0].failed == 2


@pytest.mark.parametrize("kind", ["prefill flag alone", "too few blocks"])
async def test_malformed_params_kill_the_engine(pair: Pair, kind: str) -> None:
    """As real vLLM does: a gateway must never let them through."""
    params: dict[str, Any] = {"do_remote_prefill": True}
    if kind == "too few blocks":
        params = await pair.offer()
        params["remote_block_ids"] = [params["remote_block_ids"][0][:4]]
    recorded = RECORDED["errors"]["decode_too_few_blocks"]
    assert await pair.decoded(params) == (recorded["status"], recorded["response"])
    assert pair.decode.dead
    async with pair.http.get(pair.decode.url + "/health") as response:
        assert response.status == 503
    assert (await pair.decoded(None))[0] == 500
    assert (await pair.offer())["remote_block_ids"]  # the other one lives


@pytest.mark.parametrize("key", ["remote_request_id", "remote_engine_id", "remote_host", "remote_port"])
async def test_an_address_that_lacks_something_hangs_and_kills_when_the_client_leaves(pair: Pair, key: str) -> None:
    params = await pair.offer()
    del params[key]
    waiting = asyncio.create_task(pair.decoded(params))
    await until(lambda: pair.decode.stats()[0].waiting_remote)
    assert not (await asyncio.wait([waiting], timeout=0.1))[0]
    assert pair.decode.drivers[0].engine.pool.num_used == 16
    waiting.cancel()
    await until(lambda: pair.decode.dead)


# --- giving up --------------------------------------------------------------------------------------------------------


async def test_a_rejected_decode_releases_the_prefill_blocks(pair: Pair) -> None:
    """P1: decode rejects the request before admission, the prefill side's blocks do not stay pinned."""
    for bad in ({"prompt": [5] * 3000, "max_tokens": 1}, {"model": "nope"}):
        params = await pair.offer()
        assert pair.prefill.held_blocks == 16
        assert (await pair.decoded(params, **bad))[0] in (400, 404)
        assert pair.prefill.held_blocks == 0
    assert pair.prefill.nixl[0].late == 0


async def test_a_rejected_decode_with_half_of_the_params_kills(pair: Pair) -> None:
    """Seen on vLLM 0.32: the rejection is 400, then the connector misses remote_block_ids."""
    status, answer = await pair.decoded({"do_remote_prefill": True}, prompt=[5] * 3000)
    assert (status, answer["error"]["param"]) == (400, "input_tokens")
    assert pair.decode.dead


async def test_a_body_that_is_no_request_releases_nothing(pair: Pair) -> None:
    """FastAPI refuses it before the handler that would tell the connector."""
    params = await pair.offer()
    assert (await pair.decoded(params, max_tokens="many"))[0] == 400
    assert pair.prefill.held_blocks == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["queued", "pulling", "decoding"])
async def test_a_client_that_leaves_frees_both_sides(moment: str, stream: bool) -> None:
    slow = {"kv_pull_base_s": 0.2 if moment == "pulling" else 0.0, "timing": "cpu-fast"}
    async with a_pair(decode=slow) as pair:
        params = await pair.offer()
        engine = pair.decode.drivers[0].engine
        taken = engine.pool.allocate(engine.pool.num_free)[0] if moment == "queued" else []
        if moment == "decoding":
            pair.decode.faults.die_after_chunks = 1
        asking = asyncio.create_task(pair.decoded(params, stream=stream, max_tokens=1000))
        if moment == "decoding" and not stream:
            await until(lambda: engine.stats().running)
        elif moment != "decoding":
            await until(lambda: engine.stats().waiting_remote if moment == "pulling" else engine.stats().waiting)
        if moment == "decoding" and stream:
            with pytest.raises(aiohttp.ClientPayloadError):
                await asking
        asking.cancel()
        await until(lambda: not pair.prefill.held_blocks and engine.idle())
        engine.pool.free(taken)
        assert engine.pool.num_used == 0
        assert (pair.prefill.nixl[0].expired, pair.prefill.nixl[0].late) == (0, 0)


async def test_a_client_that_leaves_a_prefill_pins_nothing_for_ever() -> None:
    async with a_pair(kv_lease_s=0.05) as pair:
        pair.prefill.faults.cut_answers = True
        with pytest.raises(aiohttp.ClientPayloadError):
            await pair.offer()
        assert pair.prefill.held_blocks == 16
        await until(lambda: not pair.prefill.held_blocks)
