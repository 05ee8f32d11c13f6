"""How well replicas decide, each seeing a part of the requests, beside one that sees all: tables and targets."""

from __future__ import annotations

import statistics
from typing import Any

from bench.scale.cells import Arm, Replicated, arms, counts_of
from bench.sim.grid import Cell
from bench.sim.sweep import Sweep
from bench.sim.tables import table

GOAL = 1.3
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


def median(sweep: Sweep, cell: Cell, arm: str, key: str, group: str | None = None) -> float:
    """Over the seeds; of one group of requests, or of all."""
    runs = sweep.runs(cell, arm)
    return statistics.median(float((run if group is None else run["groups"][group])[key]) for run in runs)


def rates(sweep: Sweep, cell: Cell) -> list[str]:
    """The ladder's stages, which are groups of requests named by their rates, without the one that warms up."""
    groups = sweep.runs(cell, cell.arms[0])[0].get("groups", {})
    return sorted((name for name in groups if name.endswith("/s")), key=lambda name: float(name[:-2]))


def lines(sweep: Sweep, cell: Replicated) -> list[str]:
    """Tables of medians: all requests, and TTFT p90 by stage."""
    stages = rates(sweep, cell)
    all_rows = [[arm, *(form.format(median(sweep, cell, arm, key)) for _, key, form in _SHOWN)] for arm in cell.arms]
    by_stage = [[arm, *(f"{median(sweep, cell, arm, _P90, stage):.0f}" for stage in stages)] for arm in cell.arms]
    return [
        *table(["routers", *(head for head, _, _ in _SHOWN)], all_rows),
        "",
        *table(["TTFT p90 ms by requests/s", *stages], by_stage),
        "",
    ]


def figures(sweep: Sweep, cell: Replicated) -> dict[str, float]:
    """`arm_figure`, `arm_rate_figure`: one number each."""
    out: dict[str, float] = {}
    for arm in cell.arms:
        name = arm.replace(",", "").replace(" ", "_").replace("-", "_")
        out |= {f"{name}_{key}": round(median(sweep, cell, arm, key), 3) for _, key, _ in _SHOWN}
        for stage in rates(sweep, cell):
            key = f"{name}_{stage.replace('/', '_per_')}_{_P90}"
            out[key] = round(median(sweep, cell, arm, _P90, stage), 3)
    return out


def targets(sweep: Sweep, cell: Replicated) -> list[dict[str, Any]]:
    """Of those that share; `measured` is None where one replica was not run."""
    alone = Arm(1, False).name
    base_ms = median(sweep, cell, alone, _P90) if alone in cell.arms else None
    found = []
    for name, arm in arms(counts_of(cell.arms)).items():
        if arm.shares:
            measured = None if not base_ms else round(median(sweep, cell, name, _P90) / base_ms, 3)
            found.append(
                {
                    "name": f"{arm.n} replicas with sync: TTFT p90 over one replica's",
                    "goal": f"<= {GOAL:g}",
                    "measured": measured,
                    "met": None if measured is None else measured <= GOAL,
                }
            )
    return found
