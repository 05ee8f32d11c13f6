"""KV events on their way to the index: late, lost, fetched again, of a new process."""

import random

import pytest

from bench.engine.events import FULL_ATTENTION, BlockRemoved, BlockStored, Event
from bench.sim.feed import REPLAY_S, Feed
from bench.sim.prompts import unique
from indexer import PrefixIndex

SIZE = 4


def stored(number: int, parent: int | None = None) -> Event:
    return BlockStored(
        block_hashes=[100 + number],
        parent_block_hash=parent,
        token_ids=[(1 << 20) + number] * SIZE,
        block_size=SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind=FULL_ATTENTION,
    )


def held(index: PrefixIndex, number: int) -> bool:
    return bool(index.match(unique(number, SIZE)))


def feed(index: PrefixIndex, *, delay_s: float = 0.1, loss: float = 0.0, replays: bool = True) -> Feed:
    made = Feed("w", index, random.Random(1), delay_s=delay_s, loss=loss, replays=replays)
    made.drain(1.0)
    return made


def test_events_arrive_when_their_delay_is_over() -> None:
    index = PrefixIndex()
    f = feed(index)
    f.publish([stored(1)], 2.0)
    f.drain(2.09)
    assert not held(index, 1)
    f.drain(2.11)
    assert held(index, 1)


def test_a_removal_takes_back_what_was_stored() -> None:
    index = PrefixIndex()
    f = feed(index)
    f.publish([stored(1), stored(2)], 2.0)
    f.publish([BlockRemoved(block_hashes=[101], medium="GPU", group_idx=0)] * 1, 3.0)
    f.drain(4.0)
    assert (held(index, 1), held(index, 2)) == (False, True)


def test_lost_batches_are_fetched_when_the_gap_shows() -> None:
    index = PrefixIndex()
    f = feed(index, loss=0.5)
    for number in range(40):
        f.publish([stored(number)], 2.0 + number / 100)
    assert f.lost > 5
    f.drain(20.0)
    arrived = [number for number in range(40) if held(index, number)]
    # All but those after the last one that came, which nobody can miss yet.
    assert arrived == list(range(len(arrived)))
    assert len(arrived) > 30
    assert f.stream.counters["replays"] > 1
    assert not f.stream.partial


def test_a_gap_is_open_until_the_replay_is_here() -> None:
    index = PrefixIndex()
    f = feed(index, loss=0.999999)
    f.publish([stored(1)], 2.0)
    f._loss = 1e-9
    f.publish([stored(2)], 3.0)
    f.drain(3.1)
    assert not held(index, 2), "order is kept: what follows the gap waits"
    f.drain(3.1 + REPLAY_S)
    assert held(index, 1)
    assert held(index, 2)


def test_without_replays_the_index_stays_partial() -> None:
    index = PrefixIndex()
    f = feed(index, loss=0.5, replays=False)
    for number in range(40):
        f.publish([stored(number)], 2.0 + number / 100)
    f.drain(20.0)
    assert f.stream.partial
    assert sum(held(index, number) for number in range(40)) == 40 - f.lost


def test_a_restart_forgets_everything_and_numbers_anew() -> None:
    index = PrefixIndex()
    f = feed(index)
    f.publish([stored(1)], 2.0)
    f.drain(3.0)
    f.cleared = False
    f.restarted(4.0)
    assert not held(index, 1)
    assert f.cleared
    f.publish([stored(2)], 4.5)
    f.drain(5.0)
    assert held(index, 2)
    assert f.stream.next_seq == 1


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
def test_draining_twice_changes_nothing(delay_s: float) -> None:
    index = PrefixIndex()
    f = feed(index, delay_s=delay_s)
    f.publish([stored(1)], 2.0)
    f.drain(9.0)
    f.drain(9.0)
    assert index.stats()["workers"]["w"]["0"]["stored_blocks"] == 1
