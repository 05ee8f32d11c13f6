"""Clients as behind a load balancer, and what became of their requests."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import aiohttp
import msgspec

from bench.engine import tokenizer
from tests.faults.broken import Broken
from tests.faults.truth import MODEL, Truth

_TIMEOUT_S = 120.0
_RETRIES = 2
_SYSTEMS = 6
_MOST_TURNS = 4
_NAMED = re.compile(r"^Worker (\S+) ")
Body = dict[str, Any]

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses"}


class Door(Protocol):
    """A gateway as the load balancer sees it. `in_rotation`: it was ready when it was last looked at."""

    name: str
    url: str
    in_rotation: bool


class Tally:
    """What became of requests.

    right     the whole answer came, and it is the one it must be
    left      the client went away in the middle, on purpose
    retried   503 with Retry-After for a request that only the holder of a stored response can serve, while its gateway
              still keeps away from it; asked again after that time, `_RETRIES` times at most, as OpenAI's clients do
    excused   it failed, and a connection of its gateway or of its worker was broken by us while it ran; or it was about
              a stored response, and the engine that kept it was killed or cut off since
    failed    any other clear error
    wrong     no clear error in OpenAI's shape, or not the text it must be
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []

    @property
    def asked(self) -> int:
        return self.counts.total() - self.counts["retried"]

    def success(self) -> float:
        judged = self.counts["right"] + self.counts["failed"] + self.counts["wrong"]
        return 1.0 if not judged else self.counts["right"] / judged

    def note(self, what: str, detail: str = "") -> None:
        self.counts[what] += 1
        if what in ("failed", "wrong"):
            self.notes.append(f"{what}: {detail}")


class Outcome(msgspec.Struct, kw_only=True):
    """Of one request. `error`: what the client was told; `unclear`: why what it was told is no clear error; `broke`:
    how its connection did.
    """

    text: str = ""
    is_whole: bool = False
    error: str | None = None
    retry_after_s: float | None = None
    unclear: str | None = None
    broke: str | None = None
    gateway: str = ""
    worker: str | None = None
    response_id: str | None = None
    began_s: float = 0.0
    ended_s: float = 0.0


class Load:
    """So many clients, each with `pause_s` on average between its requests. `run` and `rest` as often as wanted, each
    time with the `doors` that are to be asked: gateways that tell each other which engine has which stored response.
    """

    def __init__(self, broken: Broken, seed: int, *, n_clients: int, pause_s: float) -> None:
        self.tally = Tally()
        self.truth = Truth()
        self.broken = broken
        self._doors: Sequence[Door] = ()
        self._turn = 0
        self._clients = [_Client(self, random.Random(f"{seed} {i}"), pause_s) for i in range(n_clients)]
        self._tasks: list[asyncio.Task[None]] = []
        self._resting = asyncio.Event()

    def run(self, doors: Sequence[Door]) -> None:
        self._doors = doors
        self._resting.clear()
        self._tasks = [asyncio.create_task(client.run(self._resting)) for client in self._clients]

    async def rest(self) -> None:
        """Once every request has come to its end."""
        self._resting.set()
        await asyncio.gather(*self._tasks)
        self._tasks = []

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def next_doors(self) -> list[Door]:
        """In the order they are tried in: whoever refuses a connection has not been asked."""
        self._turn += 1
        there = [door for door in self._doors if door.in_rotation]
        at = self._turn % len(there)
        return there[at:] + there[:at]


