"""EventIngest against publishers on real sockets."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from gateway import addresses
from gateway.engine.feed import FeedStatus, IngestSettings
from gateway.engine.subscriber import EventIngest
from indexer import EventBatch, Holder, PrefixIndex, SavedRank, decode_batch
from tests.support.publishers import SIZE, RawEngine, prompt, store, until
from tests.support.wire import cleared, payload, removed

QUICK = IngestSettings(
    replay_timeout_s=0.3,
    replay_attempts=2,
    verify_after_s=0.1,
    reopen_after_s=0.05,
    mend_after_s=3600,
    mend_at_most_s=3600,
)


class World:
    """An ingest thread, its index and the engines a test makes."""

    def __init__(self, **options: Any) -> None:
        self.index = PrefixIndex()
        self.batches: list[tuple[str, int, EventBatch]] = []
        self.clears: list[tuple[str, int, str]] = []
        self._open = ExitStack()
        options = {"settings": QUICK, "on_batch": self._batch, "on_clear": self._clear, **options}
        holds = options.pop("holds", False)
        self.ingest = EventIngest(self.index, **options)
        if holds:
            self.ingest.hold()
        self.ingest.start()
        self._open.callback(self.ingest.stop)

    def _batch(self, worker: str, rank: int, batch: EventBatch) -> None:
        self.batches.append((worker, rank, batch))

    def _clear(self, worker: str, rank: int, reason: str) -> None:
        self.clears.append((worker, rank, reason))

    def engine(self, **options: Any) -> RawEngine:
        engine = RawEngine(**options)
        self._open.callback(engine.close)
        return engine

    def follow(self, engine: RawEngine, worker: str = "w", rank: int = 0, *, verified: bool = True) -> None:
        """Add it and wait until it is subscribed and, if it can be, verified."""
        self.ingest.add(worker, rank, engine.endpoint, engine.replay_endpoint)
        until(lambda: self.state(worker, rank) == "connected")
        if verified and engine.replay_endpoint:
            until(lambda: self.status(worker, rank).counters.get("verifications"))
            until(lambda: self.status(worker, rank).phase == "live")

    def status(self, worker: str = "w", rank: int = 0) -> FeedStatus:
        return self.ingest.status()[worker, rank]

    def state(self, worker: str = "w", rank: int = 0) -> str | None:
        found = self.ingest.status().get((worker, rank))
        return found and found.endpoint_state

    def held(self, number: int, worker: str = "w", rank: int = 0) -> int:
        match = self.index.match(prompt(number)).get((worker, rank))
        return match.gpu_tokens if match else 0

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:

        def make(**options: Any) -> World:
            world = World(**options)
            stack.callback(world.close)
            return world

        yield make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def has_all(world: World, numbers: range, worker: str = "w", rank: int = 0) -> bool:
    return all(world.held(number, worker, rank) == 2 * SIZE for number in numbers)


# ---- one engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True], ids=["with topic", "before vLLM 0.26"])
def test_what_was_published_before_we_came_is_replayed(world: World, old: bool) -> None:
    engine = world.engine(old=old)
    for number in range(3):
        engine.publish(store(number))
    world.follow(engine)
    until(lambda: has_all(world, range(3)))
    engine.publish(store(3))
    until(lambda: has_all(world, range(4)))
    status = world.status()
    assert (status.phase, status.partial, status.gaps, status.epoch) == ("live", False, 0, 0)
    assert status.batches == status.events == 4
    assert status.events_per_s > 0
    assert status.last_batch_age_s is not None
    assert [batch.ts for _, _, batch in world.batches] == [0.0, 1.0, 2.0, 3.0]


def test_e1_lost_batches_are_noticed_and_fetched(world: World) -> None:
    """E1: batches 0, 1, 4 arrive: 2 and 3 are asked for again, applied in order, and the gap is counted."""
    engine = world.engine()
    world.follow(engine)
    for number in range(5):
        engine.publish(store(number), lost=number in (2, 3))
    until(lambda: has_all(world, range(5)))
    assert world.status().gaps == 1
    assert engine.requests[-1] == 2
    assert [batch.ts for _, _, batch in world.batches] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_e2_first_message_late_in_the_sequence_is_a_gap(world: World) -> None:
    """E2: without a replay endpoint a first sequence of 7 leaves the worker partial, not complete."""
    engine = world.engine(replay=False)
    engine.next_seq = 7
    world.follow(engine)
    until(lambda: engine.publish(store(7)) and world.batches)
    status = world.status()
    assert status.partial
    assert status.missing_batches >= 7


def test_e4_batches_wait_for_the_replay_and_are_applied_in_order(world: World) -> None:
    """E4: Stored(A) lost, Removed(A) live: a late replay must not revive A."""
    engine = world.engine()
    world.follow(engine)
    engine.answers = False
    engine.publish(store(1), lost=True)
    engine.publish(removed([1001, 1002], ts=2.0))
    until(lambda: world.status().phase == "replaying")
    assert not world.batches
    engine.answers = True
    until(lambda: len(world.batches) == 2)
    assert [batch.ts for _, _, batch in world.batches] == [1.0, 2.0]
    assert world.held(1) == 0


def test_e5_overlapping_live_and_replayed_batches_are_applied_once(world: World) -> None:
    """E5: whatever overlaps, each sequence is applied once: one removal removes."""
    engine = world.engine()
    engine.publish(store(0))
    engine.publish(store(1))
    world.follow(engine)
    engine.send_raw([b"", (1).to_bytes(8, "big"), store(1)])
    engine.publish(removed([1001, 1002], ts=9.0))
    until(lambda: len(world.batches) == 3)
    assert world.held(1) == 0
    assert world.held(0) == 2 * SIZE


def test_e7_registering_again_starts_afresh(world: World) -> None:
    """E7: after remove and add the whole history is read again and nothing counts twice."""
    engine = world.engine()
    for number in range(3):
        engine.publish(store(number))
    world.follow(engine)
    until(lambda: has_all(world, range(3)))
    world.ingest.remove("w")
    assert world.held(0) == 0
    engine.publish(store(3))
    engine.requests.clear()
    world.follow(engine)
    until(lambda: has_all(world, range(4)))
    assert engine.requests[0] == 0
    engine.publish(removed([1, 2], ts=9.0))
    until(lambda: world.held(0) == 0)


def test_e8_what_a_slow_joiner_missed_is_found_by_the_verification(world: World) -> None:
    """E8: a batch lost between the replay and the subscription's taking effect, on an engine that is idle after it."""
    engine = world.engine()
    engine.publish(store(0))
    world.follow(engine, verified=False)
    until(lambda: world.held(0))
    engine.publish(store(1), lost=True)  # nothing more is ever said live
    until(lambda: has_all(world, range(2)))
    assert world.status().counters["verifications"] == 1
    assert not world.clears


