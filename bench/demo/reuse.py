"""Cache reuse: routed round-robin, then by warmroute, and compared.

Four fake engines with the timing of an H200 and little KV cache, in front of them the gateway, and chat users with
shared system prompts who wait for each answer before they go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.demo.client import FAILURES, MODEL, ask, session
from bench.demo.gateway import gateway
from bench.demo.progress import Progress
from bench.engine import timing, tokenizer
from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm

ENGINES = 4
KV_BLOCKS = 4000
BLOCK_TOKENS = 16
SYSTEM_PROMPTS = 16
SYSTEM_WORDS = 4000
SESSIONS = 48
TURNS = 5
USER_WORDS = 80
ANSWER_TOKENS = 24
THINK_S = (0.4, 1.6)
RAMP_S = 5.0
POLICIES = (("round_robin", "round-robin"), ("warmroute", "warmroute"))
TEXT = (
    "the cache holds what was said before and a router that knows where finds the answer sooner than one that asks "
    "anybody while long prompts wait in line for their turn to be read by a busy machine"
)
WORDS = TEXT.split()


@dataclass
class Run:
    """What the users saw under one policy."""

    ttfts_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0
    estimated: int = 0
    """Decisions made without token ids: the machine was too busy to tokenise in time."""

    def figures(self) -> dict[str, float]:
        cuts = statistics.quantiles(self.ttfts_s, n=20) if len(self.ttfts_s) > 1 else [0.0] * 19
        return {
            "ttft_p50_ms": round(cuts[9] * 1e3, 1),
            "ttft_p95_ms": round(cuts[18] * 1e3, 1),
            "cached_share": round(self.cached_tokens / self.prompt_tokens, 3) if self.prompt_tokens else 0.0,
            "requests": len(self.ttfts_s),
            "failed": self.failed,
        }


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


async def chat(http: aiohttp.ClientSession, url: str, system: str, seed: int, run: Run, progress: Progress) -> None:
    """One user's conversation."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.uniform(0, RAMP_S))
    messages: list[dict[str, str]] = [{"role": "system", "content": system}]
    for turn in range(TURNS):
        if turn:
            await asyncio.sleep(rng.uniform(*THINK_S))
        messages.append({"role": "user", "content": words(rng, USER_WORDS)})
        text = ""
        try:
            answer = await ask(http, f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": ANSWER_TOKENS})
            text = answer.text
            run.ttfts_s.append(answer.ttft_s)
            run.prompt_tokens += answer.prompt_tokens
            run.cached_tokens += answer.cached_tokens
        except FAILURES:
            run.failed += 1
        messages.append({"role": "assistant", "content": text})
        progress.step()


async def measure(name: str, policy: str, seed: int, quiet: bool) -> Run:
    """One policy, from cold engines on."""
    run = Run()
    async with contextlib.AsyncExitStack() as stack:
        # The engines tokenise in this very process, beside everything else.
        args = ["--scorer-policy", policy, "--tokens-engine-budget-ms", "300"]
        for i in range(ENGINES):
            config = FakeVllmConfig(model=MODEL).with_engine(
                timing=timing.preset("h200-7b"), num_gpu_blocks=KV_BLOCKS, block_size=BLOCK_TOKENS, seed=i
            )
            args += ["--worker", (await stack.enter_async_context(FakeVllm(config))).url]
        url = await stack.enter_async_context(gateway(args, ENGINES))
        http = await stack.enter_async_context(session())
        rng = random.Random(seed)
        systems = [f"Tenant {i}. {words(rng, SYSTEM_WORDS)}" for i in range(SYSTEM_PROMPTS)]
        progress = Progress(name, SESSIONS * TURNS, quiet)
        users = [chat(http, url, systems[i % SYSTEM_PROMPTS], seed + i, run, progress) for i in range(SESSIONS)]
        await asyncio.gather(*users)
        async with http.get(f"{url}/metrics") as response:
            run.estimated = estimated(await response.text())
    return run


def estimated(metrics: str) -> int:
    """Decisions whose token source was an estimate, from a gateway's `/metrics`."""
    found = re.findall(r'^warmroute_decisions_total\{[^}]*tokens="estimate"[^}]*\} (\S+)', metrics, re.MULTILINE)
    return int(sum(map(float, found)))


def table(runs: dict[str, Run]) -> str:
    lines = [f"  {'':<12} {'TTFT p50':>10} {'TTFT p95':>10} {'cached':>8} {'requests':>9}"]
    for name, run in runs.items():
        f = run.figures()
        lines.append(
            f"  {name:<12} {f['ttft_p50_ms']:>7.0f} ms {f['ttft_p95_ms']:>7.0f} ms {f['cached_share']:>7.0%} "
            f"{f['requests']:>9.0f}" + (f"  ({run.failed} failed)" if run.failed else "")
        )
    return "\n".join(lines)


def compare(seed: int, *, quiet: bool) -> tuple[dict[str, Any], int]:
    """The figures by policy, and how many requests failed."""
    system_tokens = len(tokenizer.encode(words(random.Random(seed), SYSTEM_WORDS)))
    print(
        f"{ENGINES} engines (simulated H200, {KV_BLOCKS * BLOCK_TOKENS:,} tokens of KV cache each); "
        f"{SESSIONS} chats of {TURNS} turns over {SYSTEM_PROMPTS} system prompts of about {system_tokens:,} tokens.",
        flush=True,
    )
    runs = {name: asyncio.run(measure(name, policy, seed, quiet)) for name, policy in POLICIES}
    print("\n" + table(runs))
    for name, run in runs.items():
        if run.estimated > len(run.ttfts_s) // 20:
            print(
                f"\n  This machine was busy: under {name}, {run.estimated} of {len(run.ttfts_s)} prompts could not be "
                "tokenised in time,\n  so they were placed by load alone. The figures say little; run it again."
            )
    print(
        "\nNext: start your own engines with `vllm serve ... --kv-events-config ...` and run\n"
        "  warmroute gateway --worker http://HOST:PORT --worker ...\n"
        "then look at http://127.0.0.1:8001/debug/cache, and see the README for what to switch on."
    )
    return {name: run.figures() for name, run in runs.items()}, sum(run.failed for run in runs.values())
