"""The fake server's ZMQ faces as a SUB and a DEALER see them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from bench.engine.config import FakeVllmConfig
from bench.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from bench.engine.publisher import END_SEQ, seq_bytes
from bench.engine.server import FakeVllm
from bench.engine.timing import preset

CONFIG = FakeVllmConfig(model="tiny", topic="kv@me@tiny").with_engine(
    timing=preset("instant"), max_model_len=512, block_size=16, num_gpu_blocks=40
)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(http: aiohttp.ClientSession, engine: FakeVllm, prompt: list[int], **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, **more}
    async with http.post(engine.url + "/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def subscriber(
    context: zmq.asyncio.Context, endpoint: str, engine: FakeVllm, rank: int = 0
) -> zmq.asyncio.Socket:
    """A SUB that is known to receive: it has seen an unnumbered hello."""
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(endpoint)
    async with asyncio.timeout(60):
        while not await sub.poll(5):
            engine.publishers[rank].send_raw([b"hello"])
    while await sub.poll(20):
        assert await sub.recv_multipart() == [b"hello"]
    return sub


async def receive(socket: zmq.asyncio.Socket) -> list[bytes]:
    async with asyncio.timeout(60):
        frames = await socket.recv_multipart()
    assert isinstance(frames, list)
    return frames


async def replay(context: zmq.asyncio.Context, endpoint: str, start: int) -> list[list[bytes]]:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    await dealer.send_multipart([b"", seq_bytes(start)])
    messages: list[list[bytes]] = []
    while not messages or END_SEQ not in messages[-1]:
        messages.append(await receive(dealer))
    dealer.close(linger=0)
    return messages


async def silent(socket: zmq.asyncio.Socket) -> bool:
    return not await socket.poll(50)


async def test_batches_are_numbered_and_carry_topic_time_and_rank(
    context: zmq.asyncio.Context, http: aiohttp.ClientSession
) -> None:
    async with FakeVllm(CONFIG) as engine:
        sub = await subscriber(context, engine.events_endpoint, engine)
        for number in range(3):
            await ask(http, engine, list(range(100 * number + 100, 100 * number + 150)))
            topic, seq, payload = await receive(sub)
            ts, (event,), rank = decode_batch(payload)
            assert (topic, seq, rank) == (b"kv@me@tiny", seq_bytes(number), 0)
            assert ts > 1e9
            assert isinstance(event, BlockStored)
            assert event.token_ids == list(range(100 * number + 100, 100 * number + 148))
        await ask(http, engine, list(range(100, 150)))  # a full hit says nothing
        assert await silent(sub)


async def test_a_mirror_of_the_stream_equals_the_pool(
    context: zmq.asyncio.Context, http: aiohttp.ClientSession
) -> None:
    """40 overlapping prompts through a pool far too small, concurrently."""
    async with FakeVllm(CONFIG) as engine:
        sub = await subscriber(context, engine.events_endpoint, engine)
        prompts = [[*range(100, 100 + 16 * (n % 5)), *range(1000 + 40 * n, 1030 + 40 * n)] for n in range(40)]
        await asyncio.gather(*(ask(http, engine, prompt, max_tokens=20) for prompt in prompts))
        mirror: Counter[int | bytes] = Counter()
        removed = 0
        for _ in range(engine.publishers[0].next_seq):
            for event in decode_batch((await receive(sub))[2])[1]:
                if isinstance(event, BlockStored):
                    mirror.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    removed += 1
                    mirror.subtract(event.block_hashes)
        assert removed > 50
        assert +mirror == Counter(dict(engine.drivers[0].engine.resident()))
        assert engine.drivers[0].engine.idle()


@pytest.mark.parametrize("with_topic", [True, False])
async def test_replay(context: zmq.asyncio.Context, http: aiohttp.ClientSession, with_topic: bool) -> None:
    async with FakeVllm(replace(CONFIG, replay_with_topic=with_topic, buffer_steps=3)) as engine:
        for number in range(5):
            await ask(http, engine, list(range(100 * number + 100, 100 * number + 150)))
        batches = await replay(context, engine.replay_endpoint, 0)
        head = [b"", b"kv@me@tiny"] if with_topic else [b""]
        assert [message[:-1] for message in batches[:-1]] == [[*head, seq_bytes(seq)] for seq in (2, 3, 4)]
        assert batches[-1] == ([b"", b"", END_SEQ, b""] if with_topic else [b"", END_SEQ, b""])
        assert len(await replay(context, engine.replay_endpoint, 4)) == 2
        assert len(await replay(context, engine.replay_endpoint, 10**6)) == 1


async def test_a_malformed_replay_request_is_dropped(context: zmq.asyncio.Context) -> None:
    async with FakeVllm(CONFIG) as engine:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(engine.replay_endpoint)
        for frames in ([b""], [b"", b"short"], [b"", seq_bytes(0), b"more"]):
            await dealer.send_multipart(frames)
        assert await silent(dealer)
        await dealer.send_multipart([b"", seq_bytes(0)])
        assert (await receive(dealer))[2] == END_SEQ
        dealer.close(linger=0)


async def test_data_parallel_ranks_have_own_ports_and_numbers(
    context: zmq.asyncio.Context, http: aiohttp.ClientSession
) -> None:
    async with FakeVllm(replace(CONFIG, data_parallel_size=2)) as engine:
        async with http.get(engine.url + "/kv_event_sources") as response:
            sources = await response.json()
        ports = [int(sources[str(rank)]["endpoint"].rpartition(":")[2]) for rank in range(2)]
        assert sources["0"]["endpoint"] == f"tcp://*:{ports[0]}"
        assert ports[1] == ports[0] + 1
        subs = [await subscriber(context, f"tcp://127.0.0.1:{port}", engine, rank) for rank, port in enumerate(ports)]
        for rank in (1, 1, 0):
            prompt = list(range(1000 + 100 * rank, 1050 + 100 * rank))
            prompt[0] = engine.publishers[rank].next_seq + 1
            await ask(http, engine, prompt, headers={"X-data-parallel-rank": str(rank)})
        seen = [[await receive(sub) for _ in range(count)] for sub, count in zip(subs, (1, 2), strict=True)]
        assert [[frames[1] for frames in rows] for rows in seen] == [
            [seq_bytes(0)],
            [seq_bytes(0), seq_bytes(1)],
        ]
        assert [decode_batch(rows[0][2])[2] for rows in seen] == [0, 1]
        # Without a header requests spread by load.
        await asyncio.gather(*(ask(http, engine, [7 + n] * 40, max_tokens=50) for n in range(8)))
        assert all(stats.prompt_tokens > 100 for stats in engine.stats())


async def test_an_endpoint_without_a_wildcard_is_connected_to(
    context: zmq.asyncio.Context, http: aiohttp.ClientSession
) -> None:
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    async with FakeVllm(replace(CONFIG, events_endpoint=endpoint, replay_endpoint=None)) as engine:
        assert engine.event_sources()["0"]["endpoint"] == endpoint
        assert engine.event_sources()["0"]["replay_endpoint"] is None
        async with asyncio.timeout(60):
            while not await sub.poll(5):
                engine.publishers[0].send_raw([b"hello"])
        await ask(http, engine, list(range(100, 150)))
        frames = [b"hello"]
        while frames == [b"hello"]:
            frames = await receive(sub)
        assert frames[1] == seq_bytes(0)
    sub.close(linger=0)


@pytest.mark.parametrize("layout", ["array", "array-0.11"])
async def test_older_layouts_on_the_wire(
    context: zmq.asyncio.Context, http: aiohttp.ClientSession, layout: Any
) -> None:
    async with FakeVllm(replace(CONFIG, event_format=layout)) as engine:
        sub = await subscriber(context, engine.events_endpoint, engine)
        await ask(http, engine, list(range(100, 120)))
        _, (event,), rank = msgspec.msgpack.decode((await receive(sub))[2])
        assert (event[0], event[2:5], rank) == ("BlockStored", [None, list(range(100, 116)), 16], 0)


async def test_reset_while_idle_is_announced_with_the_next_request(
    context: zmq.asyncio.Context, http: aiohttp.ClientSession
) -> None:
    """E13: an idle engine's reset flushes no event; AllBlocksCleared leaves with the next step."""
    async with FakeVllm(CONFIG) as engine:
        sub = await subscriber(context, engine.events_endpoint, engine)
        async with http.post(engine.url + "/reset_prefix_cache") as response:
            assert response.status == 200
        assert await silent(sub)
        await ask(http, engine, list(range(100, 120)))
        _, events, _ = decode_batch((await receive(sub))[2])
        assert isinstance(events[0], AllBlocksCleared)
        assert isinstance(events[1], BlockStored)


