"""Where prompts are computed: one prefill and three decode engines under four policies, and compared.

Chat users with short prompts and coding agents with long ones share the fleet. Computed where the answers run, a long
prompt stops these; computed elsewhere, a short one waits behind long ones and for the transfer of its KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.demo.client import FAILURES, MODEL, Answer, ask, session
from bench.demo.gateway import gateway
from bench.demo.progress import Progress
from bench.engine import timing, tokenizer
from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm

DECODERS = 3
BLOCK_TOKENS = 64
KV_BLOCKS = 8000
PULL_PER_BLOCK_S = 157e-6
"""As measured on H200 (36 layers, 4.35 us for each descriptor)."""
POLICIES = (
    ("local", "local"),
    ("always-remote", "always-remote"),
    ("threshold:1024", "threshold:1024"),
    ("warmroute", "cost"),
)
"""(as it is shown, `pd.policy`)"""
START_S = 7.0
"""Users come within so many seconds."""
AS_GOOD = 0.01
"""Shares that differ by less are no difference."""
_WATCH_S = 0.05
_BUSY_S = 0.02


@dataclass(frozen=True)
class Load:
    """Users of one kind. Ranges are drawn from evenly; the objectives are sent with each request."""

    users: int
    turns: int
    first_tokens: tuple[int, int]
    turn_tokens: tuple[int, int]
    answer_tokens: int
    think_s: tuple[float, float]
    slo_ttft_s: float
    slo_tpot_s: float

    @property
    def headers(self) -> dict[str, str]:
        return {
            "x-slo-ttft-ms": f"{self.slo_ttft_s * 1000:g}",
            "x-slo-tpot-ms": f"{self.slo_tpot_s * 1000:g}",
        }


LOADS = {
    "chat": Load(48, 3, (300, 1000), (40, 120), 100, (0.3, 1.0), slo_ttft_s=0.3, slo_tpot_s=0.015),
    "code": Load(14, 3, (8000, 14_000), (400, 900), 60, (0.3, 1.0), slo_ttft_s=1.2, slo_tpot_s=0.015),
}


@dataclass
class Run:
    """What the users saw under one policy."""

    answers: list[tuple[Load, Answer]] = field(default_factory=list)
    failed: int = 0
    late_s: list[float] = field(default_factory=list)
    """By how much this process was late at what it had set itself: a busy machine, not a busy engine."""

    @property
    def requests(self) -> int:
        return len(self.answers) + self.failed

    @property
    def disturbed(self) -> bool:
        """Whether this machine had no time for it, so that the figures say little."""
        return len(self.late_s) > 1 and statistics.quantiles(self.late_s, n=20)[18] > _BUSY_S

    def missed(self) -> tuple[int, int]:
        """Requests whose first token was late, and those whose answer was slow though it began in time."""
        late = sum(answer.ttft_s > load.slo_ttft_s for load, answer in self.answers)
        broken = sum(a.ttft_s > load.slo_ttft_s or a.tpot_s > load.slo_tpot_s for load, a in self.answers)
        return late, broken - late

    def figures(self) -> dict[str, Any]:
        """`slo_share`: of all requests, those whose first token and pace both met their objectives."""
        ttfts_s = [answer.ttft_s for _, answer in self.answers]
        gaps_s = [gap_s for _, answer in self.answers for gap_s in answer.gaps_s]
        return {
            "slo_share": round(1 - (sum(self.missed()) + self.failed) / max(1, self.requests), 3),
            "ttft_p50_ms": _percentile_ms(ttfts_s, 50),
            "ttft_p95_ms": _percentile_ms(ttfts_s, 95),
            "itl_p99_ms": _percentile_ms(gaps_s, 99),
            "requests": len(self.answers),
            "failed": self.failed,
            "disturbed": self.disturbed,
        }


def _percentile_ms(values_s: list[float], percent: int) -> float:
    return round(statistics.quantiles(values_s, n=100)[percent - 1] * 1e3, 1) if len(values_s) > 1 else 0.0


async def user(http: aiohttp.ClientSession, url: str, load: Load, seed: str, run: Run, progress: Progress) -> None:
    """One user's turns. Prompts are token ids, so that nobody's tokenising is measured."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.uniform(0, START_S))
    prompt = _tokens(rng, load.first_tokens)
    for turn in range(load.turns):
        if turn:
            await asyncio.sleep(rng.uniform(*load.think_s))
            prompt += _tokens(rng, load.turn_tokens)
        try:
            fields = {"prompt": prompt, "max_tokens": load.answer_tokens}
            answer = await ask(http, f"{url}/v1/completions", fields, load.headers)
            run.answers.append((load, answer))
            prompt += tokenizer.encode(answer.text)
        except FAILURES:
            run.failed += 1
        progress.step()


