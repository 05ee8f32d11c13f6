"""Faults of event streams that users met in the field (docs/field-cases.md), one test each."""

from typing import Any

import pytest

from indexer import Apply, ApproximateIndex, Clear, Match, PrefixIndex, Prompt, Replay, Stream, decode_batch
from indexer.stream import Action
from tests.support.kv_feed import Feed, as_array, cleared, payload, prompt, removed, stored

TOKENS = prompt(4)


class Worker:
    """One (worker, rank): its stream feeds the index, and replays are answered when the test says so."""

    def __init__(self, feed: Feed, **stream: Any) -> None:
        self.feed = feed
        self.stream = Stream(**stream)
        self.asked: list[Replay] = []
        self.applied = 0

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self.applied += 1
                self.feed.index.apply("w", 0, action.batch)
            elif isinstance(action, Clear):
                self.feed.index.clear("w", 0)
            else:
                self.asked.append(action)

    def live(self, seq: int, *events: Any, ts: float = 1.0) -> None:
        data = payload(*events, ts=ts)
        self._do(self.stream.live(seq, data, decode_batch(data)))

    def replayed(self, seq: int, *events: Any, ts: float = 1.0) -> None:
        data = payload(*events, ts=ts)
        self._do(self.stream.replayed(self.asked[-1].id, seq, data, decode_batch(data)))

    def replay_done(self) -> None:
        self._do(self.stream.replay_done(self.asked[-1].id))

    def replay_failed(self) -> None:
        self._do(self.stream.replay_failed(self.asked[-1].id))

    def connected(self) -> None:
        self._do(self.stream.connected())

    @property
    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.stream.stats()["counters"]
        return counters


def chunk(i: int) -> dict[str, Any]:
    return Feed().event("w", TOKENS, i, i + 1)


def test_e1_lost_batches_are_replayed_and_counted() -> None:
    """E1: batches 0, 1, 4. The missing ones are noticed, asked for from 2 on, and the gap is counted."""
    worker = Worker(Feed())
    for seq in (0, 1):
        worker.live(seq, chunk(seq))
    worker.live(4, chunk(0))
    assert [replay.start for replay in worker.asked] == [2]
    assert worker.counters["gaps"] == 1
    for seq in (2, 3):
        worker.replayed(seq, chunk(seq))
    worker.replay_done()
    assert worker.feed.held(TOKENS) == 16
    assert not worker.stream.partial


def test_e2_late_subscriber_fetches_what_was_before() -> None:
    """E2: the first message has sequence 7. That is a gap of seven, and what cannot be fetched makes it partial."""
    whole, short = Worker(Feed()), Worker(Feed())
    for worker in (whole, short):
        worker.live(7, chunk(3))
        assert [replay.start for replay in worker.asked] == [0]
    for seq in range(7):
        whole.replayed(seq, *([chunk(seq)] if seq < 3 else []))
    whole.replay_done()
    assert (whole.feed.held(TOKENS), whole.stream.partial) == (16, False)
    short.replay_done()
    assert (short.feed.held(TOKENS), short.stream.partial) == (0, True)
    assert short.counters["missing_batches"] == 7


@pytest.mark.parametrize("replay_in_time", [True, False])
def test_e4_late_replay_does_not_revive_a_removed_block(replay_in_time: bool) -> None:
    """E4: Stored (5) is lost, Removed (6) is live, the replay of 5 comes late. The block stays removed either way."""
    worker = Worker(Feed(), replay_attempts=1)
    for seq in range(5):
        worker.live(seq)
    worker.live(6, removed(chunk(0)["block_hashes"]))
    if not replay_in_time:
        worker.replay_failed()
    worker.replayed(5, chunk(0))
    worker.replay_done()
    assert worker.feed.match(TOKENS) == {}
    assert worker.stream.partial is not replay_in_time
    assert worker.stream.next_seq == 7


def test_e5_overlapping_live_and_replayed_batches_apply_once() -> None:
    """E5: live 10 and 11, the replay returns 8 to 11. Each counts once, so one removal takes the block away."""
    worker = Worker(Feed())
    for seq in range(8):
        worker.live(seq)
    worker.live(10, chunk(0))
    worker.live(11, chunk(1))
    for seq in (8, 9):
        worker.replayed(seq)
    worker.replayed(10, chunk(0))
    worker.replayed(11, chunk(1))
    worker.replay_done()
    assert worker.applied == 12
    worker.live(12, removed([*chunk(1)["block_hashes"], *chunk(0)["block_hashes"]]))
    assert worker.feed.index.stats()["entries"] == 0


