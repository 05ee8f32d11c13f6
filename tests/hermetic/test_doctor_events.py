"""doctor on KV events: fake vLLM servers with real HTTP and ZeroMQ, each broken in one way."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from bench.engine.config import FakeVllmConfig, Faults
from bench.engine.http import Api
from bench.engine.operations import Operations
from bench.engine.server import FakeVllm
from gateway.config.schema import Config, EventsConfig
from gateway.doctor.examine import Options
from gateway.doctor.findings import Severity
from tests.support.doctor_world import QUICK, diagnose, free_port, look, problems, rewrite, silence

# ---- events ----------------------------------------------------------------------------------------------------------


async def test_d8_events_off() -> None:
    """D8: without events everything looks cold; the operator is told, and which flag to set."""
    async with FakeVllm(FakeVllmConfig(events_endpoint=None)) as engine:
        found = await look(engine)
        assert problems(found) == {"events-off"}
        assert "--kv-events-config" in found["events-off"].fix


async def test_events_not_announced_and_then_given_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(*_: Any) -> web.Response:
        return web.Response(status=404)

    monkeypatch.setattr(Operations, "_event_sources", missing)
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        assert problems(await look(engine)) == {"events-unannounced"}
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        given = Options(events={engine.url: engine.events_endpoint}, replays={engine.url: engine.replay_endpoint})
        found = await look(engine, given)
        assert problems(found) == set()
        assert "events" in found


async def test_event_endpoint_unreachable_or_wrong() -> None:
    async with FakeVllm() as engine:
        away = f"tcp://127.0.0.1:{free_port()}"
        found = await look(engine, Options(timeout_s=1.0, events={engine.url: away}))
        assert "refused" in found["events-unreachable"].sentence
        assert "events-silent" not in found
        http_port = engine.url.replace("http:", "tcp:")
        for wrong in (http_port, engine.replay_endpoint):
            found = await look(engine, Options(timeout_s=1.0, events={engine.url: wrong}))
            assert "events-wrong-port" in found, wrong


async def test_events_of_another_server() -> None:
    async with FakeVllm() as engine, FakeVllm() as other, aiohttp.ClientSession() as session:
        given = Options(
            timeout_s=1.0, events={engine.url: other.events_endpoint}, replays={engine.url: other.replay_endpoint}
        )

        async def busy() -> None:
            while True:
                body = {"model": "fake-model", "prompt": [random.randrange(9, 99) for _ in range(64)], "max_tokens": 1}
                async with session.post(other.url + "/v1/completions", json=body) as response:
                    await response.read()
                await asyncio.sleep(0.01)

        load_on_other = asyncio.create_task(busy())
        try:
            found = await look(engine, given)
        finally:
            load_on_other.cancel()
        assert "events-unmatched" in found


async def test_e20_silent_engine() -> None:
    """E20: events are configured, but none come."""
    async with FakeVllm() as engine:
        silence(engine)
        found = await look(engine, QUICK)
        assert problems(found) == {"events-silent"}


async def test_published_but_not_delivered() -> None:
    async with FakeVllm(FakeVllmConfig(faults=Faults(drop_batches=10_000))) as engine:
        assert problems(await look(engine, QUICK)) == {"events-undelivered"}


async def test_e1_lost_batch() -> None:
    """E1: a batch that was lost on the way is noticed, and a replay brings it."""
    async with FakeVllm(FakeVllmConfig(faults=Faults(drop_batches=1))) as engine:
        found = await look(engine, QUICK)
        assert problems(found) == {"events-gap"}
        assert "events" in found


async def test_e1_lost_batch_without_replay() -> None:
    """E1: the same where the batch cannot be had again."""
    async with FakeVllm(FakeVllmConfig(replay_endpoint=None)) as engine:
        publisher = engine.publishers[0]
        publish = publisher.publish

        def skipping(payload: bytes) -> None:
            publish(payload)
            publisher.next_seq += 3

        publisher.publish = skipping  # type: ignore[method-assign]
        first = iter([True])

        def not_the_probe(event: dict[str, Any]) -> None:
            if next(first, False):  # so that there is a second one
                event["token_ids"] = [5] * len(event["token_ids"])

        rewrite(engine, not_the_probe)
        found = await look(engine, QUICK)
        assert problems(found) == {"events-gap", "replay-off"}
        assert "events" in found


@pytest.mark.parametrize("silent", [0, 1])
async def test_e22_e23_silent_rank(silent: int) -> None:
    """E22, E23: of two data-parallel ranks one publishes nothing."""
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        silence(engine, silent)
        report = await diagnose(engine.url, options=QUICK)
        bad = [(f.code, f.rank) for f in report.findings if f.severity >= Severity.WARNING]
        assert bad == [("rank-silent", silent)]


async def test_ranks_that_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "_rank", lambda *_: 0)
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        found = await look(engine)
        assert found["rank-ignored"].rank == 1


async def test_ranks_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = FakeVllm.event_sources
    monkeypatch.setattr(FakeVllm, "event_sources", lambda self: {"0": everything(self)["0"]})
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        assert problems(await look(engine)) == {"rank-unannounced"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"extra_keys": [["tenant-a"]] * 16}, "extra-keys"),
        ({"lora_name": "l1", "lora_id": 1}, "extra-keys"),
        ({"kv_cache_spec_kind": "sliding_window"}, "no-full-attention"),
        ({"medium": "CPU"}, "events-unmatched"),
        ({"token_ids": [7] * 256}, "events-unmatched"),
    ],
)
async def test_announced_but_not_found(change: dict[str, Any], code: str) -> None:
    async with FakeVllm() as engine:
        rewrite(engine, lambda event: event.update(change))
        found = await look(engine, QUICK)
        assert problems(found) == {code}
        assert "tenant-a" not in found[code].sentence


async def test_only_a_part_is_announced() -> None:
    def shorten(event: dict[str, Any]) -> None:
        event["block_hashes"], event["token_ids"] = event["block_hashes"][:4], event["token_ids"][:64]

    async with FakeVllm() as engine:
        rewrite(engine, shorten)
        assert problems(await look(engine, QUICK)) == {"events-incomplete", "cached-tokens-differ"}


async def test_e11_bad_events_are_named_and_cost_nothing_else() -> None:
    """E11: malformed and unknown events are counted, and the round trip still works."""
    async with FakeVllm() as engine:
        engine.inject(msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "x"}], 0]))
        engine.inject(msgspec.msgpack.encode([2.0, [{"type": "BlockMoved"}], 0]))
        sliding = {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [3] * 16,
            "block_size": 16,
            "medium": "GPU",
            "group_idx": 1,
            "kv_cache_spec_kind": "sliding_window",
        }
        engine.inject(msgspec.msgpack.encode([3.0, [sliding], 0]))
        found = await look(engine)
        assert problems(found) == {"events-malformed"}
        assert "BlockMoved (1)" in found["events-unknown-type"].sentence
        assert "sliding_window" in found["groups-ignored"].sentence
        assert "events" in found


async def test_e19_offloaded_blocks_in_finer_pieces_are_named() -> None:
    """E19: a lower tier that hashes 4 tokens at a time."""
    async with FakeVllm() as engine:
        stored = {
            "type": "BlockStored",
            "parent_block_hash": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "token_ids": [9] * 16,
        }
        whole = {**stored, "block_hashes": [7], "block_size": 16, "medium": "GPU"}
        pieces = {**stored, "block_hashes": [1, 2, 3, 4], "block_size": 4, "medium": "CPU"}
        engine.inject(msgspec.msgpack.encode([1.0, [whole, pieces], 0]))
        found = await look(engine)
        assert problems(found) == {"block-size-refused"}
        assert found["block-size-refused"].evidence == {"events": 1}
        assert "events" in found


async def test_messages_that_are_no_batches() -> None:
    async with FakeVllm() as engine:
        engine.inject(b"nonsense")
        assert "events-malformed" in await look(engine, QUICK)


async def test_e10_removals_that_never_come() -> None:
    """E10: the index counts more blocks than the engine can hold."""
    async with FakeVllm(FakeVllmConfig().with_engine(num_gpu_blocks=64, max_model_len=512)) as engine:
        for number in range(80):
            stored = {
                "type": "BlockStored",
                "block_hashes": [1000 + number],
                "parent_block_hash": None,
                "token_ids": [number] * 16,
                "block_size": 16,
                "medium": "GPU",
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
            engine.inject(msgspec.msgpack.encode([float(number), [stored], 0]))
        assert problems(await look(engine)) == {"copies-stay"}


async def test_block_size_of_metrics_and_events_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.engine import metrics

    exposition = metrics.exposition
    told = lambda *args: exposition(*args).replace(b'block_size="16"', b'block_size="32"')  # noqa: E731
    monkeypatch.setattr(metrics, "exposition", told)
    async with FakeVllm() as engine:
        found = await look(engine)
        assert "block-size-differs" in found
        assert "events" in found


# ---- engines that connect --------------------------------------------------------------------------------------------


async def test_engines_that_connect_to_us() -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        topics = ("kv@one", "kv@two")
        engines = [
            await stack.enter_async_context(FakeVllm(FakeVllmConfig(events_endpoint=at, topic=topic)))
            for topic in topics
        ]
        urls = [engine.url for engine in engines]
        listening = EventsConfig(mode="bind", bind_endpoint=at.replace("127.0.0.1", "0.0.0.0"))
        report = await diagnose(*urls, options=Options(config=Config(events=listening)))
        assert [f.code for f in report.findings if f.severity >= Severity.WARNING] == []
        assert sum(f.code == "events" for f in report.findings) == 2
        elsewhere = EventsConfig(mode="bind", bind_endpoint="tcp://0.0.0.0:1")
        for events in (EventsConfig(), elsewhere):
            report = await diagnose(*urls, options=Options(config=Config(events=events)))
            found = [f for f in report.findings if f.severity >= Severity.WARNING]
            assert [f.code for f in found] == ["events-need-bind"] * 2
            assert f"--events-bind-endpoint tcp://0.0.0.0:{at.rpartition(':')[2]}" in found[0].sentence


async def test_two_engines_with_one_topic() -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(FakeVllm(FakeVllmConfig(events_endpoint=at, topic="kv"))) for _ in range(2)
        ]
        report = await diagnose(*(engine.url for engine in engines), options=QUICK)
        assert "topic-shared" in [finding.code for finding in report.fleet]


async def test_engine_that_should_connect_but_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"0": {"endpoint": f"tcp://127.0.0.1:{free_port()}", "publisher": "zmq"}}
    monkeypatch.setattr(FakeVllm, "event_sources", lambda self: told)
    async with FakeVllm() as engine:
        assert problems(await look(engine, QUICK)) == {"events-unreachable", "replay-off", "events-need-bind"}


async def test_cannot_listen_because_somebody_does() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        async with FakeVllm(FakeVllmConfig(events_endpoint=at)) as engine:
            assert "events-bind-failed" in await look(engine, QUICK)


# ---- replay ----------------------------------------------------------------------------------------------------------


async def test_replay_off() -> None:
    async with FakeVllm(FakeVllmConfig(replay_endpoint=None)) as engine:
        found = await look(engine)
        assert problems(found) == {"replay-off"}
        assert "events" in found


@pytest.mark.parametrize("history", [0, 3])
async def test_replay_unreachable(history: int) -> None:
    async with FakeVllm() as engine:
        for number in range(history):
            engine.inject(msgspec.msgpack.encode([float(number), [], 0]))
        away = f"tcp://127.0.0.1:{free_port()}"
        found = await look(engine, Options(timeout_s=1.0, replays={engine.url: away}))
        assert problems(found) == {"replay-unreachable"}
        assert "events" in found


@pytest.mark.parametrize("mode", ["off", "truncated"])
async def test_replay_that_breaks_off(mode: Any) -> None:
    async with FakeVllm(FakeVllmConfig(faults=Faults(replay=mode))) as engine:
        for number in range(6):
            engine.inject(msgspec.msgpack.encode([float(number), [], 0]))
        found = await look(engine, QUICK)
        assert problems(found) == {"replay-incomplete"}
        assert "events" in found


async def test_replay_of_another_engine() -> None:
    async with FakeVllm() as engine, FakeVllm() as other:
        for number in range(3):
            other.inject(msgspec.msgpack.encode([float(number), [], 0]))
        found = await look(engine, Options(timeout_s=1.0, replays={engine.url: other.replay_endpoint}))
        assert "replay-foreign" in found
        assert "events" in found


async def test_replay_of_another_rank() -> None:
    async with FakeVllm(FakeVllmConfig(data_parallel_size=2)) as engine:
        body = {"model": "fake-model", "prompt": list(range(100, 200)), "max_tokens": 1}
        async with aiohttp.ClientSession() as session:
            for rank in ("0", "1"):
                headers = {"X-data-parallel-rank": rank}
                async with session.post(engine.url + "/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200
        ports = [publisher.replay_endpoint for publisher in engine.publishers]
        for publisher, port in zip(engine.publishers, reversed(ports), strict=True):
            publisher.replay_endpoint = port
        assert "rank-mixed" in await look(engine, QUICK)


async def test_e2_short_history() -> None:
    """E2: what an engine no longer has is known to be missing."""
    async with FakeVllm(FakeVllmConfig(buffer_steps=4)) as engine:
        for number in range(10):
            engine.inject(msgspec.msgpack.encode([float(number), [], 0]))
        found = await look(engine)
        assert problems(found) == set()
        assert "batch 6 of 11" in found["replay-short"].sentence
