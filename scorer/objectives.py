"""What it costs to break an objective, as far as that can be foreseen."""

from __future__ import annotations

import math

from scorer.answers import SCALE

VIOLATION_S = 20.0
"""Seconds one broken objective is worth. In simulated load the share of kept ones is flat from 5 to 20."""
LATE_WORTH = 0.25
"""What a second past an objective counts, relative to one before it: who is late already is not helped by stalling who
is not.
"""
SPREAD = 0.15
"""Relative error of predictions before anything was learned."""
_FAR = 12.0
"""In scales of the logistic: a share of 6e-6 is none, where hundreds of answers are asked about."""


def late_share(predicted_s: float, objective_s: float | None, spread: float = SPREAD) -> float:
    """The probability that what is predicted to take `predicted_s` takes longer than its objective (0 without one):
    logistic, with the standard deviation that a relative error of `spread` has.
    """
    if objective_s is None:
        return 0.0
    scale = SCALE * max(spread * predicted_s, 1e-4)
    x = (predicted_s - objective_s) / scale
    if x > _FAR:
        return 1.0
    return 0.0 if x < -_FAR else 1.0 / (1.0 + math.exp(-x))


def safe_ratio(spread: float) -> float:
    """An objective so many times what is predicted is not missed: `late_share` is 0."""
    return 1 + _FAR * SCALE * spread


def relief(predicted_s: float, objective_s: float) -> float:
    """What to take off (below 0) of what is counted for a first token that comes after its objective."""
    over_s = predicted_s - objective_s
    return (LATE_WORTH - 1) * over_s if over_s > 0 else 0.0
