"""What is saved of a fleet and put back: bookings, blocks of all tiers, and nothing that cannot be."""

import random
from array import array

import msgspec
import pytest

from bench.kv_frames import BLOCK_SIZE, frame, removal
from gateway.debug.saved import SavedLoad, _load, _restore_load
from indexer import ApproximateIndex, HeldBlocks, PrefixIndex, Prompt, decode_batch
from scorer.answers import Answer
from scorer.ledger import Booking, Load


def test_a_load_weighs_the_same_when_it_is_put_back() -> None:
    load, now_s = Load(), 100.0
    for i in range(3):
        Booking(load, 0.1 * (i + 1), 100, 90.0 + i).first_token(95.0)
    for booking in load.streaming:
        booking.grow(7)
        booking.stalled_s = 0.25
    Booking(load, 0.4, 500, 99.7, answer=Answer(300, 0.8), slo_tpot_s=0.02)
    Booking(load, 0.3, 50, 99.9, pulled=True)
    saved = msgspec.json.decode(msgspec.json.encode(_load(load, now_s)), type=SavedLoad)
    again, later_s = Load(), 5000.0
    _restore_load(again, saved, later_s)
    for after_s in (0.0, 0.05, 0.3, 2.0):
        assert again.prefill_backlog_s(later_s + after_s) == pytest.approx(load.prefill_backlog_s(now_s + after_s))
    assert (again.requests, again.streams, again.kv_tokens, again.computing) == (
        load.requests, load.streams, load.kv_tokens, load.computing,
    )  # fmt: skip
    assert [(b.done_tokens, b.stalled_s) for b in again.streaming] == [(7, 0.25)] * 3
    before, after = (next(iter(each.prefills)) for each in (load, again))
    assert after.slo_tpot_s == 0.02
    for low, high in ((10, 400), (300, 900)):
        assert after.answer.ends_between(low, high, 5) == pytest.approx(before.answer.ends_between(low, high, 5))


def test_an_index_that_takes_blocks_back_answers_the_same() -> None:
    rng = random.Random(2)
    index, copy = PrefixIndex(), PrefixIndex()
    prompts = [[rng.randrange(1000) for _ in range(64 * BLOCK_SIZE)] for _ in range(4)]
    for i, prompt in enumerate(prompts):
        for worker in (f"a{i % 2}", "b"):
            n = rng.randrange(1, 65)
            hashes = [rng.getrandbits(60) for _ in range(n)]
            batch = decode_batch(frame(hashes, None, prompt[: n * BLOCK_SIZE], n))
            index.apply(worker, 0, batch)
            if i == 3:
                index.apply(worker, 0, decode_batch(removal(hashes[n // 2 : n // 2 + 1])))
    for held in index.held_blocks():
        copy.take_back(msgspec.json.decode(msgspec.json.encode(held), type=HeldBlocks))
    for prompt in prompts:
        for n in (1, 17, 64):
            ids = array("I", prompt[: n * BLOCK_SIZE]).tobytes()
            assert copy.match(ids) == index.match(ids)
    assert copy.held_tokens() == index.held_tokens()
    assert copy.stats()["entries"] == index.stats()["entries"] > 0


def test_an_approximate_index_does_too() -> None:
    index, copy = ApproximateIndex(), ApproximateIndex()
    prompt = Prompt(array("I", range(160)).tobytes())
    index.assume("a", 0, prompt, 5.0)
    index.assume("b", 1, Prompt(array("I", range(80)).tobytes()), 5.0)
    for held in index.held_blocks():
        copy.take_back(held, 9.0)
    assert copy.match(prompt, now_s=9.0) == index.match(prompt, now_s=6.0)
    assert len(copy.match(prompt, now_s=9.0)) == 2


@pytest.mark.parametrize("wrong", [{"tier": "tape"}, {"block_size": 0}, {"block_size": 1 << 20}, {"keys": b"1234567"}])
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    fields = {"worker": "a", "rank": 0, "tier": "gpu", "block_size": 16, "keys": bytes(16), **wrong}
    with pytest.raises((ValueError, TypeError)):
        PrefixIndex().take_back(HeldBlocks(**fields))  # type: ignore[arg-type]
