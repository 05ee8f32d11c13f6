"""Figures as text, as one JSON line, and as the page docs/proxy-benchmark.md."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.proxy.measure import Figure
from bench.proxy.routers import DIRECT, OURS

ROUND_ROBIN = "vllm-router round_robin"
CACHE_AWARE = "vllm-router cache_aware"
TABLE_HEADS = (
    "router", "CPU us", "least to most", "ours / it", "per s", "busy", "p50 us", "p99 us", "added p50", "added p99",
    "success", "accepted", "real ids", "hits",
)  # fmt: skip
MEMORY_HEADS = ("router", "version", "RSS MiB")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found. `decision_us` by kind of body; `rss_bytes`, `versions` by router; `missing` says why."""

    figures: list[Figure]
    decision_us: Mapping[str, float]
    rss_bytes: Mapping[str, int]
    versions: Mapping[str, str]
    missing: list[str]
    setting: list[str]
    """What the figures depend on: cores, rounds, durations."""

    def by(self, router: str, case: str) -> Figure | None:
        return next((f for f in self.figures if (f.router, f.case) == (router, case)), None)

    def cost_us(self, router: str, case: str) -> float | None:
        found = self.by(router, case)
        return None if found is None else found.cpu_us

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(f.case for f in self.figures))


def ratio(over: float | None, under: float | None) -> float | None:
    """None where either is not known."""
    return over / under if over is not None and under else None