def test_remove_holds_at_once(world: World) -> None:
    """Nothing is applied once `remove` has returned, however much is queued."""
    engine = world.engine()
    world.follow(engine)
    for number in range(2000):
        engine.publish(store(number % 50, ts=float(number)))
    until(lambda: world.batches)
    world.ingest.remove("w")
    assert [world.held(number) for number in range(50)] == [0] * 50
    assert world.ingest.status() == {}
    until(lambda: world.ingest._feeds.of_worker("w") == [])
    assert [world.held(number) for number in range(50)] == [0] * 50


def test_a_long_replay_comes_complete_although_the_router_drops(world: World) -> None:
    """6000 batches through a ROUTER whose queue holds 1000 of them."""
    engine = world.engine()
    engine.history = [(seq, store(seq % 40, blocks=60, ts=float(seq))) for seq in range(6000)]
    engine.next_seq = 6000
    world.follow(engine, verified=False)
    until(lambda: world.status().next_seq == 6000, within_s=60)
    assert not world.status().partial
    assert [int(batch.ts) for _, _, batch in world.batches] == list(range(6000))


def test_a_hole_in_an_answer_is_asked_for_again(world: World) -> None:
    """A ROUTER whose queue was full dropped batches 3 and 4 of its answer; batch 0 the engine has no more."""
    engine = world.engine()
    for number in range(8):
        engine.publish(store(number))
    del engine.history[0]
    engine.lost_in_replay = {3, 4}
    world.follow(engine, verified=False)
    until(lambda: world.status().next_seq == 8)
    assert engine.requests[:2] == [0, 3]
    assert [batch.ts for _, _, batch in world.batches] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert world.status().missing_batches == 1


