"""What the project asks of figures: `targets` of a benchmark's JSON line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Goal = tuple[str, str, float]
"""Name of a figure, relation (`<=` or `>=`), goal."""


def judged(figures: Mapping[str, float], goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """A row for each goal whose figure is there."""
    out = []
    for name, relation, goal in goals:
        if name in figures:
            measured = figures[name]
            met = measured <= goal if relation == "<=" else measured >= goal
            out.append({"name": name, "goal": f"{relation} {goal:g}", "measured": round(measured, 3), "met": met})
    return out
