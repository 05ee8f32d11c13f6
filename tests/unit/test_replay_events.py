"""`warmroute replay-events`: recorded engines, every kind of line, bad lines, gaps and restarts in a recording."""

import base64
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import cli
from gateway.replay_events import replay
from indexer import PrefixIndex, decode_batch, parse_frames
from indexer.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.support.kv_feed import Feed, payload, prompt, stored

RECORDING = Path(__file__).parents[1] / "data" / "kvevents_vllm_0_32.jsonl"
TOKENS = prompt(4)


class Run:
    def __init__(self, answers: list[dict[str, Any]], errors: list[str], bad: int) -> None:
        self.answers = answers[:-1]
        self.stats = answers[-1]["stats"]
        self.errors = errors
        self.bad = bad

    def depths(self, worker: str = "w", rank: int = 0) -> list[int]:
        """GPU tokens of that worker in each answer."""
        return [a["match"].get(worker, {}).get(str(rank), {}).get("gpu_tokens", 0) for a in self.answers]


def run(lines: Iterable[Any], capsys: pytest.CaptureFixture[str]) -> Run:
    bad = replay(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    out, err = capsys.readouterr()
    return Run([json.loads(line) for line in out.splitlines()], err.splitlines(), bad)


def frames(data: bytes, seq: int, *, topic: bytes = b"kv@host@model", lead: list[bytes] | None = None) -> list[str]:
    parts = [*(lead or []), topic, seq.to_bytes(8, "big", signed=True), data]
    return [base64.b64encode(part).decode() for part in parts]


def live(seq: int, event: dict[str, Any], worker: str = "w", rank: int = 0, ts: float = 1.0) -> dict[str, Any]:
    return {"worker": worker, "rank": rank, "frames_b64": frames(payload(event, ts=ts), seq)}


def replayed(seq: int, event: dict[str, Any], ts: float = 1.0) -> dict[str, Any]:
    return {"worker": "w", "rank": 0, "frames_b64": frames(payload(event, ts=ts), seq, lead=[b""])}


def chunk(i: int, worker: str = "w") -> dict[str, Any]:
    """The event that stores block `i` of TOKENS."""
    return Feed().event(worker, TOKENS, i, i + 1)


END = {"worker": "w", "frames_b64": frames(b"", -1, topic=b"", lead=[b""])}
QUERY = {"query": {"tokens": TOKENS}}


# ---- a recorded vLLM 0.32 -------------------------------------------------------------------------------------------


def test_recorded_engine_holds_what_its_requests_imply(capsys: pytest.CaptureFixture[str]) -> None:
    """202-token prompts make 6 blocks of 32. Each number is what the recorded engine must have held at that moment."""
    assert cli.main(["replay-events", str(RECORDING)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *answers, last = [json.loads(line) for line in out.splitlines()]
    held = [a["match"].get("vllm", {}).get("0", {}).get("gpu_tokens", 0) for a in answers]
    assert held == [
        0,  # nothing yet
        192,  # the prompt again
        192,  # a longer prompt that shares six blocks ...
        256,  # ... after it ran
        32,  # a short prompt that shares one block
        64,  # with the block that its decode filled
        0,  # the first prompt under a salt ...
        192,  # ... after it ran salted
        0,  # another tenant
        0,  # the adapter ...
        192,  # ... after it ran, asked for as the model
        192,  # and as lora
        192,  # the base model is as it was
        192,  # announced again (kv_cache_report_mode=full)
        384,  # the first of many 400-token prompts, the pool now nearly full
        192,  # evicted: what the longer prompt had more
        32,  # evicted: the block its decode had filled
        0,  # evicted: the salted prompt
        0,  # evicted: the adapter's
        0,  # evicted: the first prompt, of which the second announcement was no second copy
        192,  # half evicted: the first of the 400-token prompts
    ]
    stats = last["stats"]
    assert stats["streams"]["vllm"]["0"]["partial"] is False
    assert stats["workers"]["vllm"]["0"]["extra_copies"] == 0
    assert stats["workers"]["vllm"]["0"]["counters"] == {"clears": 1, "reannounced_blocks": 6}


def test_recorded_evictions_leave_exactly_what_the_removals_say() -> None:
    index = PrefixIndex()
    resident: set[int] = set()
    for line in RECORDING.read_text().splitlines():
        row = json.loads(line)
        if "frames_b64" not in row:
            continue
        _, data = parse_frames([base64.b64decode(f) for f in row["frames_b64"]])
        batch = decode_batch(data)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                resident.clear()
            elif isinstance(event, BlockStored):
                resident |= set(event.block_hashes)  # type: ignore[arg-type]
            else:
                assert isinstance(event, BlockRemoved)
                assert resident >= set(event.block_hashes)  # type: ignore[operator]
                resident -= set(event.block_hashes)  # type: ignore[arg-type]
        index.apply("w", 0, batch)
        (entries,) = index._table.states["w", 0].all_maps()
        assert set(entries.own) == resident
    # the engine's pool has 79 usable blocks, of which the last request holds one that is not full
    assert len(resident) == 78
    assert RECORDING.stat().st_size < 40_000


# ---- every kind of line ---------------------------------------------------------------------------------------------


def test_every_kind_of_line(capsys: pytest.CaptureFixture[str]) -> None:
    hashes = Feed().hashes("w", TOKENS)
    done = run(
        [
            {"worker": "w", "models": ["m", "alias"], "loras": ["a"]},
            live(0, chunk(0)),
            {"worker": "w", "rank": 0, "seq": 1, "events": [chunk(1)]},
            {"worker": "w", "events": [chunk(2)]},
            {"query": {"tokens": TOKENS, "model": "alias"}},
            {"query": {"tokens": TOKENS, "model": "other"}},
            {"worker": "w", "events": [["BlockRemoved", [hashes[2]]]]},
            QUERY,
            {"worker": "w", "rank": 1, "events": [Feed().event("w", TOKENS, lora_name="a", extra_keys=[["a", "s"]])]},
            {"query": {"tokens": TOKENS, "lora": "a", "cache_salt": "s"}},
            {"query": {"tokens": TOKENS, "model": "a", "cache_salt": "s", "extra_keys": [None]}},
            {"clear": {"worker": "w", "rank": 0}},
            QUERY,
            {"clear": {"worker": "w"}},
            {"query": {"tokens": TOKENS, "lora": "a", "cache_salt": "s"}},
            b"   ",
        ],
        capsys,
    )
    assert (done.bad, done.errors) == (0, [])
    assert done.depths() == [12, 0, 8, 0, 0, 0, 0]
    assert done.depths(rank=1) == [0, 0, 0, 16, 16, 0, 0]
    assert done.answers[0] == {"match": {"w": {"0": {"gpu_tokens": 12, "cpu_tokens": 0, "disk_tokens": 0}}}}
    assert done.stats["bad_lines"] == 0
    assert done.stats["streams"] == {}  # cleared with the worker
    assert done.stats["workers"]["w"]["0"]["batches"] == 4


def test_decoded_digests_are_hex_strings(capsys: pytest.CaptureFixture[str]) -> None:
    digests = [bytes([i] * 24).hex() + f"{h:016x}" for i, h in enumerate(Feed().hashes("w", TOKENS))]
    hashes = Feed().hashes("w", TOKENS)
    as_map = stored(digests[:2], TOKENS[:8])
    as_array = ["BlockStored", digests[2:], digests[1], TOKENS[8:], 4]
    done = run(
        [
            {"worker": "w", "events": [as_map, as_array]},
            QUERY,
            {"worker": "w", "events": [{"type": "BlockRemoved", "block_hashes": [hashes[3]]}]},
            QUERY,
            {"worker": "w", "events": [["BlockRemoved", [digests[2]]]]},
            QUERY,
        ],
        capsys,
    )
    assert done.depths() == [16, 12, 8]


def test_tiers_are_answered_apart(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"worker": "w", "events": [{**chunk(0), "medium": m}]} for m in ("CPU", "STORAGE")]
    done = run([*lines, QUERY], capsys)
    assert done.answers[0]["match"]["w"]["0"] == {"gpu_tokens": 0, "cpu_tokens": 4, "disk_tokens": 4}


# ---- bad lines ------------------------------------------------------------------------------------------------------

BAD: dict[str, Any] = {
    "not JSON": b"{",
    "not UTF-8": b'{"worker": "\xff"}',
    "half a line": b'{"worker":"w","events":[',
    "another type": [1, 2],
    "nothing in it": {},
    "worker alone": {"worker": "w"},
    "events no list": {"worker": "w", "events": 7},
    "worker is a number": {"worker": 5, "events": []},
    "rank is text": {"worker": "w", "rank": "0", "events": []},
    "negative sequence": {"worker": "w", "seq": -1, "events": []},
    "two kinds at once": {"worker": "w", "events": [], "models": ["m"]},
    "negative rank": {"worker": "w", "rank": -1, "events": []},
    "not base64": {"worker": "w", "frames_b64": ["?", "?", "?"]},
    "not ASCII": {"worker": "w", "frames_b64": ["ü", "ü", "ü"]},
    "too few frames": {"worker": "w", "frames_b64": ["YQ=="]},
    "no sequence": {"worker": "w", "frames_b64": ["YQ==", "YQ==", "YQ=="]},
    "no frames": {"worker": "w", "frames_b64": []},
    "no batch": {"worker": "another", "frames_b64": frames(b"\xc1", 0)},
    "nested without end": b"[" * 100_000,
    "nested within": b'{"worker":"w","events":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "clear without a worker": {"clear": {"rank": 0}},
    "clear with an unknown key": {"clear": {"worker": "w", "ranks": 0}},
}
BAD_QUERIES: dict[str, Any] = {
    "no tokens": {"query": {}},
    "negative token": {"query": {"tokens": [-1]}},
    "large token": {"query": {"tokens": [1 << 40]}},
    "larger token": {"query": {"tokens": [1 << 80]}},
    "unknown key": {"query": {"tokens": [], "modle": "m"}},
    "text": {"query": "tokens"},
}


@pytest.mark.parametrize("name", sorted(BAD | BAD_QUERIES))
def test_a_bad_line_is_reported_and_costs_nothing_else(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run([live(0, chunk(0)), (BAD | BAD_QUERIES)[name], live(1, chunk(1)), QUERY], capsys)
    assert done.bad == done.stats["bad_lines"] == 1
    (error,) = done.errors
    assert error.startswith("warmroute: line 2: ")
    if name in BAD_QUERIES:
        assert done.answers.pop(0)["line"] == 2
    assert done.depths() == [8]
    assert done.stats["undecodable_messages"] == (name == "no batch")


def test_an_undecodable_message_makes_the_stream_partial(capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"worker": "w", "frames_b64": frames(b"\xc1", 1)}
    done = run([live(0, chunk(0)), bad, live(2, chunk(1)), QUERY], capsys)
    assert done.depths() == [8]
    assert done.stats["streams"]["w"]["0"]["partial"] is True


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps(QUERY) + "\n")
    assert cli.main(["replay-events", str(file)]) == 0
    file.write_text("{\n" + json.dumps(QUERY))
    assert cli.main(["replay-events", str(file)]) == 1
    file.write_text("")
    assert cli.main(["replay-events", str(file)]) == 0
    capsys.readouterr()
    assert cli.main(["replay-events", str(tmp_path / "missing")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["replay-events"]) == 2
    assert cli.main(["replay-events", str(file), "--jsn"]) == 2


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(json.dumps(line) for line in [live(0, chunk(0)), QUERY])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert cli.main(["replay-events", "-"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["match"]["w"]["0"]["gpu_tokens"] == 4


# ---- order ----------------------------------------------------------------------------------------------------------


def stream_stats(done: Run) -> dict[str, Any]:
    stats: dict[str, Any] = done.stats["streams"]["w"]["0"]
    return stats


@pytest.mark.parametrize("fill", [live, replayed], ids=["live frames", "replayed frames"])
def test_a_gap_is_filled_by_later_lines(fill: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [live(0, chunk(0)), live(3, chunk(3)), fill(1, chunk(1)), fill(2, chunk(2)), QUERY]
    done = run(lines, capsys)
    assert done.depths() == [16]
    assert stream_stats(done)["partial"] is False
    assert stream_stats(done)["counters"]["gaps"] == 1


def test_a_replay_that_overlaps_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [live(0, chunk(0)), live(1, chunk(1)), live(3, chunk(3))]
    lines += [replayed(i, chunk(i)) for i in range(4)]
    done = run([*lines, END, QUERY], capsys)
    assert done.depths() == [16]
    assert stream_stats(done)["epoch"] == 0
    assert stream_stats(done)["partial"] is False
    assert stream_stats(done)["counters"]["applied_batches"] == 4


def test_replayed_lines_in_the_old_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to vLLM 0.25 a replayed message is ["", seq, payload] and its end ["", -1, ""]."""
    old = [{"worker": "w", "frames_b64": frames(payload(chunk(i), ts=1.0), i, topic=b"")} for i in (1, 2)]
    end = {"worker": "w", "frames_b64": frames(b"", -1, topic=b"")}
    done = run([live(0, chunk(0)), live(3, chunk(3)), *old, end, QUERY], capsys)
    assert done.depths() == [16]
    assert stream_stats(done)["partial"] is False


def test_a_gap_that_nothing_fills_is_given_up_at_the_next_query(capsys: pytest.CaptureFixture[str]) -> None:
    done = run([live(0, chunk(0)), live(2, chunk(1)), QUERY, live(3, chunk(2)), QUERY], capsys)
    assert done.depths() == [8, 12]
    assert stream_stats(done)["partial"] is True
    assert stream_stats(done)["counters"]["missing_batches"] == 1


def test_a_recording_that_begins_late(capsys: pytest.CaptureFixture[str]) -> None:
    done = run([live(7, chunk(0)), QUERY], capsys)
    assert done.depths() == [4]
    assert stream_stats(done)["counters"]["missing_batches"] == 7


def test_an_end_marker_ends_a_replay_that_brought_too_little(capsys: pytest.CaptureFixture[str]) -> None:
    done = run([live(0, chunk(0)), live(4, chunk(3)), replayed(2, chunk(1)), END, QUERY], capsys)
    assert done.depths() == [8]
    assert stream_stats(done)["partial"] is True


def test_a_restart_forgets_the_old_process(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [live(i, chunk(i)) for i in range(4)]
    done = run([*lines, QUERY, live(0, chunk(0), ts=9.0), QUERY, live(1, chunk(1), ts=9.0), QUERY], capsys)
    assert done.depths() == [16, 4, 8]
    assert stream_stats(done)["epoch"] == 1


def test_the_same_line_twice_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    done = run([live(0, chunk(0)), live(0, chunk(0)), QUERY], capsys)
    assert stream_stats(done)["counters"] == {"applied_batches": 1, "duplicates": 1}
    assert done.stats["workers"]["w"]["0"]["extra_copies"] == 0


def test_ranks_named_in_the_batch_have_their_own_order(capsys: pytest.CaptureFixture[str]) -> None:
    def line(seq: int, rank: int) -> dict[str, Any]:
        return {"worker": "w", "frames_b64": frames(payload(chunk(seq), rank=rank), seq)}

    done = run([line(0, 0), line(0, 1), line(1, 1), QUERY], capsys)
    assert (done.depths(), done.depths(rank=1)) == ([4], [8])


def test_statistics_come_last_and_are_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    done = run([QUERY], capsys)
    assert done.answers == [{"match": {}}]
    assert {"bytes", "workers", "streams", "undecodable_messages", "bad_lines"} <= done.stats.keys()


def test_an_event_no_message_could_hold_costs_only_itself(capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"type": "BlockStored", "block_hashes": [1 << 70], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    done = run([{"worker": "w", "seq": 0, "events": [bad, chunk(0)]}, QUERY], capsys)
    assert (done.bad, done.depths()) == (0, [4])
    assert done.stats["workers"]["w"]["0"]["counters"]["malformed_events"] == 1


def test_what_waited_for_a_replay_is_cleared_too(capsys: pytest.CaptureFixture[str]) -> None:
    late = {"worker": "w", "seq": 7, "events": [chunk(0)]}
    assert run([late, {"clear": {"worker": "w"}}, QUERY], capsys).depths() == [0]
    again = run([late, QUERY, {"clear": {"worker": "w"}}, {**late, "seq": 0}, QUERY], capsys)
    assert again.depths() == [4, 4]


def test_unasked_replayed_messages_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [live(i, chunk(0) if i == 0 else chunk(1)) for i in range(600)]
    replayed = [{**line, "frames_b64": ["", *line["frames_b64"]]} for line in lines[100:]]
    done = run([*lines, *replayed, QUERY], capsys)
    assert done.depths() == [8]
    assert done.stats["streams"]["w"]["0"]["epoch"] == 0


def test_a_number_that_goes_back_is_a_restart_even_with_the_same_content(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"worker": "w", "seq": i, "events": [chunk(i)]} for i in (0, 1)]
    assert run([*lines, lines[1], QUERY], capsys).depths() == [8]
    assert run([*lines, lines[0], QUERY], capsys).depths() == [4]


def test_a_later_message_with_a_lower_number_fills_no_gap(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"worker": "w", "seq": 1, "ts": 10.0, "events": [chunk(0)]},
        {"worker": "w", "seq": 0, "ts": 20.0, "events": []},
    ]
    assert run([*lines, QUERY], capsys).depths() == [0]
    older = [lines[0], {**lines[1], "ts": 5.0}]
    assert run([*older, QUERY], capsys).depths() == [4]
