"""What the project asks of the figures of large fleets, whatever a run comes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.goals import Goal, judged

GOALS: tuple[Goal, ...] = (
    ("replay_start_us_per_copy", "<=", 5.0),
    ("snapshot_start_us_per_copy", "<=", 4.0),
    ("redis_start_us_per_copy", "<=", 4.0),
    ("replay_bytes_per_copy", "<=", 250.0),
    ("snapshot_bytes_per_copy", "<=", 250.0),
    ("indexer_us_per_change", "<=", 5.0),
    ("gateway_us_per_change", "<=", 4.0),
    ("fanout_us_per_change", "<=", 0.1),
    ("match_keys_1_p50_ms", "<=", 2.0),
    ("match_tokens_1_p50_ms", "<=", 2.0),
    ("match_keys_8_per_s_over_dynamo", ">=", 1.0),
    ("match_tokens_8_per_s_over_dynamo", ">=", 1.0),
)


def judge(figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """As `targets` of a part, of the figures that are there."""
    return judged(figures, GOALS)
