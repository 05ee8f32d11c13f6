"""The results of a sweep as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from bench.sim.grid import Cell
from bench.sim.sweep import Sweep

_COLUMNS = (
    ("SLO", "slo_share", "{:.3f}"),
    ("goodput /s", "goodput_per_s", "{:.2f}"),
    ("TTFT mean", "ttft_mean_ms", "{:.0f}"),
    ("p50", "ttft_p50_ms", "{:.0f}"),
    ("p90", "ttft_p90_ms", "{:.0f}"),
    ("p99", "ttft_p99_ms", "{:.0f}"),
    ("TPOT mean", "tpot_mean_ms", "{:.1f}"),
    ("p95", "tpot_p95_ms", "{:.1f}"),
    ("ITL p50", "itl_p50_ms", "{:.1f}"),
    ("p99", "itl_p99_ms", "{:.0f}"),
    ("E2E mean", "e2e_mean_ms", "{:.0f}"),
    ("p99", "e2e_p99_ms", "{:.0f}"),
    ("hits", "hit_share", "{:.3f}"),
    ("remote", "remote_share", "{:.2f}"),
    ("ok", "success_rate", "{:.3f}"),
)


class Told(Protocol):
    """A target, as far as a table goes."""

    @property
    def name(self) -> str: ...
    @property
    def goal(self) -> str: ...
    @property
    def measured(self) -> float: ...
    @property
    def met(self) -> bool: ...
    @property
    def detail(self) -> str: ...


def markdown(sweep: Sweep, targets: Iterable[Told]) -> str:
    """The targets, then a table for each cell; times in milliseconds."""
    lines = ["| target | goal | measured | met | |", "|---|---|---|---|---|"]
    lines += [
        f"| {it.name} | {it.goal} | {it.measured:.3f} | {'yes' if it.met else '**no**'} | {it.detail} |"
        for it in targets
    ]
    for cell in sweep.cells.values():
        lines += ["", f"### {cell.name}", "", *_table(sweep, cell)]
    return "\n".join(lines) + "\n"


def _table(sweep: Sweep, cell: Cell) -> list[str]:
    arms = sweep.run_arms(cell)
    many = len(sweep.runs(cell, arms[0])) > 1
    heads = [name for name, _, _ in _COLUMNS]
    lines = [f"| arm | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for arm in arms:
        cells = []
        for _, key, form in _COLUMNS:
            text = form.format(sweep.figure(cell, arm, key))
            if many and key in ("slo_share", "e2e_mean_ms"):
                text += " ± " + form.format(sweep.spread(cell, arm, key))
            cells.append(text)
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines
