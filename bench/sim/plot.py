"""`python -m bench trace plot`: figures of simulated fleets, and the numbers under them as JSON.

ttft: how many requests have their first token when, for each arm. goodput: requests a second that meet their
objectives, by the rate that is asked for. decisions: where the planner computes a prompt, by its length and by how many
answers run on the decode worker.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import plots
from bench.sim.arms import arm, arms
from bench.sim.catalog import WORKLOADS, Options, cell
from bench.sim.decisions import DecisionMap, decision_map
from bench.sim.fleet import FleetSpec, servers
from bench.sim.hardware import HARDWARE
from bench.sim.report import summarise
from bench.sim.transfers import NVLINK
from bench.sim.world import Run, World

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ARMS = ("warmroute", "local", "always-remote", "threshold-1024")
RATES = {"mixed": (3.0, 6.0, 9.0, 12.0, 15.0), "chat": (1.0, 2.0, 3.0, 4.0), "code": (0.1, 0.15, 0.2, 0.25)}
"""Of the workloads whose requests have objectives and a rate."""
UNCACHED_TOKENS = tuple(round(64 * 2 ** (i / 4)) for i in range(4 * 9 + 1))
STREAMS = tuple(range(33))
WAITING_TOKENS = (0, 8000, 32_000)
"""In line at the prefill worker."""
_SHADES = ("#c6dbef", "#6baed6", "#2171b5")
_POINTS = 200

Data = dict[str, Any]


class Plotter:
    """What is plotted of what, and where to."""

    def __init__(self, out: Path, workload: str, arms: Sequence[str], options: Options, told: Callable[[str], None]):
        self._out = out
        self._workload = workload
        self._arms = arms
        self._options = options
        self._told = told

    def ttft(self) -> Data:
        """`{arm: [[seconds, share of all requests], ..]}`"""
        found = {name: cdf([record.ttft_s for record in self._run(name, self._options).records]) for name in self._arms}
        with plots.drawn(
            self._out / "ttft.png", title=f"{self._workload}: first tokens", x="seconds", y="share of requests"
        ) as axes:
            _lines(axes, found)
            axes.set_xscale("log")
            axes.set_ylim(0, 1)
        return dict(found)

    def goodput(self, rates: Sequence[float]) -> Data:
        """`{arm: [[rate, requests a second within their objectives], ..]}`"""
        found: dict[str, list[list[float]]] = {}
        for name in self._arms:
            found[name] = []
            for rate in rates:
                built = cell(self._workload, replace(self._options, rate=rate))
                run = self._run(name, replace(self._options, rate=rate))
                figures = summarise(run, slo_ttft_s=built.slo_ttft_s, slo_tpot_s=built.slo_tpot_s)
                found[name].append([rate, figures["goodput_per_s"]])
        with plots.drawn(
            self._out / "goodput.png",
            title=f"{self._workload}: goodput",
            x="asked for, 1/s",
            y="requests within their objectives, 1/s",
        ) as axes:
            _lines(axes, found, marker="o")
            axes.set_ylim(bottom=0)
        return dict(found)

    def decisions(self, hardware: str, slo_ttft_s: float | None, slo_tpot_s: float | None) -> Data:
        """`{tokens in line at the prefill worker: DecisionMap}`"""
        spec = FleetSpec(servers(hardware, prefill=1, decode=1), link=NVLINK)
        maps = {}
        for waiting in WAITING_TOKENS:
            self._told(f"decisions: {hardware}, {waiting} tokens in line")
            maps[waiting] = decision_map(
                spec,
                UNCACHED_TOKENS,
                STREAMS,
                waiting_tokens=waiting,
                slo_ttft_s=slo_ttft_s,
                slo_tpot_s=slo_tpot_s,
            )
        with plots.drawn(
            self._out / "decisions.png",
            title=f"{hardware}: where the planner lets the prefill worker compute the prompt",
            x="prompt tokens, none cached",
            y="answers running on the decode worker",
        ) as axes:
            for color, (waiting, each) in zip(_SHADES, maps.items(), strict=True):
                _region(
                    axes, each, color, f"even with {waiting:,} tokens in line there" if waiting else "if it is idle"
                )
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.legend(loc="upper left")
        return {str(waiting): asdict(each) for waiting, each in maps.items()}

    def _run(self, name: str, options: Options) -> Run:
        rate = "" if options.rate is None else f", {options.rate:g}/s"
        self._told(f"{self._workload}: {name}{rate}")
        built = cell(self._workload, options)
        return World(built.spec, arm(name), built.workload, seed=options.seed).run()


def cdf(values: Sequence[float]) -> list[list[float]]:
    """At most `_POINTS` + 1 points (value, share of all values that are no larger), those that never end left out."""
    ordered = sorted(values)
    n = len(ordered)
    at = sorted({round(i * (n - 1) / _POINTS) for i in range(_POINTS + 1)}) if n else []
    return [[ordered[i], (i + 1) / n] for i in at if ordered[i] < math.inf]


def _lines(axes: Axes, found: Data, marker: str | None = None) -> None:
    """A line of points for each arm."""
    for name, points in found.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.grid(alpha=0.3)
    axes.legend()


def _region(axes: Axes, it: DecisionMap, color: str, label: str) -> None:
    """Filled where remote."""
    filled = [[1.0 if remote else math.nan for remote in row] for row in it.remote]
    axes.pcolormesh(it.uncached_tokens, it.streams, filled, shading="nearest", cmap=plots.one_color(color))
    axes.plot([], [], color=color, linewidth=6, label=label)  # Stands for it in the legend.


PLOTS = ("ttft", "goodput", "decisions")


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 when something was wrong with the call or matplotlib is missing."""
    parser = argparse.ArgumentParser(prog="python -m bench trace plot", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the figures go")
    parser.add_argument("--only", metavar="NAME,..", default=",".join(PLOTS), help=f"these: {', '.join(PLOTS)}")
    parser.add_argument("--workload", default="mixed", metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--arm", action="append", metavar="NAME", help=f"may be repeated: {', '.join(sorted(arms()))}")
    parser.add_argument("--rate", type=float, help="of the ttft figure, requests or sessions a second")
    parser.add_argument("--rates", metavar="N,..", help="of the goodput figure; else the workload's own")
    parser.add_argument("--duration-s", type=float)
    parser.add_argument("--trace", type=Path, help="a recorded trace, for workloads that take one")
    parser.add_argument("--requests", type=int, help="no more than so many of a trace")
    parser.add_argument("--hardware", default="h200-7b", metavar="NAME", help=", ".join(HARDWARE))
    parser.add_argument("--slo-ttft-s", type=float, help="objective of the prompts of the decisions figure")
    parser.add_argument("--slo-tpot-s", type=float, help="and of the answers there")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(args)
    try:
        wanted = asked.only.split(",")
        if unknown := [name for name in wanted if name not in PLOTS]:
            raise ValueError(f"no figure {unknown[0]!r}; there is: {', '.join(PLOTS)}")
        plots.check()
        options = Options(
            seed=asked.seed,
            rate=asked.rate,
            duration_s=asked.duration_s,
            requests=asked.requests,
            trace=asked.trace,
        )
        asked.out.mkdir(parents=True, exist_ok=True)
        plotter = Plotter(asked.out, asked.workload, asked.arm or ARMS, options, _tell)
        draw: dict[str, Callable[[], Data]] = {
            "ttft": plotter.ttft,
            "goodput": lambda: plotter.goodput(_rates(asked.rates, asked.workload)),
            "decisions": lambda: plotter.decisions(asked.hardware, asked.slo_ttft_s, asked.slo_tpot_s),
        }
        for name in wanted:
            (asked.out / f"{name}.json").write_text(json.dumps(draw[name]()) + "\n")
            print(asked.out / f"{name}.png", flush=True)
    except (ValueError, OSError, plots.NoPlots) as exc:
        print(f"bench trace plot: error: {exc}", file=sys.stderr)
        return 2
    return 0


def _rates(text: str | None, workload: str) -> Sequence[float]:
    """Raises ValueError."""
    if workload not in RATES:
        raise ValueError(f"{workload} has no goodput by rate (--only leaves it out); there is: {', '.join(RATES)}")
    if text is None:
        return RATES[workload]
    rates = [float(part) for part in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise ValueError("--rates must be above 0")
    return rates


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
