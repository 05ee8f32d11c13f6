"""What running vLLM servers have counted of their traffic, from `/metrics`: since their start, or between two looks."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gateway.doctor.fetch import Fault, Http
from gateway.engine.metrics import Scrape, parse_metrics
from gateway.errors import UserError

_TIMEOUT_S = 10.0
_MOST = 1e18
"""No server has counted so many tokens."""
_PROMPT = "vllm:request_prompt_tokens"
_ANSWER = "vllm:request_generation_tokens"
_GATEWAY = "warmroute_build_info"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+")
"""How a worker is called unless the configuration names it."""


@dataclass(frozen=True)
class Lengths:
    """A histogram of token counts. `buckets`: upper bound -> how many are in that bucket alone."""

    buckets: dict[float, float]
    total_tokens: float
    requests: float

    def __add__(self, other: Lengths) -> Lengths:
        buckets = {upper: self.buckets.get(upper, 0) + n for upper, n in other.buckets.items()}
        return Lengths(
            self.buckets | buckets, self.total_tokens + other.total_tokens, self.requests + other.requests
        )  # fmt: skip

    def since(self, before: Lengths) -> Lengths:
        buckets = {upper: n - before.buckets.get(upper, 0) for upper, n in self.buckets.items()}
        return Lengths(buckets, self.total_tokens - before.total_tokens, self.requests - before.requests)

    @property
    def mean_tokens(self) -> float:
        return self.total_tokens / self.requests if self.requests else 0.0

    def rising(self) -> list[tuple[float, float]]:
        return sorted(self.buckets.items())


_NONE = Lengths({}, 0.0, 0.0)


@dataclass(frozen=True)
class Reading:
    """One server at one moment (`at_s`, Unix seconds)."""

    at_s: float
    prompts: Lengths
    answers: Lengths
    scrape: Scrape


@dataclass(frozen=True)
class Counted:
    """The traffic of all servers together. `hit_share`: prompt tokens found in a cache; None: nobody counts them.
    `kv_tokens`: of the smallest server; None: not every one says it. `how`: over what time it was counted.
    """

    requests_per_s: float
    prompts: Lengths
    answers: Lengths
    hit_share: float | None
    kv_tokens: int | None
    how: str


def read(text: str, at_s: float) -> Reading:
    """Raises ValueError for what is not a vLLM server's metrics."""
    found = {_PROMPT: _NONE, _ANSWER: _NONE}
    lines = "\n".join(
        line
        for line in text.splitlines()
        if line.startswith(("# TYPE " + _PROMPT, "# TYPE " + _ANSWER, _PROMPT, _ANSWER))
    )
    for family in text_string_to_metric_families(lines + "\n"):
        if family.name in found and family.type == "histogram":
            found[family.name] = _lengths([(it.name, dict(it.labels), it.value) for it in family.samples])
    if not found[_PROMPT].buckets or not found[_ANSWER].buckets:
        raise ValueError(f"no {_PROMPT} and {_ANSWER} in its /metrics; is it a vLLM server?")
    return Reading(at_s, found[_PROMPT], found[_ANSWER], parse_metrics(text, at_s))


def _lengths(samples: Sequence[tuple[str, dict[str, str], float]]) -> Lengths:
    """All engines and models of a server together. Raises ValueError for numbers that cannot be."""
    upto: dict[float, float] = defaultdict(float)
    total = requests = 0.0
    for name, labels, value in samples:
        upper = float(labels.get("le", "inf"))
        if not 0 <= value < _MOST or math.isnan(upper):
            raise ValueError(f"its {name} is no count: {value} up to {upper}")
        if name.endswith("_bucket"):
            upto[upper] += value
        elif name.endswith("_sum"):
            total += value
        elif name.endswith("_count"):
            requests += value
    buckets: dict[float, float] = {}
    below = 0.0
    for upper in sorted(upto):
        buckets[upper], below = upto[upper] - below, upto[upper]
    return Lengths(buckets, total, requests)


