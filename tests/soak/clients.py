"""Clients of all kinds, each one request after the other; some leave early, lie, or ask for what there is not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp

from bench.engine import tokenizer

_TIMEOUT_S = 20.0
_SYSTEMS = 8
_MOST_TURNS = 6
MODELS = ("tiny", "tiny", "tiny", "lora-a", "lora-b")
Body = dict[str, Any]


class Told:
    """What came of the requests: by kind and status, or by kind and what broke."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @property
    def requests(self) -> int:
        return self.counts.total()


class Client:
    """`rate` requests a second at most. What it asks follows from its number."""

    def __init__(self, url: str, http: aiohttp.ClientSession, number: int, rate: float, told: Told) -> None:
        self._url = url
        self._http = http
        self._rng = random.Random(number)
        self._number = number
        self._pause_s = 1 / rate
        self._told = told
        self._messages: list[Body] = []
        self._doings: list[tuple[int, str, Callable[[], Awaitable[int]]]] = [
            (8, "chat", self._chat),
            (4, "tokens", self._tokens),
            (2, "messages", self._messages_api),
            (2, "responses", self._responses),
            (3, "left", self._left),
            (1, "left early", self._left_early),
            (1, "half a request", self._half),
            (1, "no json", self._no_json),
            (1, "no model", self._no_model),
            (1, "no path", self._no_path),
            (1, "no http", self._no_http),
            (1, "realtime", self._realtime),
            (1, "models", self._models),
        ]

    async def run(self) -> None:
        weights = [weight for weight, _, _ in self._doings]
        while True:
            _, name, do = self._rng.choices(self._doings, weights)[0]
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    status = await do()
                self._told.counts[f"{name} {status}"] += 1
            except aiohttp.WSServerHandshakeError as exc:
                self._told.counts[f"{name} {exc.status}"] += 1
            except (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError) as exc:
                self._told.counts[f"{name} {type(exc).__name__}"] += 1
            await asyncio.sleep(self._rng.expovariate(1 / self._pause_s))

    # ---- as it should be ---------------------------------------------------------------------------------------------

    async def _chat(self) -> int:
        """A chat that goes on for some turns, and then another one."""
        if len(self._messages) >= 2 * _MOST_TURNS:
            self._messages = []
        if not self._messages:
            self._messages.append({"role": "system", "content": self._system()})
        self._messages.append({"role": "user", "content": self._text(20)})
        body = {"model": self._model(), "messages": self._messages, "max_tokens": 8, "stream": self._rng.random() < 0.7}
        status = await self._post("/v1/chat/completions", body)
        self._messages.append({"role": "assistant", "content": self._text(8)})
        return status

    async def _tokens(self) -> int:
        """Long prompts, so that a prefill worker pays."""
        shared = random.Random(self._rng.randrange(_SYSTEMS)).choices(range(*tokenizer.GENERATED_IDS), k=1500)
        own = self._rng.choices(range(*tokenizer.GENERATED_IDS), k=self._rng.randrange(10, 1500))
        return await self._post("/v1/completions", {"model": "tiny", "prompt": shared + own, "max_tokens": 4})

    async def _messages_api(self) -> int:
        messages = [{"role": "user", "content": self._text(30)}]
        body = {"model": "tiny", "system": self._system(), "messages": messages, "max_tokens": 4, "stream": True}
        return await self._post("/v1/messages", body)

    async def _responses(self) -> int:
        return await self._post(
            "/v1/responses", {"model": "tiny", "input": self._text(40), "max_output_tokens": 4, "stream": True}
        )

    async def _models(self) -> int:
        async with self._http.get(self._url + "/v1/models") as answer:
            await answer.read()
            return answer.status

    async def _realtime(self) -> int:
        async with self._http.ws_connect(self._url + "/v1/realtime?model=tiny") as socket:
            await socket.receive(timeout=5)
            if self._rng.random() < 0.5:
                await socket.close()
        return 101

    # ---- as it should not be -----------------------------------------------------------------------------------------

    async def _left(self) -> int:
        """In the middle of the answer."""
        body = {"model": "tiny", "prompt": self._text(200), "max_tokens": 400, "stream": True}
        async with self._http.post(self._url + "/v1/completions", json=body, headers=self._headers()) as answer:
            with suppress(TimeoutError):
                await asyncio.wait_for(answer.content.readany(), self._rng.uniform(0.01, 0.5))
            answer.close()
            return answer.status

    async def _left_early(self) -> int:
        body = {"model": "tiny", "prompt": self._text(400), "max_tokens": 400}
        with suppress(TimeoutError):
            await asyncio.wait_for(self._post("/v1/completions", body), self._rng.uniform(0.001, 0.02))
        return 0

    async def _half(self) -> int:
        return await self._raw(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n{", answered=False
        )

    async def _no_http(self) -> int:
        return await self._raw(self._rng.randbytes(200) + b"\r\n\r\n", answered=True)

    async def _no_json(self) -> int:
        broken = b'{"model": "tiny", "prompt": "' + self._rng.randbytes(60)
        headers = {"Content-Type": "application/json", **self._headers()}
        async with self._http.post(self._url + "/v1/chat/completions", data=broken, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def _no_model(self) -> int:
        body = {"model": f"none-{self._rng.randrange(10_000)}", "prompt": "a", "odd": [{}, None, 1e300], "n": -1}
        return await self._post("/v1/completions", body)

    async def _no_path(self) -> int:
        return await self._post(f"/v1/none/{self._rng.randrange(10_000)}", {})

    # ------------------------------------------------------------------------------------------------------------------

    async def _post(self, path: str, body: Body) -> int:
        async with self._http.post(self._url + path, json=body, headers=self._headers()) as answer:
            await answer.read()
            return answer.status

    async def _raw(self, data: bytes, *, answered: bool) -> int:
        host, _, port = self._url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            await writer.drain()
            if not answered:
                await asyncio.sleep(self._rng.uniform(0, 0.2))
                return 0
            line = await reader.readline()
            return int(line.split()[1]) if line else 0
        finally:
            writer.close()

    def _headers(self) -> dict[str, str]:
        headers = {"x-tenant": f"tenant-{self._rng.randrange(30)}", "x-session-id": f"s{self._number}"}
        if self._rng.random() < 0.3:
            headers["x-slo-ttft-ms"] = "2000"
        if self._rng.random() < 0.2:
            headers["x-session-id"] = f"s{self._rng.randrange(1 << 40)}"
        return headers

    def _model(self) -> str:
        return MODELS[self._number % len(MODELS)]

    def _system(self) -> str:
        return _words(random.Random(self._rng.randrange(_SYSTEMS)), 300)

    def _text(self, n_words: int) -> str:
        return _words(self._rng, n_words)


def _words(rng: random.Random, n: int) -> str:
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(n))
