"""Why targets are missed, by name, where that is known: shown beside those that are, and only there."""

from __future__ import annotations

from typing import Final

_PULLS: Final = (
    "the clairvoyant arm fetches prefixes from other engines, which the simulated planner does not; the one that knows"
    " as much and fetches nothing (clairvoyant-local) is slower than ours on the generated trace"
)

WHY: Final[dict[str, str]] = {
    "1 mooncake x1, clairvoyant": _PULLS,
    "1 mooncake x1.5, clairvoyant": _PULLS,
    "4 append prefill, TTFT": (
        "no arm comes near: front end (8 ms), the shortest prefill step (12 ms) and the step under way leave 28 ms, of"
        " always-remote's 64 (local, which never moves any, 0.48; ppd 0.47); ours sends a third of the turns away for"
        " the sake of TPOT, and those take as long as always-remote's"
    ),
}
"""Figures of other arms are those of seed 0."""
