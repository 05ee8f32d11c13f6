"""Clearing in constant time, sweeping later, the byte budget, and how much is done under one hold of the lock."""

from threading import Lock
from typing import Any

import pytest

from indexer import PrefixIndex
from indexer.events import AllBlocksCleared
from indexer.holder import EntryMap, HolderState
from indexer.ingest import Ingest
from indexer.table import HOT_BYTES, MIN_BUDGET_BYTES, SLICE_BLOCKS, Table
from tests.support.kv_feed import SIZE, Feed, cleared, prompt, removed, stored


class Work:
    """Counts the blocks that were added or dropped, and the most of them within one hold of the lock."""

    def __init__(self) -> None:
        self.total = 0
        self.most_per_hold = 0
        self._lock = Lock()
        self._before = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._before = self.total

    def __exit__(self, *_: object) -> None:
        self.most_per_hold = max(self.most_per_hold, self.total - self._before)
        self._lock.release()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()

    def counting(owner: type, name: str, blocks: Any) -> None:
        original = getattr(owner, name)

        def wrapper(self: Any, *args: Any) -> Any:
            counted.total += blocks(*args)
            return original(self, *args)

        monkeypatch.setattr(owner, name, wrapper)

    counting(Table, "add_entry", lambda *_: 1)
    counting(Table, "add_entries", lambda state, entries, hashes, *_: len(hashes))
    counting(Table, "drop_entry", lambda *_: 1)
    return counted


def watched(work: Work, **kwargs: Any) -> Feed:
    feed = Feed(PrefixIndex(**kwargs))
    feed.index._lock = work  # type: ignore[assignment]
    feed.index._ingest._lock = work  # type: ignore[assignment]
    return feed


# ---- clearing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["clear", "remove_worker", "event"])
def test_clearing_touches_no_block(work: Work, how: str) -> None:
    feed = watched(work)
    tokens = prompt(3000)
    feed.store("w", tokens)
    before = work.total
    if how == "event":
        feed.index._ingest.apply(("w", 0), [AllBlocksCleared()])
    else:
        getattr(feed.index, how)("w")
    assert work.total == before
    assert feed.match(tokens) == {}
    assert feed.index.stats()["retired_holders"] == 1
    assert feed.index.stats()["entries"] == 3000


def test_cleared_blocks_are_swept_later_a_few_at_a_time(work: Work) -> None:
    feed = watched(work)
    feed.store("w", prompt(3000))
    feed.index.clear("w")
    assert feed.index.sweep(1000) == 1000
    assert feed.index.stats()["entries"] == 2000
    feed.store("w", prompt(1, 50_000))
    assert 0 < feed.index.stats()["entries"] < 2000
    feed.index.sweep(10_000)
    stats = feed.index.stats()
    assert (stats["entries"], stats["retired_holders"], stats["keys"]["gpu"]) == (1, 0, 1)
    assert feed.held(prompt(1, 50_000)) == 4
    assert work.most_per_hold <= SLICE_BLOCKS


def test_old_blocks_do_not_show_through_a_new_epoch() -> None:
    feed = Feed()
    tokens = prompt(300)
    for n in range(20):
        feed.store("w", tokens)
        feed.index.clear("w")
        feed.store("w", tokens, 0, n + 1)
        assert feed.held(tokens) == (n + 1) * SIZE
        feed.index.clear("w")
    feed.index.sweep(1 << 20)
    assert feed.index.stats()["keys"] == {"gpu": 0, "cpu": 0, "disk": 0, "other": 0}


def test_bits_of_swept_holders_are_used_again() -> None:
    feed = Feed()
    for _ in range(200):
        feed.store("w", prompt(2))
        feed.index.clear("w")
        feed.index.sweep(10)
    feed.store("w", prompt(2))
    assert feed.index._table.states["w", 0].bit.bit_length() <= 3


def test_counters_survive_a_clear_and_blocks_do_not() -> None:
    feed = Feed()
    feed.store("w", prompt(2))
    feed.apply("w", removed([12345]))
    feed.index.clear("w")
    stats = feed.rank_stats()
    assert (stats["batches"], stats["stored_blocks"]) == (2, 2)
    assert stats["counters"] == {"unknown_removed_blocks": 1}
    assert stats["blocks"]["gpu"] == 0


def test_clearing_who_is_not_there_is_fine() -> None:
    index = PrefixIndex()
    index.clear("nobody")
    index.clear("nobody", 3)
    index.clear_model("none")
    index.remove_worker("nobody")
    assert index.stats()["workers"] == {}


