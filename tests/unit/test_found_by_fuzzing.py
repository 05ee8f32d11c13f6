"""Faults that tests/fuzz found, each by the smallest input that showed it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import pytest

from gateway.engine.metrics import parse_metrics
from gateway.extproc.session import ProtocolError
from gateway.handoff.fields import split, with_member
from gateway.handoff.opening import Opening, State
from gateway.proxy.peer import UpstreamError
from gateway.proxy.usage import UsageTail
from tests.support.extproc import Talk, request_head, response_head
from tests.support.http1_world import Worker, turns

_N = 64_000


def cpu_s(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


@pytest.mark.parametrize(
    "line",
    ["vllm:num_requests_running" + " " * _N, "vllm:cache_config_info{" + "a" * _N + "} 1"],
    ids=["spaces", "letters"],
)
def test_a_line_of_metrics_costs_no_more_than_its_length(line: str) -> None:
    """It took 25 s, and so long nobody was served."""
    assert cpu_s(lambda: parse_metrics(line + "\n", 1.0)) < 1


def test_labels_are_read_as_before() -> None:
    text = (
        'vllm:cache_config_info { block_size = "16" ,x="a\\"b}",num_gpu_blocks="7"}\t1.0\nvllm:num_requests_running 2\n'
    )
    stats = parse_metrics(text, 1.0).stats
    assert (stats.block_size, stats.kv_blocks, stats.running) == (16, 7, 2.0)


@pytest.mark.parametrize("n", [10, 40_000])
def test_a_member_is_set_however_often_its_name_and_value_stand_further_inside(n: int) -> None:
    """A client's body of 64 KB held up the picker, and a gateway that derives cache salts, for 0.6 s; one of 1 MB for
    minutes.
    """
    inner = ",".join(['{"model":"a"}'] * n)
    raw = f'{{ "model":"a", "x":[{inner}]}}'.encode()
    changed = b""

    def change() -> None:
        nonlocal changed
        changed = with_member(raw, "model", b'"b"')

    assert cpu_s(change) < 2
    assert json.loads(changed) == json.loads(raw) | {"model": "b"}
    assert bytes(split(changed)["x"]) == f"[{inner}]".encode()


def test_usages_that_never_close_cost_little() -> None:
    tail = UsageTail()
    tail.feed(b'"usage":{"a":{' * 3000)
    assert cpu_s(tail.read) < 0.1


def test_a_stream_in_single_bytes_is_looked_at_once() -> None:
    opening = Opening()
    assert cpu_s(lambda: [opening.feed(b"x") for _ in range(_N)]) < 2
    assert opening.state is State.PENDING
    assert [opening.feed(piece) for piece in (b"\r", b"\n", b'data: {"error": {"code": 500}}\r', b"\n\r")][-1] is (
        State.PENDING
    )
    assert opening.feed(b"\n") is State.FAILED


@pytest.mark.parametrize("status", ["9" * 5000, "2000", "20", ""])
def test_a_status_that_is_none_ends_the_stream_by_a_declared_error(status: str) -> None:
    """One of more than 4300 digits raised a ValueError that nobody expects of a message."""
    talk = Talk()
    talk.feed(request_head(ends=True))
    talk.pick()
    head = response_head()
    head.response_headers.headers.headers[0].raw_value = status.encode()
    with pytest.raises(ProtocolError):
        talk.feed(head)


def test_an_answer_of_status_0_is_none() -> None:
    """It was waited for until the request's timeout, and its connection used again."""

    async def run() -> None:
        worker = Worker()
        reading = asyncio.ensure_future(worker.read())
        worker.wire.data_received(b"HTTP/1.1 000 OK\r\nContent-Length: 2\r\n\r\n{}")
        await turns()
        assert reading.done()
        with pytest.raises(UpstreamError):
            await reading
        assert worker.freed == []

    asyncio.run(run())


def test_a_change_of_protocols_is_no_answer_and_no_unexpected_error() -> None:
    """llhttp's parser raises an exception of its own for it, which reached the event loop."""

    async def run() -> None:
        worker = Worker()
        reading = asyncio.ensure_future(worker.read())
        worker.wire.data_received(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x00"
        )
        with pytest.raises(UpstreamError):
            await reading
        await turns()
        assert (worker.freed, worker.lost) == ([], [worker.wire])

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize("text", ["{}", '{"model": "a"}'])
def test_a_member_is_added_to_objects_of_every_encoding(text: str, encoding: str) -> None:
    """Bytes of ours among wider ones made it what nobody can read."""
    changed = with_member(text.encode(encoding), "cache_salt", b'"s"')
    assert json.loads(changed) == {**json.loads(text), "cache_salt": "s"}