def test_nothing_is_asked_of_an_engine_that_is_down(world: World) -> None:
    engine = world.engine()
    engine.publish(store(0))
    world.follow(engine)
    engine.close()
    until(lambda: world.state() == "refused")
    asked = world.ingest.counters()["replay_requests"]
    world.ingest.process_restarted("w", "start time changed")
    until(lambda: world.clears[-1][2] == "start time changed")
    assert world.status().phase == "replaying"
    assert world.ingest.replay_levels()["running"] == 0
    assert world.ingest.counters()["replay_requests"] == asked
    engine.reopen()
    until(lambda: world.held(0))
    assert "replay_failures" not in world.status().counters


def test_a_first_replay_that_failed_is_made_up_for_after_a_reconnect(world: World) -> None:
    engine = world.engine()
    engine.answers = False
    for number in range(3):
        engine.publish(store(number))
    world.follow(engine, verified=False)
    until(lambda: world.status().partial)
    engine.answers = True
    engine.close()
    engine.reopen()
    until(lambda: has_all(world, range(3)))
    assert not world.status().partial


def test_a_rank_that_turns_up_while_its_worker_is_removed_is_not_applied(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine(replay=False)
    world.follow(engine)
    until(lambda: engine.publish(store(0)) >= 0 and world.held(0))

    def decode_and_remove(data: bytes) -> EventBatch:
        batch = decode_batch(data)
        if batch.data_parallel_rank == 5:
            world.ingest.remove("w")
        return batch

    monkeypatch.setattr("gateway.engine.subscriber.decode_batch", decode_and_remove)
    engine.send_raw([b"", bytes(8), store(1, rank=5)])
    until(lambda: world.ingest.status() == {})
    until(lambda: not list(world.ingest._feeds))
    assert world.held(1, rank=5) == 0
    assert not any(rank == 5 for _, rank, _ in world.batches)


def test_a_replay_that_never_comes_leaves_a_visible_gap(world: World) -> None:
    engine = world.engine()
    world.follow(engine)
    engine.answers = False
    engine.publish(store(0), lost=True)
    engine.publish(store(1))
    until(lambda: has_all(world, range(1, 2)))
    status = world.status()
    assert status.partial
    assert status.counters["replay_failures"] == QUICK.replay_attempts
    assert world.ingest.counters()["replay_timeouts"] >= QUICK.replay_attempts


def test_what_a_replay_that_never_came_left_out_is_read_later(make_world: Callable[..., World]) -> None:
    world = make_world(settings=msgspec.structs.replace(QUICK, mend_after_s=0.1, mend_at_most_s=0.2))
    engine = world.engine()
    engine.publish(store(0))
    world.follow(engine)
    engine.answers = False
    engine.publish(store(1), lost=True)
    engine.publish(store(2))
    until(lambda: world.held(2))
    assert world.status().partial
    assert not world.held(1)
    until(lambda: world.status().counters["replay_failures"] > QUICK.replay_attempts + 1)
    engine.answers = True
    until(lambda: has_all(world, range(3)))
    until(lambda: world.status().phase == "live")
    assert not world.status().partial
    assert world.status().counters["mended"] == 1


# ---- connections ----------------------------------------------------------------------------------------------------


def test_i10_a_restarted_worker_is_empty(world: World) -> None:
    """I10: kill the worker, restart it at the same address: nothing of the old process is believed any more."""
    engine = world.engine()
    engine.publish(store(0))
    world.follow(engine)
    until(lambda: world.held(0))
    engine.restart()
    until(lambda: world.held(0) == 0)
    engine.publish(store(1))
    until(lambda: world.held(1))
    assert world.held(0) == 0
    assert world.clears[0][:2] == ("w", 0)


def test_i10_a_worker_that_refuses_connections_is_empty(world: World) -> None:
    """I10: the address refuses: no process, no cache; known long before the worker comes back."""
    engine = world.engine(replay=False)
    world.follow(engine)
    until(lambda: engine.publish(store(0)) >= 0 and world.held(0))
    engine.close()
    until(lambda: world.state() == "refused")
    assert world.clears[-1] == ("w", 0, "connection refused")
    assert world.held(0) == 0
    engine.reopen()
    until(lambda: world.state() == "connected")


def test_a_connection_that_broke_and_came_back_is_verified_not_cleared(world: World) -> None:
    engine = world.engine()
    engine.publish(store(0))
    world.follow(engine)
    until(lambda: world.held(0))
    seen = world.status()
    # the same process and history behind a new connection; the address never refused for long enough to be probed
    engine.close()
    engine.reopen()
    until(lambda: world.status().counters["connects"] > seen.counters["connects"])
    engine.publish(store(1))
    until(lambda: has_all(world, range(2)))


def test_a_batch_lost_while_disconnected_is_found_on_an_idle_engine(world: World) -> None:
    engine = world.engine()
    engine.publish(store(0))
    world.follow(engine)
    engine.close()
    engine.history.append((1, store(1)))
    engine.next_seq = 2
    engine.reopen()
    until(lambda: has_all(world, range(2)))


def test_a_restart_seen_by_the_scrape_clears_unless_it_is_known_already(world: World) -> None:
    engine = world.engine(replay=False)
    world.follow(engine)
    until(lambda: engine.publish(store(0, ts=1000.0)) >= 0 and world.held(0))
    world.ingest.process_restarted("w", "start time changed", 999.0)
    until(lambda: world.status().counters.get("restarts_already_known") == 1)
    assert world.held(0)
    world.ingest.process_restarted("w", "start time changed", 2000.0)
    until(lambda: world.held(0) == 0)
    assert world.clears[-1] == ("w", 0, "start time changed")


def test_ipc_endpoints_work_and_refuse_too(world: World, tmp_path: Path) -> None:
    engine = world.engine(replay=False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub = context.socket(zmq.PUB)
    endpoint = f"ipc://{tmp_path}/kv"
    pub.bind(endpoint)
    try:
        world.ingest.add("w", 0, endpoint)
        until(lambda: world.state() == "connected")
        pub.close(linger=0)
        until(lambda: world.state() == "refused")
    finally:
        context.destroy(linger=0)
    assert engine.requests == []


# ---- ranks ----------------------------------------------------------------------------------------------------------


def test_e22_each_rank_has_its_own_sequence_and_liveness(world: World) -> None:
    """E22: dp_size=2 and only rank 0 carries data: rank 1 shows that it never said anything."""
    engines = [world.engine(), world.engine()]
    for rank, engine in enumerate(engines):
        world.follow(engine, rank=rank)
    engines[0].publish(store(0))
    until(lambda: world.held(0))
    assert world.status(rank=0).last_batch_age_s is not None
    assert world.status(rank=1).last_batch_age_s is None
    assert world.status(rank=1).batches == 0
    engines[1].publish(store(1, rank=1))
    until(lambda: world.held(1, rank=1))
    assert world.status(rank=1).partial is False


def test_e23_several_ranks_on_one_socket_keep_their_streams_apart(world: World) -> None:
    """E23: ranks 0 and 1 over one connection, each with sequences of its own, are two holders."""
    engine = world.engine(replay=False)
    world.follow(engine)
    until(lambda: engine.publish(store(0, rank=0)) >= 0 and world.held(0))
    for seq in range(3):
        engine.send_raw([b"", seq.to_bytes(8, "big"), store(10 + seq, rank=1)])
    until(lambda: world.held(12, rank=1))
    assert world.status(rank=1).gaps == 0
    assert world.status(rank=0).epoch == 0
    assert not world.clears


def test_an_engine_knows_its_rank_better_than_its_declaration(world: World) -> None:
    """One engine of an externally balanced group, declared as rank 0, says in its batches that it is rank 3."""
    engine = world.engine()
    engine.publish(store(0, rank=3))
    world.ingest.add("w", 0, engine.endpoint, engine.replay_endpoint)
    until(lambda: world.held(0, rank=3))
    assert list(world.ingest.status()) == [("w", 3)]
    engine.restart()
    until(lambda: world.held(0, rank=3) == 0)


def test_two_engines_that_claim_one_rank_are_told_apart_by_connection(world: World) -> None:
    engines = [world.engine(), world.engine()]
    for rank, engine in enumerate(engines):
        world.follow(engine, rank=rank)
        engine.publish(store(rank, rank=0))
    until(lambda: world.held(0, rank=0) and world.held(1, rank=1))
    assert world.held(1, rank=0) == 0
    assert world.ingest.counters()["rank_conflicts"] >= 1


# ---- bound sockets --------------------------------------------------------------------------------------------------


def free_port() -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        return context.socket(zmq.PUB).bind_to_random_port("tcp://127.0.0.1")
    finally:
        context.destroy(linger=0)


def test_engines_that_connect_to_us_are_told_apart_by_topic(make_world: Callable[..., World]) -> None:
    bound = f"tcp://127.0.0.1:{free_port()}"
    world = make_world(bind_endpoint=bound)
    topics = [b"kv@10.0.0.1:8000@m", b"anything", b"kv@stranger@m"]
    engines = [world.engine(topic=topic, connect=bound) for topic in topics]
    engines[0].publish(store(0))
    world.ingest.add("10.0.0.1:8000", 0, None, engines[0].replay_endpoint)
    world.ingest.add("other", 0, None, engines[1].replay_endpoint, topic="anything")
    for number, engine in enumerate(engines):
        until(
            lambda engine=engine, number=number: engine.publish(store(10 + number)) >= 0 and has_message(world, number)
        )
    assert world.held(0, "10.0.0.1:8000") == 2 * SIZE
    assert world.held(10, "10.0.0.1:8000") == 2 * SIZE
    assert world.held(11, "other") == 2 * SIZE
    assert world.held(11, "10.0.0.1:8000") == 0
    assert list(world.ingest.unmatched_topics()) == ["kv@stranger@m"]
    assert world.status("other").endpoint_state == "listening"


def has_message(world: World, number: int) -> Any:
    if number == 2:
        return "kv@stranger@m" in world.ingest.unmatched_topics()
    return world.held(10 + number, ["10.0.0.1:8000", "other"][number])


def test_an_engine_that_restarts_behind_the_shared_socket_is_cleared(make_world: Callable[..., World]) -> None:
    bound = f"tcp://127.0.0.1:{free_port()}"
    world = make_world(bind_endpoint=bound)
    engine = world.engine(topic=b"w", connect=bound)
    engine.publish(store(0))
    world.ingest.add("w", 0, None, engine.replay_endpoint)
    until(lambda: world.held(0))
    engine.restart()
    until(lambda: world.held(0) == 0)


def test_removing_and_adding_again_behind_the_shared_socket(make_world: Callable[..., World]) -> None:
    """Also the ranks that came with a batch only are gone, and come again."""
    bound = f"tcp://127.0.0.1:{free_port()}"
    world = make_world(bind_endpoint=bound)
    engine = world.engine(topic=b"w", connect=bound, replay=False)
    for _ in range(2):
        world.ingest.add("w", 0, None)
        until(lambda: engine.publish(store(0, rank=0)) >= 0 and world.held(0))
        seq = engine.next_seq
        engine.send_raw([b"w", seq.to_bytes(8, "big"), store(1, rank=1)])
        until(lambda: world.held(1, rank=1))
        world.ingest.remove("w")
        assert world.held(0) == world.held(1, rank=1) == 0
        until(lambda: not list(world.ingest._feeds))


@pytest.mark.parametrize("n_missed", [0, 1])
def test_who_listens_next_goes_on_if_nothing_is_missing(make_world: Callable[..., World], n_missed: int) -> None:
    bound = f"tcp://127.0.0.1:{free_port()}"
    before, after = make_world(bind_endpoint=bound), make_world(bind_endpoint=bound, holds=True)
    engine = before.engine(topic=b"w", connect=bound, replay=False)
    for world in (before, after):
        world.ingest.add("w", 0, None)

    def told(number: int, to: World) -> bool:
        """Again and again, as nobody hears what is told before a subscription is there."""
        engine.send_raw([b"w", number.to_bytes(8, "big"), store(number)])
        return to.held(number) == 2 * SIZE

    for number in range(3):
        until(lambda number=number: told(number, before))
    left: queue.Queue[dict[Holder, SavedRank]] = queue.Queue()
    before.ingest.hand_over(left.put)
    saved = left.get(timeout=60)
    assert before.state() == "closed"
    assert after.state() == "closed"
    after.ingest.take_over(saved)
    until(lambda: after.state() == "listening")
    assert after.held(0) == 0, "nobody has said yet that it is still there"
    until(lambda: told(3 + n_missed, after))
    status = after.status()
    if n_missed:
        assert has_none(after, range(3))
        assert (status.partial, status.counters["joins_refused"]) == (True, 1)
    else:
        assert has_all(after, range(4))
        assert (status.partial, status.counters["joins"], status.next_seq) == (False, 1, 4)
        until(lambda: told(4, after))
        engine.send_raw([b"w", (5).to_bytes(8, "big"), removed([1, 2])])
        until(lambda: after.held(0) == 0)


def test_an_engine_that_restarts_while_the_listener_changes_has_nothing(make_world: Callable[..., World]) -> None:
    bound = f"tcp://127.0.0.1:{free_port()}"
    before, after = make_world(bind_endpoint=bound), make_world(bind_endpoint=bound, holds=True)
    engine = before.engine(topic=b"w", connect=bound, replay=False)
    for world in (before, after):
        world.ingest.add("w", 0, None)

    def told(seq: int, number: int, to: World) -> bool:
        engine.send_raw([b"w", seq.to_bytes(8, "big"), store(number)])
        return to.held(number) == 2 * SIZE

    until(lambda: told(0, 0, before))
    left: queue.Queue[dict[Holder, SavedRank]] = queue.Queue()
    before.ingest.hand_over(left.put)
    after.ingest.take_over(left.get(timeout=60))
    until(lambda: after.state() == "listening")
    after.ingest.process_restarted("w", "process start time")
    until(lambda: told(1, 7, after))
    assert after.held(0) == 0


def has_none(world: World, numbers: range) -> bool:
    return not any(world.held(number) for number in numbers)


def test_one_port_per_engine_needs_no_topic(world: World) -> None:
    bound = f"tcp://127.0.0.1:{free_port()}"
    world.ingest.add("w", 0, bound, bind=True)
    engine = world.engine(connect=bound, replay=False)
    until(lambda: engine.publish(store(0)) >= 0 and world.held(0))
    assert world.state() == "listening"


def test_no_endpoint_and_no_bound_socket_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="no event endpoint"):
        world.ingest.add("w", 0, None)


# ---- one bad one among many -----------------------------------------------------------------------------------------


def test_bad_frames_and_batches_are_counted_and_cost_nothing_else(world: World) -> None:
    engine = world.engine()
    world.follow(engine)
    for frames in ([b"hello"], [b"", b"short", b"x"], [b"", b"\xff" * 8, b"x"], [b""] * 7):
        engine.send_raw(frames)
    engine.publish(b"\xc1 no msgpack")
    engine.publish(payload([{"type": "BlockStored", "block_hashes": "no"}, {"type": "New"}], ts=2.0))
    engine.publish(store(1, rank=10**9))
    until(lambda: world.held(1))
    counters = world.ingest.counters()
    assert counters["bad_frames"] == 4
    assert counters["undecodable_batches"] == 1
    assert counters["impossible_ranks"] == 1
    assert world.status().partial
    assert world.status().counters["malformed_events"] == 1
    assert world.status().counters["unknown_events"] == 1


def test_e25_token_pairs_never_stop_the_reader(world: World) -> None:
    """E25: an event with pairs for token ids is skipped with a count; the next one is read."""
    engine = world.engine()
    world.follow(engine)
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [[1, 2], [2, 3]]}
    engine.publish(payload([event]))
    engine.publish(store(1))
    until(lambda: world.held(1))
    assert world.status().counters["malformed_events"] == 1