def test_worker_removed_in_the_middle_of_a_batch_ends_the_batch() -> None:
    feed = Feed()
    ingest: Ingest = feed.index._ingest
    original = ingest._stored

    def remove_after_first(state: HolderState, event: Any) -> None:
        original(state, event)
        feed.index.remove_worker("w")

    ingest._stored = remove_after_first  # type: ignore[method-assign]
    feed.apply("w", feed.event("w", prompt(2)), feed.event("w", prompt(2, 100)), cleared())
    assert feed.index.stats()["workers"] == {}
    assert feed.match(prompt(2)) == feed.match(prompt(2, 100)) == {}


def test_epoch_that_changes_in_the_middle_of_a_long_event_takes_its_rest_along(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed()
    tokens = prompt(1000)
    slices = 0
    original = Ingest._store_slice

    def clear_after_second(self: Ingest, *args: Any) -> int:
        nonlocal slices
        slices += 1
        if slices == 3:
            self._table.clear(("w", 0))
        return original(self, *args)

    monkeypatch.setattr(Ingest, "_store_slice", clear_after_second)
    feed.store("w", tokens)
    assert slices == 3
    assert feed.match(tokens) == {}


class Overtaken:
    """A lock that somebody else gets first, once, to clear the worker and sweep its blocks."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._lock = feed.index._lock
        self._armed = True

    def __enter__(self) -> None:
        if self._armed:
            self._armed = False
            self._feed.index.clear("w")
            self._feed.index.sweep(1 << 20)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def some_events(feed: Feed) -> dict[str, Any]:
    tokens = prompt(300)
    hashes = feed.hashes("w", tokens)
    return {
        "store": feed.event("w", tokens, 10, 20),
        "long store": feed.event("w", tokens, 10),
        "store at the root": feed.event("w", prompt(2, 5000)),
        "waiting store": feed.event("w", prompt(3, 6000), 1),
        "offload": stored(hashes[:10], [], medium="CPU"),
        "removal": removed(hashes[:5]),
        "long removal": removed([*hashes, *hashes]),
        "clear": cleared(),
        "clear of a tier": cleared(medium="GPU"),
    }


@pytest.mark.parametrize("name", sorted(some_events(Feed())))
def test_event_overtaken_by_a_clear_leaves_nothing_behind(name: str) -> None:
    feed = Feed()
    feed.store("w", prompt(300), 0, 10)
    feed.store("w", prompt(300), 0, 10, medium="CPU")
    feed.index._ingest._lock = Overtaken(feed)  # type: ignore[assignment]
    feed.apply("w", some_events(feed)[name])
    assert feed.match(prompt(300)) == feed.match(prompt(2, 5000)) == {}
    feed.index.sweep(1 << 20)
    stats = feed.index.stats()
    assert stats["entries"] == stats["orphan_blocks"] == stats["retired_holders"] == 0
    assert not any(stats["keys"].values())


# ---- the lock -------------------------------------------------------------------------------------------------------


def test_no_event_holds_the_lock_for_more_than_a_slice(work: Work) -> None:
    feed = watched(work)
    tokens = prompt(2000)
    hashes = feed.hashes("w", tokens)
    feed.store("w", tokens, 1000)
    feed.store("w", tokens, 0, 1000)
    feed.store("w", tokens, medium="CPU")
    feed.apply("w", removed(hashes[1500:]))
    feed.apply("w", *[removed([h]) for h in hashes[1000:1500]])
    feed.apply("w", *[removed(hashes[i : i + 100]) for i in range(0, 1000, 100)])
    feed.apply("w", cleared(medium="CPU"))
    assert feed.match(tokens) == {}
    feed.store("w", tokens)
    feed.apply("w", stored(hashes, [], medium="CPU"))
    assert work.most_per_hold <= SLICE_BLOCKS, work.most_per_hold


# ---- the budget -----------------------------------------------------------------------------------------------------


def filled(n_prompts: int, **kwargs: Any) -> tuple[Feed, list[list[int]]]:
    feed = Feed(PrefixIndex(budget_bytes=MIN_BUDGET_BYTES, **kwargs))
    prompts = [prompt(50, 1000 * i) for i in range(n_prompts)]
    for tokens in prompts:
        feed.store("w", tokens)
    return feed, prompts


def test_the_budget_holds_and_the_oldest_blocks_give_way() -> None:
    feed, prompts = filled(200)
    stats = feed.index.stats()
    assert stats["bytes"] <= MIN_BUDGET_BYTES - 2 * feed.index._table._hot_limit * HOT_BYTES
    assert stats["entries"] + stats["evicted_by_budget_blocks"] == 200 * 50
    depths = [feed.held(tokens) for tokens in prompts]
    first_held = next(i for i, depth in enumerate(depths) if depth == 200)
    assert 100 < first_held < 190
    assert set(depths[:first_held]) <= {0}
    assert set(depths[first_held:]) == {200}


def test_what_lookups_touch_stays() -> None:
    feed = Feed(PrefixIndex(budget_bytes=MIN_BUDGET_BYTES))
    hot = prompt(50, 10_000_000)
    feed.store("w", hot)
    for i in range(300):
        feed.store("w", prompt(50, 1000 * i))
        assert feed.held(hot) == 200
    assert feed.held(prompt(50)) == 0


def test_the_holder_with_most_gives_way_first() -> None:
    feed = Feed(PrefixIndex(budget_bytes=MIN_BUDGET_BYTES))
    small = prompt(20, 10_000_000)
    feed.store("small", small)
    for i in range(300):
        feed.store("large", prompt(50, 1000 * i))
    assert feed.held(small, "small") == 80


def test_removals_of_evicted_blocks_are_only_counted() -> None:
    feed, prompts = filled(200)
    feed.remove("w", prompts[0], *reversed(range(50)))
    assert feed.counter("unknown_removed_blocks") == 50
    feed.store("w", prompts[0])
    assert feed.held(prompts[0]) == 200


def test_waiting_blocks_are_within_the_budget_too() -> None:
    feed = Feed(PrefixIndex(budget_bytes=MIN_BUDGET_BYTES))
    for i in range(300):
        feed.store("w", prompt(50, 1000 * i), 1)
        assert feed.index.stats()["bytes"] <= MIN_BUDGET_BYTES
    assert feed.rank_stats()["orphan_blocks_dropped"] > 0
    last = prompt(50, 1000 * 299)
    feed.store("w", last, 0, 1)
    assert feed.held(last) == 200


def test_cleared_blocks_are_swept_before_anything_is_evicted() -> None:
    feed = Feed(PrefixIndex(budget_bytes=MIN_BUDGET_BYTES))
    for i in range(30):
        feed.store("w", prompt(50, 1000 * i))
    feed.index.clear("w")
    for i in range(30):
        feed.store("w", prompt(50, 1_000_000 + 1000 * i))
    assert feed.index.stats()["evicted_by_budget_blocks"] == 0
    assert all(feed.held(prompt(50, 1_000_000 + 1000 * i)) == 200 for i in range(30))


def test_an_entry_map_of_many_first_blocks_stays_small() -> None:
    entries = EntryMap(0, 0, 4)
    for i in range(10_000):
        entries.note_root(i, i)
    assert len(entries.roots) <= 300


def test_many_first_blocks_in_one_batch_cost_each_the_same() -> None:
    """Work per first block must not grow with their number: the trimming is counted, not timed."""
    entries = EntryMap(0, 0, 4)
    trims = 0
    for i in range(20_000):
        before = entries.roots
        entries.note_root(i, 1)
        trims += entries.roots is not before
    assert trims < 12


def test_orphans_cannot_take_the_budget_from_what_can_be_found() -> None:
    """Blocks whose parents were forgotten wait in vain; fresh prompts must still be indexed."""
    feed = Feed(PrefixIndex(budget_bytes=MIN_BUDGET_BYTES))
    for i in range(3000):
        feed.store("w", prompt(8, 1000 * i), 4)
    for i in range(100):
        feed.store("w", prompt(8, 10_000_000 + 1000 * i))
    assert sum(feed.held(prompt(8, 10_000_000 + 1000 * i)) == 8 * SIZE for i in range(100)) > 90


def test_a_worker_cannot_bring_up_ranks_without_end() -> None:
    feed = Feed()
    for rank in range(1000):
        feed.store("w", prompt(2), rank=rank)
    feed.store("v", prompt(2), rank=7)
    stats = feed.index.stats()
    assert len(stats["workers"]["w"]) == 256
    assert stats["batches_of_refused_ranks"] == 744
    assert list(stats["workers"]["v"]) == ["7"]


def test_eviction_passes_over_a_map_once_per_many_blocks() -> None:
    """Forgetting n blocks one slice at a time reads the map a few times, however many are gone already."""
    entries = EntryMap(0, 0, 4)
    entries.own.update((i, i) for i in range(20_000))
    scans = 0
    while entries.own:
        scans += not entries._oldest
        for h in entries.oldest(100):
            del entries.own[h]
    assert scans <= 6