def medians(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, over all that have it."""
    names = dict.fromkeys(name for each in measured for name in each)
    return {name: statistics.median(each[name] for each in measured if name in each) for name in names}


# ---- targets ---------------------------------------------------------------------------------------------------------


def targets(run: Run, concurrency: int) -> list[dict[str, Any]]:
    """Judged at that many requests at a time. `measured` and `met` are None where a side was not measured, or where one
    failed requests.
    """
    small, large = f"2kb_c{concurrency}", f"64kb_c{concurrency}"
    allowed = run.cost_us(ROUND_ROBIN, small)
    decision = run.decision_us.get("2kb")
    if allowed is not None and decision is not None:
        allowed += decision
    elif decision is None:
        allowed = None
    out = [
        _target(
            f"{small}: ours over (vllm-router round_robin + our decision)",
            1.0,
            _sound(run, ratio(run.cost_us(OURS, small), allowed), ROUND_ROBIN, small),
        )
    ]
    for case, peer, goal in (
        (large, CACHE_AWARE, 0.5),
        ("sse_saturated", ROUND_ROBIN, 1.2),
    ):
        measured = ratio(run.cost_us(OURS, case), run.cost_us(peer, case))
        out.append(_target(f"{case}: ours over {peer}", goal, _sound(run, measured, peer, case)))
    return out


def _sound(run: Run, measured: float | None, peer: str, case: str) -> float | None:
    """Nothing, where a router failed requests: it may be cheap because of that."""
    sides = (run.by(OURS, case), run.by(peer, case))
    return measured if all(side is not None and not side.failed for side in sides) else None


def _target(name: str, goal: float, measured: float | None) -> dict[str, Any]:
    met = None if measured is None else measured <= goal
    return {
        "name": name,
        "goal": f"<= {goal:g}",
        "measured": None if measured is None else round(measured, 3),
        "met": met,
    }


# ---- one JSON line ---------------------------------------------------------------------------------------------------


def flat(run: Run) -> dict[str, float]:
    """`ROUTER_CASE_us`, `_per_s`, `_success`, `_p50_us`, `_p99_us` and so on; what is not known is left out."""
    out: dict[str, float] = {}
    for figure in run.figures:
        name = f"{key(figure.router)}_{figure.case}"
        values: dict[str, float | None] = {"us": figure.cpu_us, "per_s": figure.per_s, "success": figure.success_rate}
        if figure.shares is not None:
            values |= {"real_ids_share": figure.shares.real_ids_share, "hit_share": figure.shares.hit_share}
        for what, pair in (("", figure.latency_us), ("chunk_", figure.chunk_delay_us)):
            if pair is not None:
                values |= {f"{what}p50_us": pair[0], f"{what}p99_us": pair[1]}
        out |= {f"{name}_{what}": round(value, 4) for what, value in values.items() if value is not None}
    out |= {f"decision_{kind}_us": round(value, 2) for kind, value in run.decision_us.items()}
    out |= {f"{key(router)}_rss_mib": round(n / 2**20, 1) for router, n in run.rss_bytes.items()}
    return out


def key(router: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", router.lower())


# ---- tables ----------------------------------------------------------------------------------------------------------


def rows(run: Run, case: str) -> list[tuple[str, ...]]:
    """One for each router, in the order of `TABLE_HEADS`."""
    ours, direct = run.cost_us(OURS, case), run.by(DIRECT, case)
    out: list[tuple[str, ...]] = []
    for figure in (f for f in run.figures if f.case == case):
        spread = figure.cpu_us_range
        added = _added(figure, direct)
        out.append(
            (
                figure.router,
                _number(figure.cpu_us),
                "" if spread is None else f"{_number(spread[0])} to {_number(spread[1])}",
                "" if figure.router in (OURS, DIRECT) else _number(ratio(ours, figure.cpu_us), 2),
                _number(figure.per_s),
                "" if figure.router == DIRECT else f"{figure.router_busy:.2f}",
                *_pair(_delay(figure)),
                *_pair(added),
                _success(figure),
                f"{figure.accepted}/{figure.rounds}",
                *_shares(figure),
            )
        )
    return out


def _delay(figure: Figure) -> tuple[float, float] | None:
    """Of whole answers, or of single chunks where those were timed."""
    return figure.chunk_delay_us or figure.latency_us


def _added(figure: Figure, direct: Figure | None) -> tuple[float, float] | None:
    mine, theirs = _delay(figure), None if direct is None else _delay(direct)
    if mine is None or theirs is None or figure.router == DIRECT:
        return None
    return mine[0] - theirs[0], mine[1] - theirs[1]


def _pair(pair: tuple[float, float] | None) -> tuple[str, str]:
    return ("", "") if pair is None else (f"{pair[0]:,.0f}", f"{pair[1]:,.0f}")


def _success(figure: Figure) -> str:
    if not figure.failed:
        return "100 %"
    why = ", ".join(f"{count} x {cause}" for cause, count in sorted(figure.failures.items()))
    return f"{100 * figure.success_rate:.2f} % ({why})"


def _shares(figure: Figure) -> tuple[str, str]:
    shares = figure.shares
    return ("", "") if shares is None else (f"{100 * shares.real_ids_share:.0f} %", f"{100 * shares.hit_share:.0f} %")


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """In columns, for a terminal."""
    widths = [max(len(cell) for cell in column) for column in zip(heads, *lines, strict=True)]
    shown = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in (heads, *lines)]
    return [line.rstrip() for line in shown]


def memory_rows(run: Run) -> list[tuple[str, ...]]:
    return [
        (router, run.versions.get(router, ""), f"{size / 2**20:.0f}")
        for router, size in run.rss_bytes.items()
        if router != DIRECT
    ]


def decision_line(run: Run) -> str:
    parts = ", ".join(f"{kind.replace('_', ' ')} {_number(us)} us" for kind, us in run.decision_us.items())
    return f"our own decision, CPU: {parts}" if parts else "our own decision: not measured"


def show(run: Run, judged: Sequence[Mapping[str, Any]]) -> None:
    for case in run.cases:
        print(f"\n{title(case)}")
        for line in table(TABLE_HEADS, rows(run, case)):
            print(f"  {line}")
    print()
    for line in (*table(MEMORY_HEADS, memory_rows(run)), "", decision_line(run), *run.setting):
        print(line)
    for text in run.missing:
        print(f"not measured: {text}", file=sys.stderr)
    for target in judged:
        print(f"{_MET[target['met']]}  {target['name']} {target['goal']}: {target['measured']}")


_MET = {True: "met ", False: "MISS", None: "none"}


def title(case: str) -> str:
    """What a case's name stands for."""
    if case == "sse_saturated":
        return "64 streams x 200 chunks, as fast as they are taken (per chunk)"
    if case == "sse_paced":
        return "64 streams x 200 chunks, one every 10 ms (CPU per chunk; times are a chunk's)"
    size, _, rest = case.partition("_")
    fresh = ", the end of each prompt new" if "fresh" in rest else ""
    return f"{size.replace('kb', ' KB')} bodies{fresh}, {rest.rpartition('c')[2]} at a time (per request)"