def test_e26_a_clear_on_every_step_is_survived_and_visible(world: World) -> None:
    """E26: AllBlocksCleared between all stores."""
    engine = world.engine()
    world.follow(engine)
    for number in range(100):
        engine.publish(cleared(ts=float(number)))
        engine.publish(store(number))
    until(lambda: world.held(99))
    assert world.held(98) == 0
    assert world.status().counters["cleared_by_engine"] == 100


def test_a_failing_callback_and_a_failing_index_stop_nothing(make_world: Callable[..., World]) -> None:
    def bad(*_: Any) -> None:
        raise RuntimeError("from the callback")

    world = make_world(on_batch=bad, on_clear=bad)
    engine = world.engine()
    world.follow(engine)
    apply, fails = world.index.apply, [True]

    def apply_or_fail(*args: Any) -> None:
        if fails:
            fails.clear()
            raise MemoryError
        apply(*args)

    world.index.apply = apply_or_fail  # type: ignore[method-assign]
    engine.publish(store(0))
    engine.publish(store(1))
    until(lambda: world.held(1))
    assert world.status().partial
    assert world.status().counters["failed_batches"] == 1
    assert world.ingest.counters()["failed_callbacks"] == 2


def test_an_endpoint_that_cannot_be_opened_names_itself_and_is_tried_again(world: World) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        world.ingest.add("bad", 0, f"tcp://127.0.0.1:{port}", bind=True)
        world.ingest.add("worse", 0, "tcp://nonsense")
        until(lambda: world.state("bad") == world.state("worse") == "failed")
        assert world.status("bad").endpoint_error
        engine = world.engine()
        engine.publish(store(0))
        world.follow(engine)
        until(lambda: world.held(0))
    until(lambda: world.state("bad") == "listening")
    assert world.status("bad").endpoint_error is None