def test_e7_reregistered_worker_starts_with_a_fresh_watermark() -> None:
    """E7: read to 40, deregistered, registered again, batch 41. Everything is fetched anew; nothing old is left."""
    feed = Feed()
    before = Worker(feed)
    for seq in range(41):
        before.live(seq, *([chunk(seq)] if seq < 2 else []))
    assert feed.held(TOKENS) == 8
    feed.index.remove_worker("w")
    assert feed.match(TOKENS) == {}
    again = Worker(feed)
    again.live(41, chunk(2))
    assert [replay.start for replay in again.asked] == [0]
    for seq in range(41):
        again.replayed(seq, *([chunk(seq)] if seq < 2 else []))
    again.replay_done()
    assert feed.held(TOKENS) == 12


def test_e8_slow_joiner_replays_from_the_start_on_connect() -> None:
    """E8: events published before the subscription took hold. On connect everything is asked for."""
    worker = Worker(Feed())
    worker.connected()
    assert [replay.start for replay in worker.asked] == [0]
    worker.live(2, chunk(2))
    for seq in (0, 1, 2):
        worker.replayed(seq, chunk(seq))
    worker.replay_done()
    worker.live(3, chunk(3))
    assert worker.feed.held(TOKENS) == 16
    assert worker.applied == 4


def test_e10_block_stored_twice_survives_one_removal() -> None:
    """E10: Stored, Stored, Removed leaves the block, the second removal takes it; the count is capped and cleared."""
    feed = Feed()
    feed.store("w", TOKENS)
    feed.store("w", TOKENS)
    feed.remove("w", TOKENS, 3, 2, 1, 0)
    assert feed.held(TOKENS) == 16
    feed.remove("w", TOKENS, 3, 2, 1, 0)
    assert feed.match(TOKENS) == {}
    feed.apply("w", *[feed.event("w", TOKENS)] * 5000)
    assert feed.rank_stats()["extra_copies"] <= 4 * 1024
    feed.apply("w", cleared())
    assert feed.rank_stats()["extra_copies"] == 0
    feed.store("w", TOKENS)
    feed.remove("w", TOKENS, 3)
    assert feed.held(TOKENS) == 12


def test_e11_hash_listed_twice_in_one_store_clears_nothing() -> None:
    """E11: BlockStored([h1, h1]) is one bad event; what the worker held stays, and the rest of the event counts."""
    feed = Feed()
    feed.store("w", prompt(2, 500))
    event = feed.event("w", TOKENS, 0, 2)
    h = event["block_hashes"][0]
    feed.apply("w", {**event, "block_hashes": [h, h]}, feed.event("w", prompt(1, 700)))
    assert (feed.held(prompt(2, 500)), feed.held(prompt(1, 700)), feed.held(TOKENS)) == (8, 4, 4)
    assert feed.counter("repeated_hashes") == 1


def test_e13_reset_while_idle_can_be_told_from_outside() -> None:
    """E13: a reset without traffic announces nothing. Whoever learns of it clears; the late event does no harm."""
    feed = Feed()
    feed.store("w", TOKENS)
    feed.store("v", TOKENS)
    feed.index.clear("w")
    assert set(feed.match(TOKENS)) == {("v", 0)}
    feed.apply("w", cleared(), feed.event("w", TOKENS, 0, 2))
    assert feed.held(TOKENS, "w") == 8


def test_e14_reset_of_the_gpu_keeps_the_other_tiers() -> None:
    """E14: a clear with a medium empties that tier; without one, all."""
    feed = Feed()
    feed.store("w", TOKENS)
    feed.apply("w", stored(feed.hashes("w", TOKENS), [], medium="CPU"))
    feed.apply("w", cleared(medium="GPU"))
    assert feed.match(TOKENS) == {("w", 0): Match(0, 16, 0, 16)}
    feed.apply("w", cleared())
    assert feed.match(TOKENS) == {}


def test_e16_sliding_window_group_is_no_prefix() -> None:
    """E16: blocks of a window's tail, at another block size, do not prove a prefix; they are counted by group."""
    feed = Feed(size=16)
    tokens = prompt(4, size=16)
    feed.store("w", tokens, 0, 2, group_idx=0, kv_cache_spec_kind="full_attention")
    feed.store("w", tokens, 8, size=4, group_idx=1, kv_cache_spec_kind="sliding_window")
    assert feed.held(tokens) == 32
    assert feed.rank_stats()["ignored_group_blocks"] == {"1": 8}
    assert feed.rank_stats()["orphan_blocks"] == 0


