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
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from bench.decision import loaded_planner
from bench.text import Text, train
from gateway.request import RequestReader
from gateway.tokens import TokenService, TokenSettings
from scorer.planner import Planner
from scorer.types import Outcome, OutcomeKind, RequestFacts

SIZES_TOKENS = {"8k": 8_192, "32k": 32_768, "128k": 131_072}
_NOW_S = 1.0
_TURN_WORDS = 40
_MESSAGE_WORDS = 150
_LOAD_S = 120.0


def bench_front(rounds: int, tokenizer: str | None) -> tuple[dict[str, float], str]:
    """Figures, and what made the tokens. `tokenizer`: a model directory; None: one is trained here."""
    return asyncio.run(_bench(rounds, tokenizer))


async def _bench(rounds: int, tokenizer: str | None) -> tuple[dict[str, float], str]:
    with tempfile.TemporaryDirectory() as folder:
        path = tokenizer or str(train(Path(folder)))
        service = TokenService(TokenSettings(check_rate=0.0, local_budget_s=60.0, cache_bytes=256 << 20))
        await service.start()
        try:
            service.set_model("m", path)
            async with asyncio.timeout(_LOAD_S):
                while not (local := service.status()["m"]["local"]).get("encoder") or _pending(local):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            used = f"{tokenizer or 'a BPE trained here'}, by {local['encoder']}, pieces: {local['pieces']}"
            figures: dict[str, float] = {}
            for name, size in SIZES_TOKENS.items():
                fewer = rounds if size < 100_000 else max(3, rounds // 3)
                for key, value in (await _Run(service, size).figures(fewer)).items():
                    figures[f"body_to_plan_{name}_{key}"] = value
            return figures, used
        finally:
            await service.close()


def _pending(local: dict[str, object]) -> bool:
    return local["encoder"] == "tokenizers" and local["why_not_fastokens"] is None


class _Run:
    """Chats of about `size` tokens."""

    def __init__(self, service: TokenService, size: int) -> None:
        self._service = service
        self._size = size
        self._text = Text(size)
        self._ids = 0
        self._rng = random.Random(size)

    async def figures(self, rounds: int) -> dict[str, float]:
        history = await self._chat()
        facts, _ = await self._read(None, history)
        tokens = array("I", facts.tokens or b"")
        planner = loaded_planner(self._rng, tokens.tolist(), None)
        turns = [self._next_turn(history) for _ in range(rounds)]
        unseen = [await self._chat() for _ in range(rounds)]
        out = {"tokens": float(len(tokens))}
        for name, chats in (("turn", turns), ("unseen", unseen)):
            times = [(await self._read(planner, chat))[1] for chat in chats]
            out[f"{name}_ms"] = statistics.median(times) * 1e3
        return out

    async def _chat(self) -> list[dict[str, str]]:
        """Messages of about `size` tokens, none of them seen before."""
        per_word = 2.0
        n_messages = int(self._size / per_word / _MESSAGE_WORDS) | 1
        return list(self._messages(n_messages))

    def _messages(self, n: int) -> Iterator[dict[str, str]]:
        for i in range(n):
            yield {"role": ("user", "assistant")[i % 2], "content": self._text.draw(_MESSAGE_WORDS)}

    def _next_turn(self, history: list[dict[str, str]]) -> list[dict[str, str]]:
        said = [{"role": role, "content": self._text.draw(_TURN_WORDS)} for role in ("assistant", "user")]
        return [*history, *said]

    async def _read(self, planner: Planner | None, chat: list[dict[str, str]]) -> tuple[RequestFacts, float]:
        """The facts of a chat and, with a planner, the CPU seconds from its body to its plan."""
        self._ids += 1
        body = json.dumps({"model": "m", "messages": chat, "max_tokens": 200, "stream": True}).encode()
        fleet = loaded_planner(self._rng, [], None).fleet if planner is None else planner.fleet
        reader = RequestReader(fleet, self._service)
        began_s = time.process_time()
        facts = await reader.read(f"r{self._ids}", "chat", body, {})
        if planner is not None:
            planner.plan(facts, None, _NOW_S, self._rng)
        took_s = time.process_time() - began_s
        if facts.tokens is None:
            raise RuntimeError(f"the prompt was not tokenised: {facts.token_source}")
        if planner is not None:
            planner.observe(facts.request_id, Outcome(kind=OutcomeKind.END), _NOW_S)
        return facts, took_s
