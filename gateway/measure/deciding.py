"""A planner that several processes ask, and processes that decide by themselves: for `python -m bench processes
--central`.

Each is a process that takes its orders from stdin and answers with a line of JSON: the one in the middle `begin
BLOCKS_PER_S paced|full` and `end`, the others `paced REQUESTS_PER_S SECONDS` and `full REQUESTS_AT_ONCE SECONDS`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from gateway.config import Config
from gateway.config.schema import IndexServiceConfig
from gateway.indexservice.addresses import Addresses
from gateway.indexservice.link import ReplicaLink
from gateway.indexservice.publisher import Publisher
from gateway.indexservice.server import IndexServer, Settings
from gateway.measure.asking import orders
from gateway.measure.indexer import BLOCKS_PER_FRAME, churn
from gateway.measure.scheduling import ahead_of_others, as_any_other
from gateway.processes.board_client import BoardClient
from gateway.processes.board_server import BoardServer
from gateway.processes.derived import redis_of_board
from gateway.processes.frames import frame
from gateway.replicas import Replicas
from gateway.replicas.schema import Keys
from gateway.stored import StoredResponses
from indexer import PrefixIndex, Prompt, Replica, decode_batch
from indexer.keys import chain, root
from scorer.fleet import Fleet
from scorer.planner import Planner
from scorer.types import Candidate, Outcome, OutcomeKind, RequestFacts, TokenSource

if TYPE_CHECKING:
    from bench.central import Setting

_PROMPTS = 512
_BUDGET_BYTES = 8 << 30
_FEED_EVERY_S = 0.002
_MOST_FRAMES = 32
"""One after the other, as the thread that takes events in does."""
_FIRST_TOKEN_S = 0.02
_END_S = 0.04
_LENGTH_BYTES = 4


class _Ask(msgspec.Struct, array_like=True, tag=0):
    number: int
    prompt_tokens: int
    keys: bytes
    """Eight bytes a block."""


class _Tell(msgspec.Struct, array_like=True, tag=1):
    number: int
    is_over: bool


class _Choice(msgspec.Struct, array_like=True):
    """What a request must know to be carried out."""

    number: int
    decode: tuple[str, int]
    prefill: tuple[str, int] | None
    cached_tokens: int


_questions = msgspec.msgpack.Decoder(_Ask | _Tell)
_choices = msgspec.msgpack.Decoder(_Choice)


class _ByKeys(Planner):
    """Of prompts that come as block keys."""

    asked: Prompt | None = None

    def _prompt(self, facts: RequestFacts) -> Prompt | None:
        return self.asked


class _Frames(asyncio.Protocol):
    """Messages as `gateway.processes.frames` has them, without a task for each connection. `heard` gets all that came
    together.
    """

    def __init__(self, heard: Callable[[_Frames, list[bytes]], None]) -> None:
        self._heard = heard
        self._data = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        had = self._data
        had += data
        at, found = 0, []
        while len(had) >= (begin := at + _LENGTH_BYTES):
            end = begin + int.from_bytes(had[at:begin], "big")
            if len(had) < end:
                break
            found.append(bytes(had[begin:end]))
            at = end
        del had[:at]
        self._heard(self, found)

    def send(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)


# ---- the one in the middle -------------------------------------------------------------------------------------------


def serve_planner(setting: str, _: int) -> None:
    """It decides, books, answers, and takes the engines' events in."""
    uvloop.run(_serve_planner(_setting(setting)))


async def _serve_planner(setting: Setting) -> None:
    from bench.kv_frames import BLOCK_SIZE

    planner = _ByKeys(Fleet(), PrefixIndex(budget_bytes=_BUDGET_BYTES), pd_policy="cost")
    _load(planner, setting)
    rng = random.Random(1)  # noqa: S311
    numbers = iter(range(1 << 62))

    def connected() -> _Frames:
        connection = next(numbers)

        def heard(to: _Frames, messages: list[bytes]) -> None:
            answers = []
            for data in messages:
                message = _questions.decode(data)
                request_id = f"{connection}-{message.number}"
                if isinstance(message, _Tell):
                    kind = OutcomeKind.END if message.is_over else OutcomeKind.FIRST_TOKEN
                    planner.observe(request_id, Outcome(kind=kind), time.monotonic())
                else:
                    planner.asked = Prompt.of_keys(array("Q", message.keys), BLOCK_SIZE)
                    plan = planner.plan(_facts(request_id, message.prompt_tokens, b""), None, time.monotonic(), rng)
                    answers.append(frame(_choice(message.number, plan.chosen)))
            to.send(b"".join(answers))

        return _Frames(heard)

    server = await asyncio.get_running_loop().create_unix_server(connected, _socket(setting, "planner"))
    await _obey(planner.index)
    server.close()


