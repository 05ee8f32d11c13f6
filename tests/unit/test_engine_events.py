"""The encoder against recorded frames of vLLM 0.32, and the layouts of older versions."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch, encode_batch
from bench.engine.model import Engine
from bench.engine.publisher import ReplayBuffer, binds, for_rank, replay_frames, seq_bytes
from bench.engine.request import EngineConfig, Request

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "vllm_0.32_kv_events.json").read_text())


def frames(row: list[str]) -> list[bytes]:
    return [base64.b64decode(frame) for frame in row]


@pytest.mark.parametrize("row", RECORDED["pub"], ids=lambda row: row["scenario"])
def test_recorded_payload_survives_decode_and_encode(row: dict[str, Any]) -> None:
    topic, seq, payload = frames(row["frames_b64"])
    assert seq == seq_bytes(int.from_bytes(seq, "big"))
    assert topic == b"kv@127.0.0.1:8120@tiny"
    ts, events, rank = decode_batch(payload)
    assert encode_batch(ts, events, rank) == payload


def test_recorded_scenarios_hold_what_they_are_named_after() -> None:
    """Guards the test data: every event type and both kinds of extra keys are in it."""
    batches = {row["scenario"]: decode_batch(frames(row["frames_b64"])[2])[1] for row in RECORDED["pub"]}
    assert isinstance(batches["01_first_long_prompt"][0], AllBlocksCleared)
    assert isinstance(batches["08_evictions"][0], BlockRemoved)
    lora, salted = batches["06_lora"][0], batches["05_cache_salt"][0]
    assert isinstance(lora, BlockStored)
    assert isinstance(salted, BlockStored)
    assert lora.extra_keys == [["l1"]] * 6
    assert salted.extra_keys == [["tenant-a"], *[None] * 5]


def test_recorded_requests_make_the_model_announce_the_same() -> None:
    """Apart from the hashes, the model's event for the recorded request equals vLLM's."""
    engine = Engine(EngineConfig(block_size=32, num_gpu_blocks=80, max_model_len=2048))
    prompt = list(range(100, 302))
    cases = {
        "01_first_long_prompt": Request(request_id="a", prompt_token_ids=prompt, max_tokens=1),
        "05_cache_salt": Request(request_id="b", prompt_token_ids=prompt, max_tokens=1, cache_salt="tenant-a"),
        "06_lora": Request(request_id="c", prompt_token_ids=prompt, max_tokens=1, lora_id=1, lora_name="l1"),
        "07_report_mode_full": Request(request_id="d", prompt_token_ids=prompt, max_tokens=1, report_full=True),
    }
    for row in RECORDED["pub"]:
        if row["scenario"] not in cases:
            continue
        recorded = decode_batch(frames(row["frames_b64"])[2])[1][-1]
        engine.add_request(cases[row["scenario"]], 0.0)
        (event,) = engine.step(1.0).events
        assert isinstance(event, BlockStored)
        assert isinstance(recorded, BlockStored)
        assert len(event.block_hashes) == len(recorded.block_hashes)
        event.block_hashes = recorded.block_hashes
        assert event == recorded


@pytest.mark.parametrize(("start", "messages"), RECORDED["replay"].items())
def test_replay_frames_equal_the_recorded_ones(start: str, messages: list[list[str]]) -> None:
    wanted = [frames(message) for message in messages]
    buffer = ReplayBuffer(10)
    buffer.append(int(start) - 1, b"too old")
    for message in wanted[:-1]:
        buffer.append(int.from_bytes(message[2], "big"), message[3])
    assert replay_frames(buffer.since(int(start)), b"kv@127.0.0.1:8120@tiny", with_topic=True) == wanted


def test_replay_frames_before_0_26_have_no_topic() -> None:
    assert replay_frames([(7, b"x")], b"topic", with_topic=False) == [
        [b"", (7).to_bytes(8, "big"), b"x"],
        [b"", b"\xff" * 8, b""],
    ]


def test_replay_buffer_forgets_the_oldest() -> None:
    buffer = ReplayBuffer(2)
    for seq in range(4):
        buffer.append(seq, b"")
    assert [seq for seq, _ in buffer.since(0)] == [2, 3]


def test_array_layouts() -> None:
    stored = BlockStored(
        block_hashes=[1],
        parent_block_hash=None,
        token_ids=[5, 6],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    removed = BlockRemoved(block_hashes=[1], medium="GPU", group_idx=0)
    events = [stored, removed, AllBlocksCleared()]
    assert msgspec.msgpack.decode(encode_batch(1.5, events, 3, "array")) == [
        1.5,
        [
            ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, [None], 0, "full_attention"],
            ["BlockRemoved", [1], "GPU", 0],
            ["AllBlocksCleared"],
        ],
        3,
    ]
    assert msgspec.msgpack.decode(encode_batch(1.5, events, None, "array-0.11")) == [
        1.5,
        [
            ["BlockStored", [1], None, [5, 6], 2, None, "GPU"],
            ["BlockRemoved", [1], "GPU"],
            ["AllBlocksCleared"],
        ],
    ]


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/kv", True),
        ("inproc://kv", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://gateway:5557", False),
    ],
)
def test_endpoint_is_bound_or_connected_as_vllm_does(endpoint: str, bound: bool) -> None:
    assert binds(endpoint) is bound


def test_endpoint_of_a_rank() -> None:
    assert for_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert for_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert for_rank("inproc://kv", 1) == "inproc://kv_dp1"
    with pytest.raises(ValueError, match="data-parallel"):
        for_rank("ipc:///tmp/kv", 1)