def counted(now: Sequence[Reading], before: Sequence[Reading] | None) -> Counted:
    """`before`: the same servers a while ago; None: since each was started. Raises UserError."""
    prompts = answers = _NONE
    rate = queries = hits = 0.0
    spans = []
    for i, it in enumerate(now):
        old = None if before is None else before[i]
        stats = it.scrape.stats
        if old is not None:
            span_s = it.at_s - old.at_s
            own = it.prompts.since(old.prompts), it.answers.since(old.answers)
            if own[0].requests < 0 or own[1].requests < 0 or stats.process_start_s != old.scrape.stats.process_start_s:
                raise UserError("--from-metrics: a server was restarted between the two readings; try again")
            if span_s <= 0:
                raise UserError("--from-metrics: the clock went back between the two readings; try again")
        elif stats.process_start_s is not None and 0 < stats.process_start_s < it.at_s:
            span_s, own = it.at_s - stats.process_start_s, (it.prompts, it.answers)
        else:
            raise UserError("--from-metrics: a server does not say when it was started; give --metrics-interval-s")
        prompts, answers = prompts + own[0], answers + own[1]
        rate += own[0].requests / span_s
        spans.append(span_s)
        was = None if old is None else old.scrape.stats
        queries += _grown(stats.prefix_queries_tokens, None if was is None else was.prefix_queries_tokens)
        hits += _grown(stats.prefix_hits_tokens, None if was is None else was.prefix_hits_tokens)
    if prompts.requests < 2 or answers.mean_tokens <= 0:
        raise UserError(
            "--from-metrics: the servers have finished fewer than two requests"
            + ("" if before is None else "; raise --metrics-interval-s, or leave it out to count since their start")
        )
    capacities = [it.scrape.stats.kv_capacity_tokens for it in now]
    known = [n for n in capacities if n is not None]
    how = (
        f"{prompts.requests:,.0f} requests in the last {max(spans):,.0f} s"
        if before is not None
        else f"{prompts.requests:,.0f} requests since the servers were started ({max(spans) / 3600:,.1f} h ago): idle "
        "hours count, so busy ones had more (--metrics-interval-s, --rate)"
    )
    share = min(1.0, hits / queries) if queries else None
    return Counted(rate, prompts, answers, share, min(known) if len(known) == len(capacities) else None, how)


def _grown(now: float | None, before: float | None) -> float:
    return 0.0 if now is None else max(0.0, now - (before or 0.0))


async def count(urls: Sequence[str], interval_s: float) -> Counted:
    """Look at all of them; with `interval_s`, look again so much later. Raises UserError."""
    async with aiohttp.ClientSession() as session:
        servers = await _servers(session, urls)
        before = await _read_all(session, servers)
        if not interval_s:
            return counted(before, None)
        await asyncio.sleep(interval_s)
        return counted(await _read_all(session, servers), before)


async def _servers(session: aiohttp.ClientSession, urls: Sequence[str]) -> list[str]:
    """The same, but in the place of a warmroute gateway, which counts no lengths, its workers that answer clients."""

    async def one(url: str) -> list[str]:
        if _GATEWAY not in (await _get(session, url, "/metrics")):
            return [url]
        try:
            workers = json.loads(await _get(session, url, "/health"))["workers"]
            names = [name for name, worker in workers.items() if worker["role"] != "prefill"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"--from-metrics {url}: /health of this gateway cannot be read; name its workers") from None
        named = [name for name in names if not _ADDRESS.fullmatch(name)]
        if named or not names:
            raise UserError(f"--from-metrics {url}: no addresses in this gateway's /health ({named}); name its workers")
        return [f"http://{name}" for name in names]

    found = await asyncio.gather(*map(one, urls))
    return list(dict.fromkeys(url for some in found for url in some))


async def _read_all(session: aiohttp.ClientSession, urls: Sequence[str]) -> list[Reading]:
    async def one(url: str) -> Reading:
        text = await _get(session, url, "/metrics")
        try:
            return read(text, time.time())
        except ValueError as exc:
            raise UserError(f"--from-metrics {url}: {exc}") from None

    return await asyncio.gather(*map(one, urls))


async def _get(session: aiohttp.ClientSession, url: str, path: str) -> str:
    answer = await Http(session, url, _TIMEOUT_S).get(path)
    if isinstance(answer, Fault):
        raise UserError(f"--from-metrics {url}: {answer.sentence}")
    if answer.status != 200:
        raise UserError(f"--from-metrics {url}: {path} answers with status {answer.status}")
    return answer.body.decode("utf-8", "replace")
