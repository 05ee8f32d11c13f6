"""What a client sees of one streamed answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

MODEL = "demo-model"
FAILURES = (aiohttp.ClientError, TimeoutError, ValueError)
"""What `ask` raises when there is no whole answer."""


@dataclass
class Answer:
    """`gaps_s` are the times between pieces of text, about a token each."""

    ttft_s: float
    gaps_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return sum(self.gaps_s) / max(1, self.output_tokens - 1)


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60))


async def ask(
    http: aiohttp.ClientSession, url: str, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Answer:
    """A completion or chat completion of `fields` (model and streaming are added). Raises `FAILURES`."""
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **fields}
    start_s = time.monotonic()
    times_s: list[float] = []
    text: list[str] = []
    usage: dict[str, Any] = {}
    async with http.post(url, json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError("an answer that was broken off")
            usage = event.get("usage") or usage
            content = "".join(map(_content, event["choices"]))
            if content:
                times_s.append(time.monotonic())
                text.append(content)
    if not times_s:
        raise ValueError("an answer without content")
    return Answer(
        ttft_s=times_s[0] - start_s,
        gaps_s=[after - before for before, after in pairwise(times_s)],
        text="".join(text),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        output_tokens=usage.get("completion_tokens", len(times_s)),
    )


def _content(choice: Mapping[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
