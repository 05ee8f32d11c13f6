"""Ranks whose events stop coming, and events that cannot be followed: seen, said, and degraded from alone."""

from __future__ import annotations

import logging
import random
import re
import time

import msgspec
import pytest

import gateway.engine.silence as silence_module
from tests.support.doctor_world import silence
from tests.support.gateway_world import Fleet, engine, until


async def degraded(fleet: Fleet) -> list[dict[str, str]]:
    _, body = await fleet.get(fleet.url + "/readyz?verbose")
    return [each for each in body["degraded"] if each["what"].startswith("events_")]


async def metrics(fleet: Fleet) -> str:
    async with fleet.http.get(fleet.url + "/metrics") as response:
        return await response.text()


async def test_e22_e23_a_rank_that_falls_silent_is_not_taken_for_empty(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E22, E23: one of two ranks is sent prompts and announces none of them, though its connection and its replay are
    well. Its worker's cache is guessed from then on, and who it is is said.
    """
    monkeypatch.setattr(silence_module, "AFTER_S", 1.0)  # Longer than this machine may hold the other rank up.
    rng = random.Random(5)
    async with Fleet(a=engine(data_parallel_size=2)) as fleet:
        await until(lambda: fleet.core.fleet.workers["a"].publishes_events)
        assert await degraded(fleet) == []
        silence(fleet.engines["a"], 1)
        with caplog.at_level(logging.WARNING):
            while fleet.core.fleet.workers["a"].publishes_events:
                await fleet.complete([rng.randrange(10, 1000) for _ in range(64)])
        (found,) = await degraded(fleet)
        assert (found["what"], found["worker"]) == ("events_silent", "a")
        assert re.match(r"rank 1: no event has come although \d+ new prompts were sent to it", found["detail"])
        text = await metrics(fleet)
        assert 'warmroute_events_rank_arriving{rank="0",worker="a"} 1.0' in text
        assert 'warmroute_events_rank_arriving{rank="1",worker="a"} 0.0' in text
        assert 'warmroute_events_rank_age_seconds{rank="1",worker="a"} NaN' in text
        told = [record for record in caplog.records if "rank 1 of a announced nothing" in record.getMessage()]
        assert len(told) == 1
        prompt = [rng.randrange(10, 1000) for _ in range(64)]
        await fleet.complete(prompt)
        _, page, _ = await fleet.post(fleet.admin + "/debug/explain", {"model": "tiny", "prompt": prompt})
        assert max(row["cached_tokens"] for row in page["considered"]) > 0  # Guessed from what was sent.


async def test_what_makes_no_blocks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are only counted, and prompts that the engine refuses, make no events; nobody is silent for that."""
    monkeypatch.setattr(silence_module, "AFTER_S", 0.2)
    rng = random.Random(6)
    async with Fleet(a=engine()) as fleet:
        await until(lambda: fleet.core.fleet.workers["a"].publishes_events)
        feeds = fleet.core.ingest.status
        for _ in range(2 * silence_module.PROMPTS):
            text = " ".join(str(rng.random()) for _ in range(100))
            await fleet.post(
                fleet.url + "/v1/messages/count_tokens",
                {"model": "tiny", "messages": [{"role": "user", "content": text}]},
            )
            status, _, _ = await fleet.post(
                fleet.url + "/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 1_000_000}
            )
            assert status == 400
            fleet.core.publishing.watch()
        began_s = time.monotonic()
        await until(lambda: time.monotonic() > began_s + 0.3)
        fleet.core.publishing.watch()
        assert [fleet.core.publishing.unannounced(feed) for feed in feeds().values()] == [0]
        assert await degraded(fleet) == []


async def test_e19_blocks_in_finer_pieces_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """E19: a lower tier that hashes 4 tokens at a time is refused; the log says so once, the metrics how often."""
    event = {"type": "BlockStored", "parent_block_hash": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    whole = {**event, "token_ids": [9] * 16, "block_hashes": [7], "block_size": 16, "medium": "GPU"}
    pieces = {**event, "token_ids": [9] * 16, "block_hashes": [1, 2, 3, 4], "block_size": 4, "medium": "CPU"}
    async with Fleet(a=engine()) as fleet:
        with caplog.at_level(logging.WARNING):
            for number in range(3):
                fleet.engines["a"].inject(msgspec.msgpack.encode([float(number), [whole, pieces], 0]))
            await until(lambda: fleet.core.index.refused_events() == {("a", 0): 3})
            for _ in range(3):
                fleet.core.publishing.watch()
        (found,) = await degraded(fleet)
        assert found["what"] == "events_refused"
        assert found["detail"].startswith("3 events had blocks finer than the GPU's")
        assert 'warmroute_events_refused_total{rank="0",worker="a"} 3.0' in await metrics(fleet)
        told = [record for record in caplog.records if "finer pieces" in record.getMessage()]
        assert len(told) == 1
