"""`warmroute demo`: a small fleet on this machine, routed round-robin and then by warmroute, and compared.

Four fake engines with the timing of an H200 and little KV cache, in front of them the real gateway in a process of its
own, and chat users with shared system prompts who wait for each answer before they go on. No GPU, no vLLM, no
downloads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

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
START_DEADLINE_S = 30.0
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


class Progress:
    """One line that fills up, on a terminal; nothing elsewhere."""

    def __init__(self, title: str, total: int, quiet: bool) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.shown = sys.stderr.isatty() and not quiet

    def step(self) -> None:
        self.done += 1
        if self.shown:
            filled = 30 * self.done // self.total
            sys.stderr.write(f"\r  {self.title:<12} [{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}")
            if self.done == self.total:
                sys.stderr.write("\n")
            sys.stderr.flush()


async def chat(http: aiohttp.ClientSession, url: str, system: str, seed: int, run: Run, progress: Progress) -> None:
    """One user's conversation."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.uniform(0, RAMP_S))
    messages: list[dict[str, str]] = [{"role": "system", "content": system}]
    for turn in range(TURNS):
        if turn:
            await asyncio.sleep(rng.uniform(*THINK_S))
        messages.append({"role": "user", "content": words(rng, USER_WORDS)})
        try:
            answer = await ask(http, url, messages, run)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            run.failed += 1
            answer = ""
        messages.append({"role": "assistant", "content": answer})
        progress.step()


async def ask(http: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], run: Run) -> str:
    body = {
        "model": "demo-model",
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.monotonic()
    first: float | None = None
    text: list[str] = []
    usage: dict[str, Any] = {}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            content = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if content and first is None:
                first = time.monotonic() - start
            text.append(content)
    if first is None:
        raise ValueError("an answer without content")
    run.ttfts_s.append(first)
    run.prompt_tokens += usage.get("prompt_tokens", 0)
    run.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return "".join(text)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def gateway(policy: str, workers: Sequence[str]) -> Any:
    """The real gateway as a process of its own; yields its URL."""
    port, admin = free_port(), free_port()
    args = ["--gateway-host", "127.0.0.1", "--gateway-port", str(port), "--gateway-admin-port", str(admin)]
    args += ["--scorer-policy", policy, "--logging-level", "warning"]
    # the engines tokenise in this very process, beside everything else
    args += ["--tokens-engine-budget-ms", "300"]
    for worker in workers:
        args += ["--worker", worker]
    env = {k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", "gateway", *args, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        await ready(url, process, len(workers))
        yield url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def ready(url: str, process: asyncio.subprocess.Process, n_workers: int) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                raise RuntimeError(f"the gateway ended with exit code {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/health") as response:
                    if response.status == 200 and (await response.json())["usable"] == n_workers:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway did not see its {n_workers} workers within {START_DEADLINE_S:.0f} s")


async def measure(name: str, policy: str, seed: int, quiet: bool) -> Run:
    """One policy, from cold engines on."""
    run = Run()
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for i in range(ENGINES):
            config = FakeVllmConfig(model="demo-model").with_engine(
                timing=timing.preset("h200-7b"), num_gpu_blocks=KV_BLOCKS, block_size=BLOCK_TOKENS, seed=i
            )
            urls.append((await stack.enter_async_context(FakeVllm(config))).url)
        url = await stack.enter_async_context(gateway(policy, urls))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60))
        )
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


def main(args: Sequence[str]) -> int:
    """Exit code 0, or 1 when a request failed."""
    parser = argparse.ArgumentParser(prog="warmroute demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(args)
    system_tokens = len(tokenizer.encode(words(random.Random(options.seed), SYSTEM_WORDS)))
    print(
        f"{ENGINES} engines (simulated H200, {KV_BLOCKS * BLOCK_TOKENS:,} tokens of KV cache each); "
        f"{SESSIONS} chats of {TURNS} turns over {SYSTEM_PROMPTS} system prompts of about {system_tokens:,} tokens.",
        flush=True,
    )
    runs = {name: asyncio.run(measure(name, policy, options.seed, options.json)) for name, policy in POLICIES}
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
    if options.json:
        print(json.dumps({name: run.figures() for name, run in runs.items()}))
    return 1 if any(run.failed for run in runs.values()) else 0
