"""`python -m bench trace validate [--json]`: the simulator against measurements, table by table.

A median may be 15 % off, a p95 or p99 30 %. For each figure that is further off the command looks for the reason and
computes what shows it: what single runs differ by, or the same run with the one thing the simulator leaves out. Where
that brings the figure within tolerance it counts as explained; what is left is said to be unexplained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.sim import against
from bench.sim.figure import Figure, Judged, Table
from bench.sim.jobs import Jobs, cores
from bench.sim.measured import NOT_SIMULATED
from bench.sim.mixed_load import mixed
from bench.sim.page import with_validation


def _alone(figures: Callable[[], Iterator[Figure]], jobs: Jobs) -> Iterator[Figure]:
    """A table too quick for more than one process."""
    return figures()


TABLES: Sequence[Table] = (
    *(
        Table(name, partial(_alone, figures))
        for name, figures in (
            ("idle TTFT", against.idle),
            ("suffix TTFT", against.suffix),
            ("16 streams beside a long prefill", against.stalls),
            ("chunk size", against.chunks),
            ("decode step", against.steps),
            ("queue at P", against.prefill_queue),
            ("pull queue at D", against.pull_queue),
            ("aged caches", against.aged),
        )
    ),
    Table("mixed load", mixed),
)


_COUNTED = ("close", "explained", "unexplained")


def judged(jobs: Jobs, tables: Sequence[Table] = TABLES) -> Iterator[Judged]:
    """Each table in turn."""
    for table in tables:
        yield Judged(table.name, list(table.figures(jobs)))


def main(args: Sequence[str]) -> int:
    """Exit code 0, or 1 when a figure is off and nothing shows why."""
    parser = argparse.ArgumentParser(prog="python -m bench trace validate", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--table", action="append", help="only tables whose name contains this")
    parser.add_argument("--jobs", type=int, metavar="N", default=cores(), help="processes (default: as many as CPUs)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="make the last section of that page anew")
    options = parser.parse_args(args)
    chosen = [table for table in TABLES if not options.table or any(part in table.name for part in options.table)]
    if not chosen:
        parser.error(f"no table {options.table[0]!r}; there is: {', '.join(table.name for table in TABLES)}")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: there must be at least one")
    if options.markdown and options.table:
        parser.error("--markdown tells of all tables: leave --table out")
    out: list[Judged] = []
    try:
        if options.markdown:  # What is wrong with it is to be known now.
            with_validation(options.markdown.read_text(encoding="utf-8"), [])
    except ValueError as exc:
        parser.error(f"{options.markdown}: {exc}")
    with Jobs(options.jobs) as jobs:
        for table in judged(jobs, chosen):
            out.append(table)
            print(f"\n{table.name}: {table.close} of {len(table.figures)} within tolerance")
            for figure in table.figures:
                print(_line(figure), flush=True)
    figures = [figure for table in out for figure in table.figures]
    close, explained, unexplained = (sum(getattr(each, key) for each in out) for key in _COUNTED)
    for text in NOT_SIMULATED:
        print(f"\nnot compared: {text}")
    print(f"\n{close} of {len(figures)} within tolerance, {explained} explained, {unexplained} unexplained")
    if options.markdown:
        text = options.markdown.read_text(encoding="utf-8")
        options.markdown.write_text(with_validation(text, out), encoding="utf-8")
    if options.json:
        share = close / len(figures) if figures else 1.0
        targets = [
            {"name": "within tolerance, share", "goal": ">= 0.9", "measured": round(share, 4), "met": share >= 0.9},
            {"name": "off and unexplained", "goal": "<= 0", "measured": unexplained, "met": not unexplained},
        ]
        tables = [_told(table) for table in out]
        print(json.dumps({"tables": tables, "not_compared": NOT_SIMULATED, "targets": targets}))
    return 1 if unexplained else 0


def _line(it: Figure) -> str:
    runs = "" if it.interval is None else f"  single runs {it.interval[0]:.4g}..{it.interval[1]:.4g}"
    line = (
        f"  {it.row:<28} {it.column:<18} measured {it.measured:>8.4g}  simulated {it.simulated:>8.4g}"
        f"  {it.deviation:>+7.1%}{runs}"
    )
    if it.close:
        return line
    return f"{line}  OFF\n      {'explained: ' + it.reason if it.reason else 'UNEXPLAINED'}"


def _told(table: Judged) -> dict[str, Any]:
    rows = [it._asdict() | {"deviation": round(it.deviation, 4), "within": it.close} for it in table.figures]
    return {"table": table.name, **{key: getattr(table, key) for key in _COUNTED}, "figures": rows}
