"""doctor: what was seen of events and probes -> findings."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.doctor.events import RankSeen, judge, judge_reuse
from gateway.doctor.examine import sources_of
from gateway.doctor.identity import Identity
from gateway.doctor.probe import Outcome, explain, probe_length
from gateway.doctor.tap import HeardCopy
from gateway.engine.capabilities import EventSource
from gateway.engine.feed import FeedStatus
from indexer.events import BlockStored

URL = "http://w:8000"
SOURCE = EventSource(endpoint="tcp://w:5557", replay_endpoint="tcp://w:5657")
IDS = list(range(100, 133))


def status(**changes: Any) -> FeedStatus:
    counters = {"replays": 2, "verifications": 1, "connects": 1, "applied_batches": 3, **changes.pop("counters", {})}
    base: dict[str, Any] = {
        "worker": URL,
        "rank": 0,
        "endpoint": "tcp://w:5557",
        "endpoint_state": "connected",
        "endpoint_error": None,
        "replay_endpoint": "tcp://w:5657",
        "phase": "live",
        "partial": False,
        "epoch": 0,
        "next_seq": 3,
        "gaps": 0,
        "missing_batches": 0,
        "batches": 3,
        "events": 3,
        "events_per_s": 0.0,
        "last_batch_age_s": 0.1,
        "counters": counters,
    }
    return FeedStatus(**{**base, **changes})


def outcome(**changes: Any) -> Outcome:
    base: dict[str, Any] = {
        "rank": 0,
        "n_tokens": 33,
        "announced": True,
        "matched": {0: 32},
        "predicted_tokens": 32,
        "repeat_cached": 32,
    }
    return Outcome(**{**base, **changes})


def seen(**changes: Any) -> RankSeen:
    heard = HeardCopy(batches=3, block_sizes=(16,), kinds={"full_attention": 3})
    base: dict[str, Any] = {"rank": 0, "source": SOURCE, "status": status(), "heard": heard, "outcome": outcome()}
    return RankSeen(**{**base, **changes})


def codes(*ranks: RankSeen, n_ranks: int = 1, block_size: int | None = 16, bad_messages: int = 0) -> set[str]:
    found = judge(URL, ranks, n_ranks=n_ranks, block_size=block_size, bad_messages=bad_messages)
    return {finding.code for finding in found}


def test_a_good_rank_has_only_its_replay_to_report() -> None:
    assert codes(seen()) == {"replay"}
    assert [finding.code for finding in judge_reuse(URL, outcome(), rank=None)] == ["events"]


# ---- connection and replay ------------------------------------------------------------------------------------------


def test_addresses_of_the_engines_own_machine() -> None:
    source = EventSource(endpoint=None, replay_endpoint=None, unreachable="ipc:///tmp/kv")
    assert codes(seen(source=source, status=None, outcome=None)) == {"events-unreachable"}


def test_not_reachable_and_wrong_port_are_told_apart() -> None:
    connecting = status(endpoint_state="connecting")
    assert "events-unreachable" in codes(seen(status=connecting, connect_error="Connection refused"))
    assert "events-wrong-port" in codes(seen(status=connecting))


def test_engine_that_connects() -> None:
    source = EventSource(endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://w:5657", engine_connects=True)
    failed = status(endpoint_state="failed", endpoint_error="Address already in use")
    assert "events-bind-failed" in codes(seen(source=source, status=failed, outcome=None))
    waiting = status(endpoint_state="listening", counters={"connects": 0}, batches=0)
    assert "events-unreachable" in codes(seen(source=source, status=waiting, heard=HeardCopy(), outcome=None))


def test_replay_findings() -> None:
    without = EventSource(endpoint="tcp://w:5557")
    assert "replay-off" in codes(seen(source=without))
    lost = EventSource(endpoint="tcp://w:5557", unreachable="ipc:///tmp/replay")
    assert "replay-unreachable" in codes(seen(source=lost))
    assert "replay-unreachable" in codes(seen(replay_connect_error="Connection refused"))
    assert "replay-incomplete" in codes(seen(status=status(counters={"replay_failures": 1})))
    assert "replay-foreign" in codes(seen(status=status(counters={"foreign_replayed_batches": 2})))
    assert "replay-foreign" in codes(seen(status=status(counters={"epochs": 3})))


def test_e2_history_that_begins_late_is_named() -> None:
    """E2: what came before the first batch that is known is missing."""
    found = judge(URL, [seen(status=status(missing_batches=7, next_seq=9))], n_ranks=1, block_size=16)
    (short,) = [finding for finding in found if finding.code == "replay-short"]
    assert "batch 7 of 9" in short.sentence


def test_e1_gaps_are_counted() -> None:
    """E1: batches lost on the way are noticed and named."""
    assert "events-gap" in codes(seen(status=status(gaps=2, missing_batches=2)))


# ---- the probe ------------------------------------------------------------------------------------------------------


def test_e20_events_configured_but_none_come() -> None:
    """E20: a worker that serves and announces nothing is named."""
    quiet = outcome(announced=False, matched={}, predicted_tokens=None)
    assert "events-silent" in codes(seen(heard=HeardCopy(), outcome=quiet))


def test_published_but_not_delivered() -> None:
    lost = outcome(announced=False, matched={}, predicted_tokens=None, undelivered=True)
    assert "events-undelivered" in codes(seen(heard=HeardCopy(), outcome=lost))


def test_e22_e23_a_silent_rank_is_named_as_that_rank() -> None:
    """E22, E23: with data parallelism a rank that carries no events is not simply cold."""
    quiet = outcome(rank=1, announced=False, matched={}, predicted_tokens=None)
    second = seen(rank=1, heard=HeardCopy(), outcome=quiet)
    found = judge(URL, [seen(), second], n_ranks=2, block_size=16)
    assert [(finding.code, finding.rank) for finding in found if finding.code.startswith("rank")] == [
        ("rank-silent", 1)
    ]
    assert "rank-unannounced" in codes(seen(), n_ranks=2)


def test_rank_header_that_is_ignored() -> None:
    second = seen(rank=1, outcome=outcome(rank=1, matched={0: 32}))
    assert "rank-ignored" in codes(seen(), second, n_ranks=2)


def test_only_a_part_is_announced() -> None:
    assert "events-incomplete" in codes(seen(outcome=outcome(matched={0: 16})))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"failure": "/v1/completions has status 400"}, "probe-failed"),
        ({"repeat_cached": None}, "cached-tokens-missing"),
        ({"repeat_cached": 0}, "cache-not-reused"),
        ({"repeat_cached": 16}, "cached-tokens-differ"),
        ({"repeat_cached": 32}, "events"),
    ],
)
def test_reuse(changes: dict[str, Any], code: str) -> None:
    assert [finding.code for finding in judge_reuse(URL, outcome(**changes), rank=None)] == [code]


def test_reuse_without_events_is_no_proof_of_them() -> None:
    assert judge_reuse(URL, outcome(predicted_tokens=None, matched={}), rank=None) == []


# ---- why a prompt is not found --------------------------------------------------------------------------------------


def event(**changes: Any) -> BlockStored:
    base: dict[str, Any] = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": IDS[:32],
        "block_size": 16,
        "medium": "GPU",
        "kv_cache_spec_kind": "full_attention",
    }
    return BlockStored(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token_ids": list(range(32))}, "events-unmatched"),
        ({"lora_name": "l1"}, "extra-keys"),
        ({"extra_keys": [["tenant-secret"], None]}, "extra-keys"),
        ({"kv_cache_spec_kind": "sliding_window"}, "no-full-attention"),
        ({"medium": "CPU"}, "events-unmatched"),
        ({"parent_block_hash": 77}, "events-unmatched"),
        ({}, "events-unmatched"),
    ],
)
def test_explain(changes: dict[str, Any], code: str) -> None:
    found, sentence = explain([event(**changes)], IDS)
    assert found == code
    assert "secret" not in sentence
    assert code in codes(seen(outcome=outcome(matched={}, predicted_tokens=None, unmatched=(found, sentence))))


def test_explanations_differ() -> None:
    cases: list[dict[str, Any]] = [{"medium": "CPU"}, {"parent_block_hash": 7}, {}, {"token_ids": [1] * 32}]
    assert len({explain([event(**case)], IDS)[1] for case in cases}) == len(cases)


# ---- what events hold -----------------------------------------------------------------------------------------------


def test_content_findings() -> None:
    heard = HeardCopy(
        batches=9,
        malformed=2,
        unknown={"BlockMoved": 3},
        kinds={"full_attention": 4, "sliding_window": 4},
        block_sizes=(32,),
    )
    found = codes(seen(heard=heard), block_size=16)
    assert {"events-malformed", "events-unknown-type", "groups-ignored", "block-size-differs"} <= found
    assert "events-malformed" in codes(seen(), bad_messages=1)


def test_copies_that_never_go() -> None:
    index = {"blocks": {"gpu": 90, "cpu": 500}, "extra_copies": 20}
    assert "copies-stay" in codes(seen(index=index, kv_blocks=100))
    assert "copies-stay" not in codes(seen(index=index, kv_blocks=110))


# ---- lengths and addresses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "length"),
    [
        (16, None, 257),
        (None, 4096, 257),
        (32, 2048, 257),
        (528, 4096, 1057),
        (16, 100, 97),
        (64, 129, None),
        (64, 130, 129),
    ],
)
def test_probe_length(block_size: int | None, max_model_len: int | None, length: int | None) -> None:
    assert probe_length(block_size, max_model_len) == length


def test_sources_given_by_hand_count_ports_up_by_rank() -> None:
    me = Identity(url=URL, engines=(0, 1))
    assert [s.endpoint for s in sources_of(me, "tcp://w:6000", None).values()] == ["tcp://w:6000", "tcp://w:6001"]
    assert [s.replay_endpoint for s in sources_of(me, "tcp://w:6000", "tcp://w:7000").values()] == [
        "tcp://w:7000",
        "tcp://w:7001",
    ]
    assert sources_of(me, None, None) == {}
    me.sources = {0: EventSource(endpoint="tcp://w:1", replay_endpoint="tcp://w:2", topic="t")}
    assert sources_of(me, None, "tcp://w:9")[0].replay_endpoint == "tcp://w:9"
    listening = sources_of(me, "tcp://*:6000", None)[0]
    assert listening.engine_connects
    assert (listening.topic, listening.replay_endpoint) == ("t", "tcp://w:2")
