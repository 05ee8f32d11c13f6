"""Ranks that announce nothing of prompts that must have made events."""

from __future__ import annotations

from typing import Any

from gateway.engine.feed import FeedStatus
from gateway.engine.silence import AFTER_S, PROMPTS, Silence


def feed(rank: int = 0, batches: int = 0) -> FeedStatus:
    known: dict[str, Any] = dict.fromkeys(FeedStatus.__struct_fields__)
    return FeedStatus(**{**known, "worker": "w", "rank": rank, "batches": batches})


def after(silence: Silence, feeds: list[FeedStatus], *sent: tuple[int, int, int], seconds: float = AFTER_S) -> None:
    """`sent`: rank, new blocks, how often. Looked at before, right after, and so much later."""
    silence.look(feeds, 0.0)
    for rank, blocks, times in sent:
        for _ in range(times):
            silence.sent("w", rank, blocks)
    silence.look(feeds, 1.0)
    silence.look(feeds, 1.0 + seconds)


def test_prompts_in_a_row_over_a_while() -> None:
    silence = Silence()
    after(silence, [feed()], (0, 3, PROMPTS))
    assert silence.prompts(feed(), 1.0 + AFTER_S) == PROMPTS
    assert silence.prompts(feed(), AFTER_S) == 0


def test_what_proves_nothing() -> None:
    few, cached, other = Silence(), Silence(), Silence()
    after(few, [feed()], (0, 3, PROMPTS - 1))
    after(cached, [feed()], (0, 0, 100))
    after(other, [feed(0), feed(1)], (1, 3, PROMPTS))
    for silence in (few, cached, other, Silence()):
        assert silence.prompts(feed(), 100.0) == 0
    assert other.prompts(feed(1), 100.0) == PROMPTS


def test_a_batch_ends_it() -> None:
    silence = Silence()
    after(silence, [feed()], (0, 3, PROMPTS))
    assert silence.prompts(feed(batches=1), 100.0) == 0  # before anybody looked again
    silence.look([feed(batches=1)], 50.0)
    assert silence.prompts(feed(batches=1), 100.0) == 0
    after(silence, [feed(batches=1)], (0, 3, PROMPTS))
    assert silence.prompts(feed(batches=1), 1.0 + AFTER_S) == PROMPTS


def test_prompts_that_were_announced_at_once_do_not_count_later() -> None:
    silence = Silence()
    silence.look([feed()], 0.0)
    for _ in range(PROMPTS):
        silence.sent("w", 0, 1)
    silence.look([feed(batches=1)], 0.5)
    silence.look([feed(batches=1)], 100.0)
    assert silence.prompts(feed(batches=1), 100.0) == 0


def test_prompts_that_did_not_run_do_not_count() -> None:
    """However late that is known, and whatever number the only feed has."""
    silence = Silence()
    silence.look([feed(rank=5)], 0.0)
    for _ in range(PROMPTS + 2):
        silence.sent("w", 0, 1)
    silence.unsent("w", 0)
    silence.look([feed(rank=5)], 1.0)
    assert silence.prompts(feed(rank=5), 100.0) == PROMPTS + 1
    for _ in range(2):
        silence.unsent("w", 0)
    assert silence.prompts(feed(rank=5), 100.0) == 0
    for _ in range(PROMPTS * 2):
        silence.unsent("w", 0)
    silence.unsent("nobody", 3)
    after(silence, [feed(rank=5, batches=1)], (0, 3, PROMPTS))
    assert silence.prompts(feed(rank=5, batches=1), 100.0) == PROMPTS


def test_time_runs_from_the_first_prompt_that_was_left_unannounced() -> None:
    silence = Silence()
    silence.look([feed()], 0.0)
    for _ in range(PROMPTS):
        silence.sent("w", 0, 1)
    silence.look([feed()], 1000.0)
    assert silence.prompts(feed(), 1000.0 + AFTER_S / 2) == 0
    assert silence.prompts(feed(), 1000.0 + AFTER_S) == PROMPTS


def test_a_single_feed_is_its_workers_whatever_its_number() -> None:
    silence = Silence()
    after(silence, [feed(rank=5)], (0, 3, PROMPTS))
    assert silence.prompts(feed(rank=5), 100.0) == PROMPTS


def test_a_worker_that_is_forgotten_begins_anew() -> None:
    silence = Silence()
    after(silence, [feed()], (0, 3, PROMPTS))
    silence.forget("w")
    silence.forget("nobody")
    assert silence.prompts(feed(), 100.0) == 0
