"""A report as lines for people, or as one JSON document."""

from __future__ import annotations

import os
import sys
from typing import Any

from gateway.doctor.findings import Finding, Report, Severity

_COLOURS = {Severity.OK: "32", Severity.NOTE: "36", Severity.WARNING: "33", Severity.ERROR: "31"}
_FLEET = "all workers"


def exit_code(report: Report) -> int:
    """0: nothing worse than a note, 1: warnings, 2: errors."""
    return {Severity.WARNING: 1, Severity.ERROR: 2}.get(report.worst, 0)


def wants_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def as_text(report: Report, *, colour: bool) -> str:
    """Grouped by worker, worst first, one line per finding, and a last line that counts."""
    width = max((len(finding.code) for finding in report.findings), default=0)
    lines = []
    groups = [*report.workers.items(), *([(_FLEET, report.fleet)] if report.fleet else [])]
    for name, findings in groups:
        lines.append(name)
        ordered = sorted(findings, key=lambda finding: -finding.severity)
        lines += [_line(finding, width, colour) for finding in ordered]
    counts = [sum(f.severity is severity for f in report.findings) for severity in (Severity.ERROR, Severity.WARNING)]
    lines.append(
        f"{_plural(len(report.workers), 'worker')}: {_plural(counts[0], 'error')}, " + _plural(counts[1], "warning")
    )
    return "\n".join(lines)


def as_document(report: Report) -> dict[str, Any]:
    """JSON-ready: findings by worker, those about several workers, and the exit code."""
    return {
        "workers": {url: [_object(finding) for finding in findings] for url, findings in report.workers.items()},
        "fleet": [_object(finding) for finding in report.fleet],
        "worst": report.worst.name.lower(),
        "exit_code": exit_code(report),
    }


def _line(finding: Finding, width: int, colour: bool) -> str:
    severity = f"{finding.severity.name.lower():<7}"
    if colour:
        severity = f"\x1b[{_COLOURS[finding.severity]}m{severity}\x1b[0m"
    rank = "" if finding.rank is None else f"rank {finding.rank}: "
    text = f"{rank}{finding.sentence}."
    if finding.meaning:
        text += f" {finding.meaning}"
    if finding.fix and finding.fix != "nothing":
        text += f" Fix: {finding.fix}"
    return f"  {severity}  {finding.code:<{width}}  {text}"


def _object(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity.name.lower(),
        "code": finding.code,
        "rank": finding.rank,
        "sentence": finding.sentence,
        "evidence": finding.evidence,
        "meaning": finding.meaning,
        "fix": finding.fix,
    }


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