def serve_board(setting: str, _: int) -> None:
    """A hub: the index for those who copy it, and the board."""
    uvloop.run(_serve_board(_setting(setting)))


async def _serve_board(setting: Setting) -> None:
    index = PrefixIndex(budget_bytes=_BUDGET_BYTES)
    _load(Planner(Fleet(), index, pd_policy="cost"), setting)
    publisher = Publisher(index, dict, history_bytes=64 << 20, digest_interval_s=30.0)
    server = IndexServer(index, publisher, Settings(port=None, socket=_socket(setting, "index")))
    told = redis_of_board(Config())
    board = BoardServer(_socket(setting, "board"), Keys(told.prefix, told.fleet))
    publisher.start()
    await server.start()
    await board.start()
    await _obey(index)
    await board.close()
    await server.close()
    await publisher.close()


async def _obey(index: PrefixIndex) -> None:
    from bench.decision import DECODERS

    frames = churn(random.Random(5), [f"d{i}" for i in range(DECODERS)])  # noqa: S311
    print(json.dumps({"ready": True}), flush=True)
    feed = _Feed(index, frames)
    began_s = 0.0
    async for what, *rest in orders():
        if what == "begin":
            if rest[1] == "paced":
                ahead_of_others()
            began_s = time.process_time()
            feed.start(float(rest[0]))
            print(json.dumps({}), flush=True)
        else:
            await feed.stop()
            told = {"cpu_s": time.process_time() - began_s, "feeding_cpu_s": feed.cpu_s, "blocks": feed.blocks}
            as_any_other()
            print(json.dumps(told), flush=True)


class _Feed:
    """Events of engines, as payloads."""

    def __init__(self, index: PrefixIndex, frames: list[tuple[str, bytes]]) -> None:
        self._index = index
        self._frames = cycle(frames)
        self.cpu_s = 0.0
        """Spent on them since `start`."""
        self.blocks = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, blocks_per_s: float) -> None:
        self.cpu_s, self.blocks = 0.0, 0
        self._task = asyncio.create_task(self._run(blocks_per_s)) if blocks_per_s else None

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, blocks_per_s: float) -> None:
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(_FEED_EVERY_S)
            cpu_s = time.thread_time()
            for _ in range(_MOST_FRAMES):
                if self.blocks >= blocks_per_s * (time.monotonic() - began_s):
                    break
                worker, payload = next(self._frames)
                self._index.apply(worker, 0, decode_batch(payload))
                self.blocks += BLOCKS_PER_FRAME
            self.cpu_s += time.thread_time() - cpu_s


# ---- the others ------------------------------------------------------------------------------------------------------

Decide = Callable[[int, bytes], Awaitable[None]]
"""(number, token ids): a decision is there."""
Told = Callable[[int, bool], None]
"""(number, whether it is over): a first token, an end."""


def ask_planner(setting: str, number: int) -> None:
    """Asks the planner."""
    uvloop.run(_ask(_setting(setting), number))


async def _ask(setting: Setting, number: int) -> None:
    from bench.kv_frames import BLOCK_SIZE

    waiting: dict[int, asyncio.Future[None]] = {}

    def heard(_: _Frames, messages: list[bytes]) -> None:
        for data in messages:
            waiting.pop(_choices.decode(data).number).set_result(None)

    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(partial(_Frames, heard), _socket(setting, "planner"))
    seed, n_blocks = root(None, BLOCK_SIZE), setting.prompt_tokens // BLOCK_SIZE

    async def decide(i: int, tokens: bytes) -> None:
        keys = array("Q", chain(seed, tokens, BLOCK_SIZE, 0, n_blocks, {})).tobytes()
        answer = waiting[i] = loop.create_future()
        connection.send(frame(_Ask(i, setting.prompt_tokens, keys)))
        await answer

    await _work(setting, number, decide, lambda i, is_over: connection.send(frame(_Tell(i, is_over))))


def decide(setting: str, number: int) -> None:
    """Decides with a copy of the index, and with what others tell on the board."""
    uvloop.run(_decide(_setting(setting), number))