class _Client:
    def __init__(self, load: Load, rng: random.Random, pause_s: float) -> None:
        self._load = load
        self._rng = rng
        self._pause_s = pause_s
        self._messages: list[Body] = []
        self._doings: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (10, self._chat),
            (4, self._completion),
            (3, self._responses),
            (2, self._leave),
        ]

    async def run(self, resting: asyncio.Event) -> None:
        weights = [weight for weight, _ in self._doings]
        while not resting.is_set():
            await self._rng.choices(self._doings, weights)[0][1]()
            pause_s = self._rng.expovariate(1 / self._pause_s)
            try:
                await asyncio.wait_for(resting.wait(), min(pause_s, 5 * self._pause_s))
            except TimeoutError:
                continue

    # ---- what it asks ------------------------------------------------------------------------------------------------

    async def _chat(self) -> None:
        """A chat goes on with what was answered."""
        if not self._messages or len(self._messages) > 2 * _MOST_TURNS:
            self._messages = [{"role": "system", "content": self._system()}]
        self._messages.append({"role": "user", "content": self._text(12)})
        body = self._body(messages=list(self._messages), max_tokens=self._rng.randrange(4, 20))
        expected = self._load.truth.of("chat", body)
        outcome = await self._ask("chat", body)
        self._judge("chat", outcome, expected)
        self._messages.append({"role": "assistant", "content": expected})

    async def _completion(self) -> None:
        """A shared beginning in token ids."""
        shared = random.Random(self._rng.randrange(_SYSTEMS)).choices(range(*tokenizer.GENERATED_IDS), k=320)
        own = self._rng.choices(range(*tokenizer.GENERATED_IDS), k=self._rng.randrange(5, 200))
        body = self._body(prompt=shared + own, max_tokens=self._rng.randrange(2, 12))
        self._judge("completions", await self._ask("completions", body), self._load.truth.of("completions", body))

    async def _responses(self) -> None:
        """A stored response, and another one that follows it by way of whichever gateway comes next."""
        given: list[Body] = [{"role": "user", "content": self._system() + self._text(8)}]
        body = self._body(input=given, max_output_tokens=self._rng.randrange(3, 10))
        expected = self._load.truth.of("responses", body)
        first = await self._ask("responses", body)
        if not self._judge("responses", first, expected):
            return
        asked: list[Body] = [{"role": "user", "content": self._text(6)}]
        whole = [*given, {"role": "assistant", "content": expected}, *asked]
        body = self._body(input=asked, max_output_tokens=5)
        answer = self._load.truth.of("responses", {**body, "input": whole})
        body["previous_response_id"] = first.response_id
        outcome = await self._ask("responses", body)
        for _ in range(_RETRIES):
            if outcome.retry_after_s is None:
                break
            self._load.tally.note("retried")
            await asyncio.sleep(outcome.retry_after_s)
            outcome = await self._ask("responses", body)
        self._judge("follow-up", outcome, answer, holder=first)

    async def _leave(self) -> None:
        body = self._body(prompt=self._text(60), max_tokens=300, stream=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ask("completions", body), self._rng.uniform(0.01, 0.4))
        self._load.tally.note("left")

    def _body(self, **fields: Any) -> Body:
        return {"model": MODEL, "temperature": 0, "stream": self._rng.random() < 0.6, **fields}

    def _system(self) -> str:
        return _words(random.Random(self._rng.randrange(_SYSTEMS)), 150)

    def _text(self, n: int) -> str:
        return _words(self._rng, n)

    # ---- what it is told ---------------------------------------------------------------------------------------------

    def _judge(self, kind: str, it: Outcome, expected: str, holder: Outcome | None = None) -> bool:
        """Whether it is right. `holder`: of the response that it was to follow."""
        tally, broken = self._load.tally, self._load.broken
        where = f"{kind} by {it.gateway} at {it.worker} ({it.ended_s - it.began_s:.1f} s)"
        named = _NAMED.match(it.error or "")
        names = {it.gateway, it.worker, named[1] if named else None} - {None}
        excused = any(broken.touched(str(name), it.began_s, it.ended_s) for name in names)
        if holder is not None:
            excused = excused or broken.touched(str(holder.worker), holder.began_s, it.ended_s)
        is_beginning = expected.startswith(it.text)
        if it.unclear is not None:
            tally.note("wrong", f"{where}: {it.unclear}")
        elif not is_beginning or (it.is_whole and it.text != expected):
            tally.note("wrong", f"{where}: {it.text!r} in place of {expected!r}")
        elif it.is_whole:
            tally.note("right")
            return True
        elif excused:
            tally.note("excused")
        elif it.error is None:
            tally.note("wrong", f"{where}: {it.broke or 'it ended before its end'}")
        else:
            tally.note("failed", f"{where}: {it.error}")
        return False

    async def _ask(self, api: str, body: Body) -> Outcome:
        for door in self._load.next_doors():
            it = Outcome(gateway=door.name, began_s=time.monotonic())
            try:
                async with (
                    asyncio.timeout(_TIMEOUT_S),
                    aiohttp.ClientSession() as http,
                    http.post(door.url + PATHS[api], json=body) as answer,
                ):
                    it.worker = answer.headers.get("x-warmroute-worker")
                    if answer.status == 503 and "Retry-After" in answer.headers:
                        it.retry_after_s = float(answer.headers["Retry-After"])
                    await (_read_stream if body["stream"] and answer.status == 200 else _read)(api, answer, it)
            except aiohttp.ClientConnectorError:
                continue
            except (aiohttp.ClientError, OSError) as exc:
                it.broke = f"the connection broke: {type(exc).__name__} {exc}"
            except TimeoutError:
                it.unclear = f"nothing for {_TIMEOUT_S:g} s"
            it.ended_s = time.monotonic()
            return it
        raise AssertionError("every gateway refuses connections")


async def _read(api: str, answer: aiohttp.ClientResponse, it: Outcome) -> None:
    raw = await answer.read()
    try:
        body = json.loads(raw)
    except ValueError:
        it.unclear = f"status {answer.status}, no JSON: {raw[:200]!r}"
        return
    if answer.status != 200:
        _read_error(body, it, f"status {answer.status}")
    elif api == "chat":
        it.text, it.is_whole = body["choices"][0]["message"]["content"], True
    elif api == "completions":
        it.text, it.is_whole = body["choices"][0]["text"], True
    else:
        it.text, it.is_whole = "".join(part["text"] for item in body["output"] for part in item["content"]), True
        it.response_id = body["id"]


async def _read_stream(api: str, answer: aiohttp.ClientResponse, it: Outcome) -> None:
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            it.is_whole = True
            continue
        event = json.loads(data)
        if event.get("error"):
            _read_error(event, it, "in the stream")
        elif api == "responses":
            _read_response_event(event, it)
        else:
            for choice in event["choices"]:
                it.text += choice["text"] if api == "completions" else choice["delta"].get("content") or ""


def _read_response_event(event: Body, it: Outcome) -> None:
    if event["type"] == "response.output_text.delta":
        it.text += event["delta"]
    elif event["type"] == "response.completed":
        it.is_whole, it.response_id = True, event["response"]["id"]


def _read_error(body: Any, it: Outcome, where: str) -> None:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= set(error) or not error["message"]:
        it.unclear = f"{where}: not an error in OpenAI's shape: {str(body)[:200]}"
        return
    it.error = str(error["message"])


def _words(rng: random.Random, n: int) -> str:
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(n))