def test_dead_replay_endpoints_hold_up_nobody(world: World) -> None:
    """Twenty engines whose replay endpoint never answers, one that does; live batches flow all along."""
    silent = [world.engine() for _ in range(20)]
    for number, engine in enumerate(silent):
        engine.answers = False
        world.ingest.add(f"silent{number}", 0, engine.endpoint, engine.replay_endpoint)
    engine = world.engine()
    engine.publish(store(0))
    world.follow(engine, "good", verified=False)
    until(lambda: world.held(0, "good"))
    assert world.ingest.replay_levels()["running"] <= QUICK.replays_at_once
    until(lambda: all(world.ingest.status()[f"silent{n}", 0].phase == "live" for n in range(20)))
    assert all(world.ingest.status()[f"silent{n}", 0].partial for n in range(20))


def test_64_engines_under_load_are_all_complete(world: World) -> None:
    """64 sockets, one of them shouting: every batch of everybody arrives, in order."""
    engines = [world.engine() for _ in range(64)]
    for number, engine in enumerate(engines):
        world.ingest.add(f"w{number}", 0, engine.endpoint, engine.replay_endpoint)
    until(lambda: len(world.ingest.status()) == len(engines), within_s=60)

    def shout() -> None:
        for number in range(3000):
            engines[0].publish(store(number % 20, ts=float(number)))

    shouter = threading.Thread(target=shout)
    shouter.start()
    for number in range(30):
        for engine in engines[1:]:
            engine.publish(store(number))
        time.sleep(0)
    shouter.join()
    until(lambda: all(s.next_seq == e.next_seq for s, e in zip(statuses(world, 64), engines, strict=True)), within_s=60)
    assert all(has_all(world, range(30), f"w{number}") for number in range(1, 64))
    assert not any(status.partial for status in statuses(world, 64))
    assert not world.clears


