"""How well replicas decide, each seeing a part of the requests, beside one that sees all: tables and targets."""

from __future__ import annotations

import statistics
from typing import Any

from bench.scale.cells import Arm, Replicated, arms, counts_of
from bench.sim.grid import Cell
from bench.sim.sweep import Sweep
from bench.sim.tables import table

GOAL = 1.3
"""TTFT p90 over one replica's."""
SLO_GOAL = 0.03
"""Attainment below one replica's."""
COUNTS = (1, 2, 4, 8)
_P90 = "ttft_p90_ms"
_SHOWN = (
    ("TTFT p50 ms", "ttft_p50_ms", "{:.0f}"),
    ("p90 ms", _P90, "{:.0f}"),
    ("p99 ms", "ttft_p99_ms", "{:.0f}"),
    ("E2E mean ms", "e2e_mean_ms", "{:.0f}"),
    ("tokens/s", "output_tokens_per_s", "{:.0f}"),
    ("hits", "hit_share", "{:.3f}"),
)
_SLO = ("SLO met", "slo_share", "{:.3f}")


def median(sweep: Sweep, cell: Cell, arm: str, key: str, group: str | None = None) -> float:
    """Over the seeds; of one group of requests, or of all."""
    runs = sweep.runs(cell, arm)
    return statistics.median(float((run if group is None else run["groups"][group])[key]) for run in runs)


def rates(sweep: Sweep, cell: Cell) -> list[str]:
    """The ladder's stages, which are groups of requests named by their rates, without the one that warms up."""
    groups = sweep.runs(cell, cell.arms[0])[0].get("groups", {})
    return sorted((name for name in groups if name.endswith("/s")), key=lambda name: float(name[:-2]))


def shown(cell: Replicated) -> tuple[tuple[str, str, str], ...]:
    """(head, figure, form)"""
    return (*_SHOWN, _SLO) if cell.has_objectives else _SHOWN


def lines(sweep: Sweep, cell: Replicated) -> list[str]:
    """Tables of medians: all requests, and TTFT p90 by stage."""
    columns, stages = shown(cell), rates(sweep, cell)
    rows = [[arm, *(form.format(median(sweep, cell, arm, key)) for _, key, form in columns)] for arm in cell.arms]
    out = [*table(["routers", *(head for head, _, _ in columns)], rows), ""]
    if stages:
        rows = [[arm, *(f"{median(sweep, cell, arm, _P90, stage):.0f}" for stage in stages)] for arm in cell.arms]
        out += [*table(["TTFT p90 ms by requests/s", *stages], rows), ""]
    return out


def figures(sweep: Sweep, cell: Replicated) -> dict[str, float]:
    """`cell_arm_figure`, `cell_arm_rate_figure`: one number each."""
    prefix = "chat" if cell.has_objectives else "ladder"
    out: dict[str, float] = {}
    for arm in cell.arms:
        name = f"{prefix}_{arm}".replace(",", "").replace(" ", "_").replace("-", "_")
        out |= {f"{name}_{key}": round(median(sweep, cell, arm, key), 3) for _, key, _ in shown(cell)}
        for stage in rates(sweep, cell):
            key = f"{name}_{stage.replace('/', '_per_')}_{_P90}"
            out[key] = round(median(sweep, cell, arm, _P90, stage), 3)
    return out


def targets(sweep: Sweep, cell: Replicated) -> list[dict[str, Any]]:
    """Of those that share; `measured` is None where one replica was not run."""
    alone = Arm(1, False).name
    found = []
    for name, arm in arms(counts_of(cell.arms)).items():
        if not arm.shares:
            continue
        if cell.has_objectives:
            what, goal = f"{arm.n} replicas with sync, chats on 1P+3D: SLO attainment below one replica's", SLO_GOAL
        else:
            what, goal = f"{arm.n} replicas with sync: TTFT p90 over one replica's", GOAL
        measured = None
        if alone in cell.arms:
            key = _SLO[1] if cell.has_objectives else _P90
            one, ours = median(sweep, cell, alone, key), median(sweep, cell, name, key)
            measured = round(one - ours if cell.has_objectives else ours / one, 3)
        met = None if measured is None else measured <= goal
        found.append({"name": what, "goal": f"<= {goal:g}", "measured": measured, "met": met})
    return found
