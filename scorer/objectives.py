"""What it costs to break an objective, as far as that can be foreseen."""

from __future__ import annotations

import math

VIOLATION_S = 20.0
"""Seconds one broken objective is worth. In simulated load the share of kept ones is flat from 5 to 20."""
LATE_WORTH = 0.25
"""What a second past an objective counts, relative to one before it: who is late already is not helped by stalling who
is not.
"""
SPREAD = 0.15
"""Relative error of predictions before anything was learned."""
_FAR = 30.0


def late_share(predicted_s: float, objective_s: float | None, spread: float = SPREAD) -> float:
    """The probability that what is predicted to take `predicted_s` takes longer than its objective (0 without one):
    logistic, with the standard deviation that a relative error of `spread` has.
    """
    if objective_s is None:
        return 0.0
    scale = 0.5513 * max(spread * predicted_s, 1e-4)  # sqrt(3) / pi
    x = (predicted_s - objective_s) / scale
    if x > _FAR:
        return 1.0
    return 0.0 if x < -_FAR else 1.0 / (1.0 + math.exp(-x))
