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
    "2 sglang batch, shuffled": (
        "the goal is the makespan of a batch, a price is the seconds of requests: all 16 of a group stay with the "
        "engine that computed its prefix, since computing it again would cost each of 128 that wait there 0.1 s, "
        "so that engines get 7 to 9 groups and the last one decides; no arm does better (lmetric 1.37). On engines"
        " that share blocks as soon as they are scheduled (vLLM) it is 1.45, ordered 1.56 (1.63 at most, by "
        "longest-prefix)"
    ),
    "5 azure, static split": (
        "the best static split, 2P2D, is balanced here: 1,155 prompt tokens take 25 ms of a prefill engine and 211"
        " answer tokens 20 ms of a decode engine at 128 streams, so splitting wastes a tenth at most; the "
        "clairvoyant arm gets no further (0.84 of the objectives at 75/s, ours 0.86). On three engines and on two,"
        " where no split fits, ours is 1.15 times the best one"
    ),
    "4 append prefill, TTFT": (
        "no arm comes near: front end (8 ms), the shortest prefill step (12 ms) and the step under way leave 28 ms, of"
        " always-remote's 64 (local, which never moves any, 0.48; ppd 0.47); ours sends many of the turns away for"
        " the sake of TPOT, and those take as long as always-remote's"
    ),
}
"""Figures of other arms are those of seed 0."""
