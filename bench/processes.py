"""`python -m bench processes`: one gateway of 1, 2, 4 processes, with its whole decision on.

Requests per second and CPU time per request of all its processes together, on all cores the machine has, which load and
backends use too: with few cores the CPU time is what can be compared, not the rate. docs/processes.md has figures.

`--central` measures decisions alone: asked of one planner process over a Unix socket, and made by each process
(bench/central.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench import central
from bench.proxy import prompts
from bench.proxy.feed import Feed, wait_until_known
from bench.proxy.load import Load, Requests
from bench.proxy.measure import PATH, spread_us, warm
from bench.proxy.routers import Backends, Running, Spec, Workers, gateway_config, start

_N_WORKERS = 4
_CONCURRENCY = 64
_HERE = Path(__file__).resolve().parents[1]


class Figure(msgspec.Struct, frozen=True):
    """Medians over rounds. `latency_us`: p50 and p99. `rss_bytes`: of all processes; shared pages count for each."""

    processes: int
    requests_per_s: float
    cpu_us_per_request: float
    latency_us: tuple[float, float]
    failures: int
    rss_bytes: int


class _Round(msgspec.Struct, frozen=True):
    rate: float
    cpu_us: float
    latency_us: tuple[float, float]
    failures: int


def _spec(n: int, tokenizer: Path) -> Spec:
    def command(workers: Workers, port: int, other: int, folder: Path) -> list[str]:
        file = gateway_config(folder / f"{n}.yaml", workers, port, other, tokenizer)
        return [sys.executable, "-m", "gateway", "gateway", "--config", str(file), "--processes", str(n)]

    return Spec(f"{n} processes", command, {"PYTHONPATH": str(_HERE)}, decides=True)


async def _sample(router: Running, requests: Requests, duration_s: float) -> _Round | None:
    async with Load(router.ports, requests, _CONCURRENCY) as load:
        await load.run(duration_s, at_most=_CONCURRENCY)
        began_s = router.cpu_s()
        result = await load.run(duration_s)
        cpu_s = router.cpu_s() - began_s
    latency_us = spread_us(result.latencies_s)
    if not result.finished or latency_us is None:
        return None
    rate = result.finished / result.wall_s
    return _Round(rate, cpu_s / result.finished * 1e6, latency_us, result.failures.total())


async def _rounds(routers: dict[int, Running], requests: Requests, n_rounds: int, duration_s: float) -> list[Figure]:
    taken: dict[int, list[_Round]] = {n: [] for n in routers}
    await warm(list(routers.values()), [requests])
    for _ in range(n_rounds):
        for n, router in routers.items():
            found = await _sample(router, requests, duration_s)
            if found is not None:
                taken[n].append(found)
            router.forget_log()
    return [_figure(n, them, routers[n].rss_bytes()) for n, them in taken.items() if them]


def _figure(n: int, them: Sequence[_Round], rss_bytes: int) -> Figure:
    middle = statistics.median
    return Figure(
        processes=n,
        requests_per_s=middle(it.rate for it in them),
        cpu_us_per_request=middle(it.cpu_us for it in them),
        latency_us=(middle(it.latency_us[0] for it in them), middle(it.latency_us[1] for it in them)),
        failures=sum(it.failures for it in them),
        rss_bytes=rss_bytes,
    )


def measure(counts: Sequence[int], n_rounds: int, duration_s: float, n_bodies: int) -> list[Figure]:
    """Raises RuntimeError where a gateway does not serve."""
    import uvloop

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tokenizer = prompts.model_folder()
    bodies = prompts.bodies(n_small=n_bodies, n_large=1)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-processes-")))
        backends = Backends(_N_WORKERS, None)
        stack.callback(backends.close)
        feed = Feed(_N_WORKERS)
        stack.callback(feed.close)
        workers = Workers(backends.ports, feed.endpoints)
        routers: dict[int, Running] = {}
        for n in counts:
            routers[n] = start(_spec(n, tokenizer), workers, None, folder)
            stack.callback(routers[n].close)
        frames = prompts.kv_frames(prompts.token_ids(tokenizer, bodies.small), _N_WORKERS)
        feed.publish(frames, len(routers))
        for router in routers.values():
            wait_until_known(router.admin_port, [len(each) for each in frames])
        return uvloop.run(_rounds(routers, Requests(PATH, bodies.small), n_rounds, duration_s))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench processes", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--quick", action="store_true", help="one short round (figures are not comparable)")
    parser.add_argument("--processes", default="1,2,4", help="comma-separated (1,2,4)")
    parser.add_argument("--central", action="store_true", help="decisions alone: of one planner process, and of each")
    args = parser.parse_args(argv)
    counts = [int(each) for each in args.processes.split(",")]
    if args.central:
        central.report(counts, quick=args.quick, as_json=args.json)
        return 0
    n_rounds, duration_s, n_bodies = (1, 0.3, 32) if args.quick else (3, 2.0, prompts.N_SMALL)
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before it began"
    figures = measure(counts, n_rounds, duration_s, n_bodies)
    print(f"{load}; {_CONCURRENCY} connections, bodies of 2 KB, not streamed")
    print("processes  requests/s  CPU us each   p50 ms   p99 ms  failed  RSS MB")
    for it in figures:
        p50, p99 = (each / 1000 for each in it.latency_us)
        print(
            f"{it.processes:>9} {it.requests_per_s:>11.0f} {it.cpu_us_per_request:>12.0f} {p50:>8.1f} {p99:>8.1f} "
            f"{it.failures:>7} {it.rss_bytes / 1e6:>7.0f}"
        )
    if args.json:
        found = [msgspec.to_builtins(it) for it in figures]
        print(json.dumps({"bench": "processes", "setting": load, "figures": found}))
    return 0
