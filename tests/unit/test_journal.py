"""What an index tells of its changes: bounds, and what becomes of more than can be told."""

from __future__ import annotations

from indexer import PrefixIndex, Replica, decode_batch
from indexer.journal import MOST_KEYS
from tests.support.wire import removed, stored

BLOCK = 4


def store(index: PrefixIndex, hashes: list[int], parent: int | None = None) -> None:
    tokens = [h for h in hashes for _ in range(BLOCK)]
    index.apply("w", 0, decode_batch(stored(hashes, tokens, parent=parent, block_size=BLOCK)))


def remove(index: PrefixIndex, hashes: list[int]) -> None:
    index.apply("w", 0, decode_batch(removed(hashes)))


def test_somebody_is_woken_once_until_it_is_taken() -> None:
    woken: list[None] = []
    index = PrefixIndex()
    journal = index.keep_journal(lambda: woken.append(None))
    for h in range(10):
        store(index, [h])
    assert len(woken) == 1
    assert len(journal.take().changes) == 1
    index.apply("w", 0, decode_batch(removed([3])))
    assert len(woken) == 2
    (change,) = journal.take().changes
    assert (len(change.removed), change.stored) == (1, [])


def test_more_than_can_be_told_is_thrown_away_and_told_so() -> None:
    index = PrefixIndex()
    journal = index.keep_journal(lambda: None, most_blocks=100)
    parent = None
    for h in range(1, 300):
        store(index, [h], parent)
        parent = h
    taken = journal.take()
    assert taken.is_lost
    assert taken.holders == [("w", 0)]
    index.apply("w", 0, decode_batch(removed([299])))
    assert not journal.take().is_lost
    replica = Replica()
    replica.replace(("w", 0), journal.read(("w", 0)))
    journal.note_digest(("w", 0))
    assert journal.take().changes[0].digest == replica.digest(("w", 0)) != (0, 0)


def test_removals_without_end_are_bounded_too() -> None:
    index = PrefixIndex()
    n = 3 * MOST_KEYS
    for start in range(0, n, 128):
        hashes = list(range(start, start + 128))
        store(index, hashes)
    journal = index.keep_journal(lambda: None, most_blocks=2 * MOST_KEYS)
    for start in range(0, n, 128):
        index.apply("w", 0, decode_batch(removed(list(range(start, start + 128)))))
    taken = journal.take()
    assert all(len(change.removed) <= MOST_KEYS for change in taken.changes)
    assert taken.is_lost


def test_a_replica_is_changed_by_changes_alone() -> None:
    index, replica = PrefixIndex(), Replica()
    store(index, [5, 6])
    journal = index.keep_journal(lambda: None)
    replica.replace(("w", 0), journal.read(("w", 0)))
    prompt = [5] * BLOCK + [6] * BLOCK
    replica.clear("w")
    replica.remove_worker("w")
    assert replica.match(prompt) == index.match(prompt) != {}
    replica.drop("w")
    assert replica.match(prompt) == {}


def test_a_replica_with_less_memory_says_so() -> None:
    index, replica = PrefixIndex(), Replica(budget_bytes=1 << 20)
    for start in range(0, 8192, 128):
        hashes = list(range(start, start + 128))
        store(index, hashes)
    replica.replace(("w", 0), index.keep_journal(lambda: None).read(("w", 0)))
    assert replica.is_trimmed
    assert replica.bytes_used() <= 1 << 20