async def test_lost_batches_can_be_replayed(context: zmq.asyncio.Context, http: aiohttp.ClientSession) -> None:
    """E1: batches lost on the wire leave a gap in the numbers; the replay buffer has them."""
    async with FakeVllm(CONFIG) as engine:
        sub = await subscriber(context, engine.events_endpoint, engine)
        await ask(http, engine, list(range(100, 150)))
        engine.faults.drop_batches = 2
        for start in (200, 300, 400):
            await ask(http, engine, list(range(start, start + 50)))
        assert [(await receive(sub))[1] for _ in range(2)] == [seq_bytes(0), seq_bytes(3)]
        missing = await replay(context, engine.replay_endpoint, 1)
        assert [message[2] for message in missing] == [seq_bytes(1), seq_bytes(2), seq_bytes(3), END_SEQ]


@pytest.mark.parametrize(("mode", "count"), [("off", 0), ("truncated", 2)])
async def test_replay_faults(context: zmq.asyncio.Context, http: aiohttp.ClientSession, mode: Any, count: int) -> None:
    async with FakeVllm(CONFIG) as engine:
        for number in range(4):
            await ask(http, engine, list(range(100 * number + 100, 100 * number + 150)))
        engine.faults.replay = mode
        dealer = context.socket(zmq.DEALER)
        dealer.connect(engine.replay_endpoint)
        await dealer.send_multipart([b"", seq_bytes(0)])
        assert [(await receive(dealer))[2] for _ in range(count)] == [seq_bytes(seq) for seq in range(count)]
        assert await silent(dealer)
        dealer.close(linger=0)