def statuses(world: World, n: int) -> list[FeedStatus]:
    found = world.ingest.status()
    return [found[f"w{number}", 0] for number in range(n)]


def test_stopping_leaves_no_thread_and_no_socket() -> None:
    ingest = EventIngest(PrefixIndex(), settings=QUICK)
    ingest.start()
    engine = RawEngine()
    try:
        ingest.add("w", 0, engine.endpoint, engine.replay_endpoint)
        until(lambda: ingest.status().get(("w", 0)))
        ingest.stop()
        assert not any(thread.name == "kv-events" for thread in threading.enumerate())
        assert ingest._context.closed
    finally:
        engine.close()
    EventIngest(PrefixIndex()).stop()


# ---- where no engine is ---------------------------------------------------------------------------------------------


def failed(world: World) -> bool:
    return world.state() == "failed" and "nobody's engine" in (world.status().endpoint_error or "")


@pytest.fixture
def loopback_is_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_NEVER", (ip_network("127.0.0.0/8"), ip_network("::1/128")))


@pytest.mark.usefixtures("loopback_is_metadata")
@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "[::ffff:127.0.0.1]", "[::127.0.0.1]"])
def test_events_are_not_read_at_addresses_of_metadata(make_world: Callable[..., World], host: str) -> None:
    world = make_world()
    engine = world.engine(replay=False)
    world.ingest.add("w", 0, engine.endpoint.replace("127.0.0.1", host))
    until(lambda: failed(world))


