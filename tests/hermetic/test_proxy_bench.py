"""A tiny run of `python -m bench proxy`: the real gateway, its index filled by events, against no router."""

from __future__ import annotations

import os
from pathlib import Path

from bench.proxy import report
from bench.proxy.measure import Case
from bench.proxy.session import Plan, measure

CASES = [
    Case("2kb_c4", "2kb", 4, 0.1),
    Case("2kb_fresh_c4", "2kb_fresh", 4, 0.1),
    Case("sse_saturated", "sse", 4, 0.1, streams=True),
]


def test_ours_is_measured_with_its_decision_on(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    run = measure(
        Plan(cases=CASES, rounds=1, routers="direct,ours,smg", bin_folder=str(tmp_path), n_small=16, n_large=2)
    )
    assert os.sched_getaffinity(0) == allowed
    for case in CASES:
        direct, ours = run.by("direct", case.name), run.by("ours", case.name)
        assert direct is not None
        assert ours is not None
        assert (direct.failed, ours.failed) == (0, 0)
        assert (ours.cpu_us or 0) > 1
        assert direct.per_s
        assert ours.per_s
        assert ours.shares is not None
        assert ours.shares.real_ids_share == 1
        assert ours.shares.hit_share > 0.4
    assert run.decision_us["64kb_fresh"] > run.decision_us["2kb"] > 1
    assert run.rss_bytes["ours"] > 10 << 20
    assert len(run.missing) == 2
    assert [t["met"] for t in report.targets(run, 4)] == [None] * 3
