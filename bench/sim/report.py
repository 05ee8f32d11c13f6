"""What a run comes to: latencies, SLOs, hits, by group and in all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bench.sim.flight import Run
from bench.sim.record import Record, gap_of

Figures = dict[str, Any]


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    if not sorted_values:
        return 0.0
    return sorted_values[max(0, math.ceil(share * len(sorted_values) - 1e-9) - 1)]


def gap_percentiles(records: Iterable[Record], shares: Sequence[float]) -> list[float]:
    """Percentiles of the inter-token latencies of all, in seconds."""
    gaps: Counter[int] = Counter()
    for record in records:
        gaps.update(record.gaps)
    total = gaps.total()
    out: list[float] = []
    for share in shares:
        left = share * total
        found = 0.0
        for bin_ in sorted(gaps):
            found = gap_of(bin_)
            left -= gaps[bin_]
            if left <= 0:
                break
        out.append(found)
    return out


def latencies(records: Sequence[Record]) -> Figures:
    """Of those that ended well. Milliseconds."""
    done = [record for record in records if record.ok]
    out: Figures = {"requests": len(records), "success_rate": len(done) / len(records) if records else 1.0}
    for name, values in (
        ("ttft", [record.ttft_s for record in done]),
        ("tpot", [record.tpot_s for record in done if record.output_tokens > 1]),
        ("e2e", [record.e2e_s for record in done]),
    ):
        values.sort()
        out[f"{name}_mean_ms"] = 1000 * sum(values) / len(values) if values else 0.0
        for share in (50, 90, 95, 99):
            out[f"{name}_p{share}_ms"] = 1000 * percentile(values, share / 100)
    p50, p90, p99 = gap_percentiles(done, (0.5, 0.9, 0.99))
    out |= {"itl_p50_ms": 1000 * p50, "itl_p90_ms": 1000 * p90, "itl_p99_ms": 1000 * p99}
    out["itl_max_ms"] = 1000 * max((record.max_gap_s for record in done), default=0.0)
    return out


def summarise(run: Run, *, slo_ttft_s: float | None = None, slo_tpot_s: float | None = None) -> Figures:
    """All figures of a run, JSON-ready. The SLOs given are for requests that bring none."""
    records = run.records
    out: Figures = {"arm": run.arm} | latencies(records)
    prompt = sum(record.prompt_tokens for record in records if record.ok)
    output = sum(record.output_tokens for record in records if record.ok)
    met = sum(record.met(slo_ttft_s, slo_tpot_s) for record in records)
    wrong = [r for r in records if r.ok and r.predicted_tokens is not None and r.predicted_tokens > r.cached_tokens]
    duration_s = run.duration_s or 1.0
    out |= {
        "duration_s": run.duration_s,
        "slo_share": met / len(records) if records else 1.0,
        "goodput_per_s": met / duration_s,
        "prompt_tokens_per_s": prompt / duration_s,
        "output_tokens_per_s": output / duration_s,
        "hit_share": sum(r.hit_tokens for r in records if r.ok) / prompt if prompt else 0.0,
        "remote_share": sum(r.prefill is not None for r in records) / len(records) if records else 0.0,
        "wrong_share": len(wrong) / len(records) if records else 0.0,
        "retries": sum(record.retries for record in records),
        "failed_pulls": sum(record.pull_failed for record in records),
        "preemptions": sum(sim.engine.stats().preemptions for sim in run.engines.values()),
        "transferred_bytes": run.transfers.bytes,
    }
    groups = sorted({record.group for record in records})
    if 1 < len(groups) <= 16:
        out["groups"] = {group: latencies([r for r in records if r.group == group]) for group in groups}
    return out