@pytest.mark.usefixtures("loopback_is_metadata")
def test_events_are_not_read_where_a_name_leads_there(make_world: Callable[..., World]) -> None:
    world = make_world(settings=msgspec.structs.replace(QUICK, reopen_after_s=60.0))
    engine = world.engine(replay=False)
    world.ingest.add("w", 0, engine.endpoint.replace("127.0.0.1", "localhost"))
    until(lambda: failed(world))
    engine.publish(store(0))
    allowed = make_world(settings=msgspec.structs.replace(QUICK, link_local=True))
    allowed.ingest.add("w", 0, engine.endpoint.replace("127.0.0.1", "localhost"))
    until(lambda: allowed.state() == "connected")
    assert not world.batches


def test_batches_are_not_asked_for_at_addresses_of_metadata(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = world.engine()
    assert engine.replay_endpoint is not None
    monkeypatch.setattr(addresses, "_NEVER", (ip_network("127.0.0.2/32"),))
    world.ingest.add("w", 0, engine.endpoint, engine.replay_endpoint.replace("127.0.0.1", "127.0.0.2"))
    until(lambda: world.ingest.counters().get("replay_socket_errors"))
    assert engine.requests == []


def test_batches_are_not_asked_for_where_a_name_leads_there(
    world: World, monkeypatch: pytest.MonkeyPatch, make_world: Callable[..., World]
) -> None:
    engine = world.engine()
    assert engine.replay_endpoint is not None
    named = engine.replay_endpoint.replace("127.0.0.1", "localhost")
    monkeypatch.setattr(addresses, "_NEVER", ())
    allowed = make_world()
    allowed.ingest.add("w", 0, engine.endpoint, named)
    until(lambda: engine.requests)
    asked = len(engine.requests)
    monkeypatch.setattr("gateway.engine.source.Source._check_peer", lambda *_: None)
    monkeypatch.setattr(addresses, "_NEVER", (ip_network("127.0.0.0/8"), ip_network("::1/128")))
    monkeypatch.setattr("gateway.engine.replays.check_endpoint", lambda _: None)
    monkeypatch.setattr("gateway.engine.source.check_endpoint", lambda _: None)
    world.ingest.add("w", 0, engine.endpoint, named)
    until(lambda: world.ingest.counters().get("replay_socket_errors"))
    assert len(engine.requests) == asked