def _tokens(rng: random.Random, n: tuple[int, int]) -> list[int]:
    return rng.choices(range(*tokenizer.GENERATED_IDS), k=rng.randint(*n))


async def measure(name: str, policy: str, seed: int, quiet: bool) -> Run:
    """One policy, from cold engines on."""
    run = Run()
    async with contextlib.AsyncExitStack() as stack:
        args = ["--pd-policy", policy]
        for i in range(1 + DECODERS):
            config = FakeVllmConfig(
                model=MODEL,
                kv_connector=True,
                kv_role="kv_consumer" if i else "kv_producer",
                kv_pull_per_block_s=PULL_PER_BLOCK_S,
            ).with_engine(timing=timing.preset("h200-7b"), num_gpu_blocks=KV_BLOCKS, block_size=BLOCK_TOKENS, seed=i)
            server = await stack.enter_async_context(FakeVllm(config))
            args += ["--decode" if i else "--prefill", server.url]
        url = await stack.enter_async_context(gateway(args, 1 + DECODERS))
        http = await stack.enter_async_context(session())
        progress = Progress(name, sum(load.users * load.turns for load in LOADS.values()), quiet)
        users = [
            user(http, url, load, f"{kind} {i} {seed}", run, progress)
            for kind, load in LOADS.items()
            for i in range(load.users)
        ]
        watch = asyncio.create_task(_watch(run))
        await asyncio.gather(*users)
        watch.cancel()
    return run


async def _watch(run: Run) -> None:
    while True:
        due_s = time.monotonic() + _WATCH_S
        await asyncio.sleep(_WATCH_S)
        run.late_s.append(time.monotonic() - due_s)


def table(runs: dict[str, Run]) -> str:
    lines = [f"  {'':<14} {'objectives met':>15} {'TTFT p50':>10} {'TTFT p95':>10} {'ITL p99':>10} {'requests':>9}"]
    for name, run in runs.items():
        f = run.figures()
        lines.append(
            f"  {name:<14} {f['slo_share']:>15.1%} {f['ttft_p50_ms']:>7.0f} ms {f['ttft_p95_ms']:>7.0f} ms "
            f"{f['itl_p99_ms']:>7.0f} ms {f['requests']:>9.0f}" + (f"  ({run.failed} failed)" if run.failed else "")
        )
    return "\n".join(lines)


def verdict(runs: dict[str, Run]) -> str:
    """Which was best, and what the others lost by."""
    shares = {name: run.figures()["slo_share"] for name, run in runs.items()}
    best = max(shares.values())
    winners = [name for name in runs if shares[name] > best - AS_GOOD]
    if any(run.disturbed for run in runs.values()):
        busy = " and ".join(name for name, run in runs.items() if run.disturbed)
        return f"This machine was busy under {busy}: these figures say little. Run it again."
    lines = [
        f"Best here: {winners[0]}, {best:.1%} of the requests within their objectives."
        if len(winners) == 1
        else f"Equally good here: {' and '.join(winners)}, about {best:.1%} of the requests within their objectives."
    ]
    for name, run in runs.items():
        if name not in winners:
            lines.append(f"  {name}: {_losses(run)}.")
    return "\n".join(lines)


def _losses(run: Run) -> str:
    late, slow = run.missed()
    causes = (
        (late, "waited too long for their first token, behind other prompts"),
        (slow, "got a slow answer, stopped by prompts computed beside it"),
        (run.failed, "failed"),
    )
    return "; ".join(f"{n / max(1, run.requests):.1%} {cause}" for n, cause in causes if n)


def compare(seed: int, *, quiet: bool) -> tuple[dict[str, Any], int]:
    """The figures by policy, and how many requests failed."""
    print(f"1 prefill and {DECODERS} decode engines (simulated H200) under four policies, about 12 s each:")
    for kind, load in LOADS.items():
        print(
            f"  {kind}: {load.users} users, {load.turns} turns, {load.first_tokens[0]:,} to {load.first_tokens[1]:,} "
            f"tokens first, then {load.turn_tokens[0]} to {load.turn_tokens[1]} more; objectives: first token within "
            f"{load.slo_ttft_s * 1000:.0f} ms, {load.slo_tpot_s * 1000:.0f} ms a token"
        )
    sys.stdout.flush()
    runs = {name: asyncio.run(measure(name, policy, seed, quiet)) for name, policy in POLICIES}
    print("\n" + table(runs) + "\n\n" + verdict(runs))
    print(
        "\nNext: warmroute gateway --pd-policy cost --prefill http://HOST:PORT --decode http://HOST:PORT ...\n"
        "with engines that hand KV over (see docs/disaggregation.md)."
    )
    return {name: run.figures() for name, run in runs.items()}, sum(run.failed for run in runs.values())