def test_e17_eviction_in_one_group_is_none_in_the_others() -> None:
    """E17: Removed(group 2, h) while group 0 still holds h."""
    feed = Feed()
    for group in (0, 2):
        feed.store("w", TOKENS, group_idx=group, kv_cache_spec_kind="full_attention")
    feed.remove("w", TOKENS, 3, 2, 1, 0, group_idx=2)
    assert feed.held(TOKENS) == 16
    feed.remove("w", TOKENS, 3, group_idx=0)
    assert feed.held(TOKENS) == 12


def test_e19_offload_events_at_a_finer_hash_granularity_are_refused() -> None:
    """E19: 64 hashes of 4 tokens for one 256-token block. Refused and counted; the GPU's blocks are as they were."""
    feed = Feed(size=256)
    tokens = prompt(2, size=256)
    feed.store("w", tokens)
    feed.store("w", tokens[:256], size=4, medium="CPU")
    feed.apply("w", stored(feed.hashes("w", tokens, size=4), [], block_size=4, medium="CPU"))
    assert feed.match(tokens) == {("w", 0): Match(512, 0, 0, 512)}
    assert feed.counter("refused_block_size_events") == 1
    assert feed.counter("unknown_offloaded_blocks") == 128


def test_e20_worker_without_events_shows_and_can_be_approximated() -> None:
    """E20: configured, but no event ever comes. The index says how many batches it had; routing is the fallback."""
    feed = Feed()
    feed.store("talks", TOKENS)
    feed.index.set_worker("silent", models=["m"])
    workers = feed.index.stats()["workers"]
    assert workers["talks"]["0"]["batches"] == 1
    assert "silent" not in workers
    fallback = ApproximateIndex(block_size=4)
    fallback.assume("silent", 0, Prompt(TOKENS), 0.0)
    assert fallback.match(TOKENS, now_s=1.0) == {("silent", 0): Match(16, 0, 0, 16, True)}


def test_e22_silent_rank_is_unknown_not_empty() -> None:
    """E22: only one of two ranks sends events. The other is absent from matches and statistics, not empty."""
    feed = Feed()
    feed.store("w", TOKENS, rank=0)
    assert set(feed.match(TOKENS)) == {("w", 0)}
    assert set(feed.index.stats()["workers"]["w"]) == {"0"}


def test_e23_rank_named_in_the_batch_is_the_rank() -> None:
    """E23: one publisher for several ranks. The batch's own rank decides, whatever socket it came through."""
    feed = Feed()
    for rank in (0, 1):
        feed.index.apply("w", 0, decode_batch(payload(feed.event("w", TOKENS, 0, 1 + rank), rank=rank)))
    assert {h: m.gpu_tokens for h, m in feed.match(TOKENS).items()} == {("w", 0): 4, ("w", 1): 8}
    assert {rank: s["batches"] for rank, s in feed.index.stats()["workers"]["w"].items()} == {"0": 1, "1": 1}


def test_e25_token_ids_in_pairs_are_skipped() -> None:
    """E25: speculative engines send [[a, b], [b, c]]. The event is counted as malformed, its neighbours count."""
    pairs = stored([1], [[1, 2], [2, 3], [3, 4], [4, 5]])
    feed = Feed()
    feed.apply("w", pairs, feed.event("w", TOKENS), as_array(pairs))
    assert feed.held(TOKENS) == 16
    assert feed.counter("malformed_events") == 2


def test_e26_a_clear_with_every_lookup_is_survived_and_shows() -> None:
    """E26: clears between all stores. Memory stays bounded, the last store counts, and a counter exposes it."""
    feed = Feed()
    for i in range(1000):
        feed.apply("w", feed.event("w", prompt(50, 100 * i)))
        feed.apply("w", cleared())
        stats = feed.index.stats()
        assert stats["entries"] <= 100
        assert stats["retired_holders"] <= 2
    feed.store("w", TOKENS)
    assert feed.held(TOKENS) == 16
    assert feed.counter("clears") == 1000


def test_e28_unknown_block_in_a_removal_does_not_stop_the_rest() -> None:
    """E28: Removed([unknown, h]) removes h."""
    feed = Feed(PrefixIndex())
    feed.store("w", TOKENS)
    feed.apply("w", removed([12345, feed.hashes("w", TOKENS)[3], 6789, feed.hashes("w", TOKENS)[2]]))
    assert feed.held(TOKENS) == 8
    assert feed.counter("unknown_removed_blocks") == 2