async def _decide(setting: Setting, number: int) -> None:
    from bench.decision import STREAMS

    rng = random.Random(number)  # noqa: S311
    replica = Replica(budget_bytes=_BUDGET_BYTES)
    address = f"unix:{_socket(setting, 'index')}"
    link = ReplicaLink(Addresses(IndexServiceConfig(addresses=(address,)), rng), replica)
    planner = Planner(Fleet(), replica, pd_policy="cost")
    _load(planner, setting, streams=max(1, STREAMS // setting.processes), hears=False)
    replicas = Replicas(
        redis_of_board(Config()),
        planner,
        StoredResponses(),
        CollectorRegistry(),
        rng,
        ingest=None,
        hub=partial(BoardClient, _socket(setting, "board")),
    )
    link.start()
    replicas.start()
    while not (link.is_live and replicas.is_shared):  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0.01)

    async def decide(i: int, tokens: bytes) -> None:
        planner.plan(_facts(str(i), setting.prompt_tokens, tokens), None, time.monotonic(), rng)

    def told(i: int, is_over: bool) -> None:
        kind = OutcomeKind.END if is_over else OutcomeKind.FIRST_TOKEN
        planner.observe(str(i), Outcome(kind=kind), time.monotonic())

    await _work(setting, number, decide, told)
    await replicas.close()
    link.stop()


async def _work(setting: Setting, number: int, decide: Decide, told: Told) -> None:
    prompts = _prompts(setting, number)
    work = _Work(prompts, decide, told, random.Random(f"arrivals {number}"))  # noqa: S311
    print(json.dumps({"scheduled": ahead_of_others()}), flush=True)
    as_any_other()
    async for how, amount, seconds in orders():
        work.latencies_us = []
        cpu_s = time.process_time()
        if how == "paced":
            ahead_of_others()
            await work.paced(float(amount), float(seconds))
            as_any_other()
        else:
            await work.full(int(float(amount)), float(seconds))
        cpu_s = time.process_time() - cpu_s
        print(json.dumps({"cpu_s": cpu_s, "latencies_us": work.latencies_us}), flush=True)


class _Work:
    """Requests, one prompt after the other."""

    def __init__(self, prompts: list[bytes], decide: Decide, told: Told, rng: random.Random) -> None:
        self._prompts = prompts
        self._decide = decide
        self._told = told
        self._rng = rng
        self._n = 0
        self.latencies_us: list[float] = []

    async def paced(self, per_s: float, seconds: float) -> None:
        """They come by chance, whatever became of those before."""
        due_s = time.monotonic()
        until_s = due_s + seconds
        async with asyncio.TaskGroup() as running:
            while (due_s := due_s + self._rng.expovariate(per_s)) < until_s:
                await asyncio.sleep(due_s - time.monotonic())
                running.create_task(self._one(_FIRST_TOKEN_S, _END_S))

    async def full(self, n_at_once: int, seconds: float) -> None:
        until_s = time.monotonic() + seconds

        async def always() -> None:
            await self._one(0.0, 0.0)
            while time.monotonic() < until_s:
                await self._one(0.0, 0.0)

        await asyncio.gather(*(always() for _ in range(n_at_once)))

    async def _one(self, first_token_s: float, end_s: float) -> None:
        self._n += 1
        i = self._n
        began_s = time.monotonic()
        await self._decide(i, self._prompts[i % len(self._prompts)])
        self.latencies_us.append((time.monotonic() - began_s) * 1e6)
        await asyncio.sleep(first_token_s)
        self._told(i, False)
        await asyncio.sleep(end_s - first_token_s)
        self._told(i, True)


# ---- what all are given ----------------------------------------------------------------------------------------------


def _setting(text: str) -> Setting:
    from bench.central import Setting

    return msgspec.json.decode(text, type=Setting)


def _socket(setting: Setting, name: str) -> str:
    return f"{setting.folder}/{name}.sock"


def _beginning(setting: Setting) -> array[int]:
    """What workers hold different parts of."""
    from bench.kv_frames import tokens

    return tokens(random.Random(setting.prompt_tokens), setting.prompt_tokens)  # noqa: S311


def _load(planner: Planner, setting: Setting, *, streams: int | None = None, hears: bool = True) -> None:
    from bench.decision import STREAMS, load

    rng, prompt = random.Random(17), _beginning(setting).tolist()  # noqa: S311
    load(planner, rng, prompt, None, streams=streams or STREAMS, hears=hears, now_s=time.monotonic())


def _prompts(setting: Setting, number: int) -> list[bytes]:
    """The first half is what workers hold, the rest is each one's own."""
    from bench.kv_frames import BLOCK_SIZE

    new_tokens = setting.new_blocks * BLOCK_SIZE
    begin = _beginning(setting)[: setting.prompt_tokens - new_tokens].tobytes()
    rng = random.Random(f"prompts {number}")  # noqa: S311
    return [begin + rng.randbytes(4 * new_tokens) for _ in range(_PROMPTS)]


def _facts(request_id: str, prompt_tokens: int, tokens: bytes) -> RequestFacts:
    return RequestFacts(
        request_id=request_id,
        model="m",
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        token_source=TokenSource.GIVEN,
        max_output_tokens=200,
        streaming=True,
    )


def _choice(number: int, chosen: Candidate) -> _Choice:
    return _Choice(number, chosen.decode, chosen.prefill, chosen.cached_tokens)