async def test_a_slow_replay_still_comes(context: zmq.asyncio.Context) -> None:
    async with FakeVllm(CONFIG) as engine:
        engine.faults.replay_delay_s = 0.1
        begin = asyncio.get_running_loop().time()
        assert len(await replay(context, engine.replay_endpoint, 0)) == 1
        assert asyncio.get_running_loop().time() - begin >= 0.1


async def test_malformed_batches_can_be_injected(context: zmq.asyncio.Context) -> None:
    async with FakeVllm(CONFIG) as engine:
        sub = await subscriber(context, engine.events_endpoint, engine)
        engine.inject(b"\xc1 not msgpack")
        assert await receive(sub) == [b"kv@me@tiny", seq_bytes(0), b"\xc1 not msgpack"]
        engine.publishers[0].send_raw([b"one frame"])
        assert await receive(sub) == [b"one frame"]


async def test_restart_in_place(context: zmq.asyncio.Context, http: aiohttp.ClientSession) -> None:
    """I10: same address, empty cache, numbers from 0, another process start time."""
    async with FakeVllm(CONFIG) as engine:
        sub = await subscriber(context, engine.events_endpoint, engine)
        for _ in range(2):
            await ask(http, engine, list(range(100, 150)))
        before = (engine.url, engine.events_endpoint, engine.replay_endpoint, engine.started)
        await engine.restart()
        assert (engine.url, engine.events_endpoint, engine.replay_endpoint) == before[:3]
        assert engine.started > before[3]
        assert await receive(sub)
        answer = await ask_again(lambda: ask(http, engine, list(range(100, 150))))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert [message[2] for message in await replay(context, engine.replay_endpoint, 0)] == [seq_bytes(0), END_SEQ]


async def test_a_taken_port_is_an_error_and_leaves_nothing_open() -> None:
    async with FakeVllm(CONFIG) as engine:
        taken = FakeVllm(replace(CONFIG, events_endpoint=engine.event_sources()["0"]["endpoint"]))
        with pytest.raises(zmq.ZMQError):
            await taken.start()
        assert taken.publishers == []


async def ask_again(call: Callable[[], Any]) -> dict[str, Any]:
    """The pooled connection died with the old process; the client tries once more."""
    with contextlib.suppress(aiohttp.ClientConnectionError):
        first: dict[str, Any] = await call()
        return first
    second: dict[str, Any] = await call()
    return second
