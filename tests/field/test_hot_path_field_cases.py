"""Faults of speed that users of other routers met in the field (docs/field-cases.md), one test each."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.request import RequestReader
from gateway.tokens import TokenService, TokenSettings
from gateway.tokens.local import Lookup
from gateway.tokens.types import pack_ids
from indexer import keys
from scorer.types import OutcomeKind, PdReason, RequestFacts
from tests.support.fleets import D, P, fleet
from tests.support.proxy_world import Call, Stub, World, until
from tests.support.token_models import make_model, reference_ids


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Blocks that were hashed, by block size."""
    counts, real = Counter[int](), keys.chain

    def chain(parent: int, tokens: bytes, block_size: int, start: int, stop: int, extras: Any) -> list[int]:
        counts[block_size] += stop - start
        return real(parent, tokens, block_size, start, stop, extras)

    monkeypatch.setattr(keys, "chain", chain)
    monkeypatch.setattr(keys, "_runs", {})
    return counts


def word_ids(n_tokens: int) -> list[int]:
    rng = random.Random(9)
    return [rng.randrange(128_000) for _ in range(n_tokens)]


async def test_o9_a_retried_request_is_hashed_once(hashed: Counter[int]) -> None:
    """O9: 32k tokens, and the first worker breaks the connection: one pass over the prompt for both decisions."""
    failed = 0

    async def breaks_once(call: Call) -> None:
        nonlocal failed
        if failed == 0:
            failed += 1
            call.reset()
        else:
            await call.ok(b'{"choices": []}')

    async with Stub(breaks_once) as a, Stub(breaks_once) as b, World({"a": a.url, "b": b.url}) as world:
        status, _, _ = await world.post({"model": "m", "prompt": word_ids(32_768)})
        assert (status, failed, len(a.calls) + len(b.calls)) == (200, 1, 2)
        await until(world.is_idle)
    assert hashed == {16: 2048}


def test_o9_remote_decisions_and_their_retries_hash_once_per_block_size(hashed: Counter[int]) -> None:
    """O9: prefill workers, one that fails, a decode worker that fails, indexes by events and by assumption."""
    rig = fleet(P("p1"), P("p2"), D("d1"), D("d2", events=False), D("d3", block_size=32), pd_policy="always-remote")
    tokens = word_ids(32_768)
    for worker in ("p1", "d1"):
        rig.hold(worker, tokens[:16_384])
    hashed.clear()
    facts = rig.facts(array("I", tokens).tolist())
    plan = rig.planner.plan(facts, None, rig.now_s, rig.rng)
    assert plan.remote
    rig.next_prefill(plan)
    rig.next_prefill(plan, local=True)
    rig.observe(plan, OutcomeKind.ERROR)
    again = rig.planner.plan(_retry(facts, plan.chosen.decode[0]), None, rig.now_s, rig.rng)
    rig.observe(again, OutcomeKind.FIRST_TOKEN)
    rig.observe(again, OutcomeKind.END, n_tokens=5)
    assert set(hashed) <= {16, 32}
    assert all(n_blocks <= 32_768 // block_size for block_size, n_blocks in hashed.items()), hashed
    assert hashed[16] == 2048


def _retry(facts: RequestFacts, failed: str) -> RequestFacts:
    import msgspec

    return msgspec.structs.replace(
        facts, request_id=facts.request_id + "/2", excluded=frozenset({failed}), keep_local=PdReason.DECODE_FAILED
    )


async def serving(folder: Path, **settings: Any) -> TokenService:
    service = TokenService(TokenSettings(check_rate=0.0, local_budget_s=60.0, **settings))
    await service.start()
    service.set_model("m", str(folder))
    await until(lambda: service.status()["m"]["local"].get("encoder") == "fastokens", 60.0)
    return service


@pytest.mark.parametrize("kind", ["chat", "messages"])
async def test_o11_a_turn_costs_its_own_text(kind: str, tmp_path: Path) -> None:
    """O11: a history of 30k tokens and 20 more turns: what is tokenised of each is its new text, and the ids are those
    of the whole.
    """
    rng = random.Random(3)

    def says(n_words: int) -> str:
        return " ".join("".join(rng.choices("etaoinshrdlu", k=5)) for _ in range(n_words))

    service = await serving(make_model(tmp_path, "chatml"))
    try:
        messages = [{"role": ("user", "assistant")[i % 2], "content": says(500)} for i in range(30)]
        (first,) = await service.tokens_for(kind, {"model": "m", "messages": messages}, "m")
        assert first.n_tokens > 30_000
        for turn in range(20):
            new = [{"role": "assistant", "content": says(100)}, {"role": "user", "content": says(40)}]
            messages += new
            before = service.usage()["cache_miss_bytes"]
            (tokens,) = await service.tokens_for(kind, {"model": "m", "messages": messages}, "m")
            tokenised = service.usage()["cache_miss_bytes"] - before
            text = sum(len(message["content"]) for message in new)
            assert text <= tokenised <= text + 100, f"turn {turn}"
            assert tokens.source == "local"
        rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        expected = reference_ids(rendered + "<|im_start|>assistant\n", add_special_tokens=False)
        assert tokens.ids == pack_ids(expected)
    finally:
        await service.close()


async def test_o12_1500_callers_at_once_are_bounded_and_all_are_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O12: the tokenizer's threads are stuck and 1,500 long prompts come: those that may wait are few, all others are
    placed at once by their size, and no thread is added.
    """
    release = threading.Event()

    def stuck(self: Lookup) -> bytes:
        assert release.wait(60)
        return pack_ids([1] * 100)

    service = await serving(make_model(tmp_path, "chatml"), threads=2, max_queued=64)
    rig = fleet(D("a"), D("b"))
    reader = RequestReader(rig.planner.fleet, service)
    placed: list[RequestFacts] = []

    async def ask(i: int) -> None:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"{i} " * 20_000}]}).encode()
        facts = await reader.read(f"r{i}", "chat", body, {})
        rig.planner.plan(facts, None, rig.now_s, rig.rng)
        placed.append(facts)

    monkeypatch.setattr(Lookup, "ids", stuck)
    threads = threading.active_count()
    callers = [asyncio.create_task(ask(i)) for i in range(1500)]
    try:
        await until(lambda: len(placed) == 1500 - 64, 60.0)
        assert {facts.token_source.value for facts in placed} == {"estimate"}
        assert all(facts.tokens is None and facts.prompt_tokens > 5_000 for facts in placed)
        assert service.usage()["jobs"] == 64
        assert service.usage()["jobs_shed"] == 1500 - 64
        assert threading.active_count() <= threads + 2
        release.set()
        await asyncio.gather(*callers)
        assert Counter(facts.token_source.value for facts in placed) == {"estimate": 1436, "local": 64}
        assert sum(rig.loads().values()) == 1500
    finally:
        release.set()
        await asyncio.gather(*callers, return_exceptions=True)
        await service.close()
