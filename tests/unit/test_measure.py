"""The benchmarks of the gateway measure what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kv_publisher import STORED_PER_FRAME, frames
from bench.text import Text
from gateway.measure import front
from indexer import PrefixIndex, decode_batch
from tests.support.token_models import make_model


def test_published_events_keep_a_cache_half_full() -> None:
    index = PrefixIndex()
    payloads = frames(1)
    for payload in payloads * 2:
        index.apply("w", 0, decode_batch(payload))
    assert index.stats()["entries"] == len(payloads) // 2 * STORED_PER_FRAME
    assert index.stats()["orphan_blocks"] == 0


def test_text_is_the_same_for_a_seed_and_never_repeats_itself() -> None:
    text = Text(1)
    first = text.draw(50)
    assert Text(1).draw(50) == first
    assert text.draw(50) != first
    assert Text(2).draw(50) != first


def test_from_body_to_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "SIZES_TOKENS", {"small": 8_000})
    figures, used = front.measure_front(3, str(make_model(tmp_path, "chatml")))
    assert used == {"encoder": "fastokens", "pieces": True}
    assert min(figures["body_to_plan_small_turn_ms"], figures["body_to_plan_small_unseen_ms"]) > 0
    assert 4_000 < figures["body_to_plan_small_tokens"] < 16_000
