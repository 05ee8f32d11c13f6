"""`python -m bench trace run|plot|...`: fleets in simulated time, decided for by the planner and by others."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.sim.arms import arm, arms
from bench.sim.catalog import WORKLOADS, Options, cell
from bench.sim.report import Figures, summarise
from bench.sim.world import World

# name -> (module with `main(args) -> int`, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("bench.trace", "one workload under one or more arms"),
    "plot": ("bench.sim.plot", "figures: times to first token, goodput by rate, where prompts are computed"),
    "validate": ("bench.sim.validate", "the simulator against what was measured on H200"),
    "targets": ("bench.sim.targets", "the goals, measured and judged"),
}


def run(args: Sequence[str]) -> int:
    """Exit code 0, or 1 when a request failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench trace run",
        description=__doc__,
        epilog="workloads: "
        + "; ".join(f"{name}: {(build.__doc__ or '').split('.')[0]}" for name, build in WORKLOADS.items()),
    )
    parser.add_argument("--workload", required=True, metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--arm", action="append", metavar="NAME", help=f"may be repeated: {', '.join(sorted(arms()))}")
    parser.add_argument("--trace", type=Path, help="a recorded trace (Mooncake JSON lines, Azure CSV)")
    parser.add_argument("--rate", type=float, help="requests or sessions a second")
    parser.add_argument("--duration-s", type=float)
    parser.add_argument("--requests", type=int, help="no more than so many of a trace")
    parser.add_argument("--speed", type=float, default=1.0, help="play a trace so many times as fast")
    parser.add_argument("--both", type=int, help="servers that take whole requests")
    parser.add_argument("--prefill", type=int, help="prefill servers")
    parser.add_argument("--decode", type=int, help="decode servers")
    parser.add_argument("--event-delay-s", type=float)
    parser.add_argument("--nixl", action="store_true", help="servers that decode hand prompts over to each other too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    asked = parser.parse_args(args)
    options = Options(
        seed=asked.seed,
        rate=asked.rate,
        duration_s=asked.duration_s,
        requests=asked.requests,
        speed=asked.speed,
        trace=asked.trace,
        both=asked.both,
        prefill=asked.prefill,
        decode=asked.decode,
    )
    out: list[Figures] = []
    try:
        for name in asked.arm or ["warmroute"]:
            out.append(_one(asked.workload, name, options, asked.event_delay_s, nixl=asked.nixl))
            print(_line(out[-1]), flush=True)
    except (ValueError, OSError) as exc:
        print(f"bench trace run: error: {exc}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps({"workload": asked.workload, "seed": asked.seed, "arms": out}))
    return 1 if any(figures["success_rate"] < 1 for figures in out) else 0


def _one(workload: str, name: str, options: Options, event_delay_s: float | None, *, nixl: bool) -> Figures:
    cpu_s = time.process_time()
    built = cell(workload, options)
    spec = built.spec if event_delay_s is None else replace(built.spec, event_delay_s=event_delay_s)
    spec = replace(spec, nixl=nixl)
    done = World(spec, arm(name), built.workload, seed=options.seed).run()
    figures = summarise(done, slo_ttft_s=built.slo_ttft_s, slo_tpot_s=built.slo_tpot_s)
    return {**figures, "arm": name, "cpu_s": round(time.process_time() - cpu_s, 2)}


def _line(it: dict[str, Any]) -> str:
    return (
        f"{it['arm']:<24} {it['requests']:>6} requests  TTFT mean {it['ttft_mean_ms']:>8.0f}"
        f"  p50 {it['ttft_p50_ms']:>7.0f}"
        f"  p90 {it['ttft_p90_ms']:>8.0f}  p99 {it['ttft_p99_ms']:>8.0f} ms  TPOT {it['tpot_mean_ms']:>5.1f}"
        f"  ITL p99 {it['itl_p99_ms']:>6.1f} ms  hit {it['hit_share']:>4.0%}  remote {it['remote_share']:>4.0%}"
        f"  SLO {it['slo_share']:>6.1%}  out {it['output_tokens_per_s']:>6.0f}/s  cpu {it['cpu_s']:>5.1f} s"
    )


def main(args: Sequence[str]) -> int:
    if not args or args[0] not in COMMANDS:
        asked_help = bool(args) and args[0] in ("-h", "--help")
        print("usage: python -m bench trace COMMAND ...", file=sys.stdout if asked_help else sys.stderr)
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:<10} {summary}", file=sys.stdout if asked_help else sys.stderr)
        return 0 if asked_help else 2
    if args[0] == "run":
        return run(args[1:])
    command: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[args[0]][0]).main
    try:
        return command(args[1:])
    except OSError as exc:
        print(f"bench trace {args[0]}: error: {exc.filename or 'system'}: {exc.strerror or exc}", file=sys.stderr)
        return 2
