"""From the bytes of a request's body to its plan: JSON, chat template, tokens, hashing, matching, prices of 64 decode
and 8 prefill workers, the booking. CPU time of the whole process, tokenizer threads included.

"turn": a chat whose history was served before, with one new turn; the fleet holds different parts of it. "unseen": text
nobody has seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from gateway.request import RequestReader
from gateway.right_of_way import RightOfWay
from gateway.tokens import TokenService, TokenSettings
from scorer.fleet import Fleet
from scorer.planner import Planner
from scorer.types import Outcome, OutcomeKind, RequestFacts

SIZES_TOKENS = {"8k": 8_192, "32k": 32_768, "128k": 131_072}
NOW_S = 1.0
_TURN_WORDS = 40
_MESSAGE_WORDS = 150
_LOAD_S = 120.0

Chat = list[dict[str, str]]
Draw = Callable[[int], str]
"""Text of so many words, never the same twice."""


def measure_front(rounds: int, model: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures, and who made the tokens. `model`: a model directory."""
    return uvloop.run(_measure(rounds, model))


async def _measure(rounds: int, model: str) -> tuple[dict[str, float], dict[str, Any]]:
    async with tokenizing(model) as service:
        figures: dict[str, float] = {}
        for name, size in SIZES_TOKENS.items():
            fewer = rounds if size < 100_000 else max(3, rounds // 3)
            for key, value in (await _figures(service, size, fewer)).items():
                figures[f"body_to_plan_{name}_{key}"] = value
        local = service.status()["m"]["local"]
        return figures, {key: local[key] for key in ("encoder", "pieces")}


async def _figures(service: TokenService, size_tokens: int, rounds: int) -> dict[str, float]:
    front = await Front.of_size(service, size_tokens)
    turns = [body(front.next_turn()) for _ in range(rounds)]
    unseen = [body(front.chat()) for _ in range(rounds)]
    out = {"tokens": float(front.history_tokens)}
    for name, bodies in (("turn", turns), ("unseen", unseen)):
        times = []
        for raw in bodies:
            began_s = time.process_time()
            facts = await front.plan(raw)
            times.append(time.process_time() - began_s)
            if facts.tokens is None:
                raise RuntimeError(f"a prompt was not tokenised: {facts.token_source}")
            front.end(facts)
        out[f"{name}_ms"] = statistics.median(times) * 1e3
    return out


@asynccontextmanager
async def tokenizing(model: str) -> AsyncIterator[TokenService]:
    """Serves model "m", with the fastest encoder there is for it."""
    service = TokenService(TokenSettings(check_rate=0.0, local_budget_s=60.0, cache_bytes=256 << 20))
    await service.start()
    try:
        service.set_model("m", model)
        async with asyncio.timeout(_LOAD_S):
            while _is_loading(service.status()["m"]["local"]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield service
    finally:
        await service.close()


def _is_loading(local: dict[str, Any]) -> bool:
    if local["state"] == "failed":
        raise RuntimeError(local["detail"])
    return local.get("encoder") != "fastokens" and not local.get("why_not_fastokens")


def body(chat: Chat) -> bytes:
    return json.dumps({"model": "m", "messages": chat, "max_tokens": 200, "stream": True}).encode()


class Front:
    """Reads and plans requests; `history` is a chat that was served, of which the fleet holds different parts."""

    def __init__(self, service: TokenService, planner: Planner, draw: Draw, history: Chat, history_tokens: int) -> None:
        self.planner = planner
        self.right_of_way = RightOfWay()
        self.history = history
        self.history_tokens = history_tokens
        self._draw = draw
        self._rng = random.Random(history_tokens)  # noqa: S311
        self._reader = RequestReader(planner.fleet, service, right_of_way=self.right_of_way)
        self._ids = 0

    @classmethod
    async def of_size(cls, service: TokenService, size_tokens: int) -> Front:
        from bench.decision import loaded_planner
        from bench.text import Text

        draw = Text(size_tokens).draw
        reader = RequestReader(Fleet(), service)
        sample = await reader.read("sample", "chat", body(_chat(draw, 21)), {})
        history = _chat(draw, round(21 * size_tokens / sample.prompt_tokens) // 2 * 2 + 1)
        facts = await reader.read("history", "chat", body(history), {})
        tokens = array("I", facts.tokens or b"").tolist()
        planner = loaded_planner(random.Random(size_tokens), tokens, None)  # noqa: S311
        return cls(service, planner, draw, history, len(tokens))

    def chat(self) -> Chat:
        """One as long as the history, never seen before."""
        return _chat(self._draw, len(self.history))

    def next_turn(self) -> Chat:
        said = [{"role": role, "content": self._draw(_TURN_WORDS)} for role in ("assistant", "user")]
        return [*self.history, *said]

    async def plan(self, raw: bytes) -> RequestFacts:
        self._ids += 1
        facts = await self._reader.read(f"r{self._ids}", "chat", raw, {})
        self.right_of_way.take()
        self.planner.plan(facts, None, NOW_S, self._rng)
        return facts

    def end(self, facts: RequestFacts) -> None:
        """As a client leaves: time stands still here, so nothing may be left to be settled later."""
        self.planner.observe(facts.request_id, Outcome(kind=OutcomeKind.CANCELLED), NOW_S)


def _chat(draw: Draw, n_messages: int) -> Chat:
    return [{"role": ("user", "assistant")[i % 2], "content": draw(_MESSAGE_WORDS)} for i in range(n_messages)]
