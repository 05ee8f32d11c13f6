"""docs/benchmarks.md: what was run, how to read it, the targets, every cell, and how well the simulator is known."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Protocol

from bench.sim.figure import Judged
from bench.sim.grid import Traces, all_cells
from bench.sim.measured import NOT_SIMULATED
from bench.sim.sweep import Sweep
from bench.sim.tables import arms_table, cells_table, summary_table, table

PAGE: Final = 2
"""Of the page's form: another number, another head, and the committed page has to be made again."""
COMMAND: Final = "python -m bench trace targets --full --cache runs.jsonl --markdown docs/benchmarks.md"
HEAD: Final = (
    f"<!-- Page {PAGE}, generated; do not edit. {COMMAND} -->",
    "<!-- with --mooncake FILE and --azure FILE where recorded traces are at hand; its last section alone is made by",
    "     python -m bench trace validate --markdown docs/benchmarks.md -->",
)
_ROOT: Final = Path(__file__).resolve().parents[2]
SECTIONS: Final = ("What was run", "How to read it", "Targets", "Cells", "Searches and variations", "Validation")
TARGET_HEADS: Final = ("target", "goal", "measured", "met", "detail, and why it is missed")
VALIDATION_HEADS: Final = (
    "table", "row", "figure", "measured", "simulated", "deviation", "90 % of single runs", "verdict",
)  # fmt: skip

_READ: Final = """\
Simulated time throughout: the planner that serves, and every other rule, decide for engines whose step times were
measured or taken from tables; nothing here was measured on a GPU but the left columns of the last section. Within a
cell all arms see the same requests, servers, event delays and stale metrics.

- `SLO met`: share of all requests (failed ones too) that ended well within their objectives; requests without any count
  when they end well. `goodput`: those per second. `hits`: share of prompt tokens nobody had to compute. `remote`: share
  of requests whose prompt was computed by another server than the one that answers. `success`: share that ended well.
- Times in milliseconds: TTFT time to first token, ITL gaps between tokens, TPOT a request's mean gap, E2E all of it.
  Each figure is the mean over seeds; `±` is half the range over them.
- A cell's metric is SLO attainment where any arm is under 0.99, else mean E2E.
- `clairvoyant` knows every engine's queue and cache and how long answers will be, and takes the best place for each
  request as it comes; it looks no further, so the regret against it (its SLO attainment less the arm's; the arm's mean
  E2E over its own, less one) may be negative; in batches that all come at once it is no better than round-robin.
  `least-load` is shown in every cell. `longest-prefix` follows the cache whatever the load and is
  there as a negative control.
- `aggregated` has the same servers, all of which take whole requests.
- Each planner begins with the constants of its cell's hardware; what happens when these are wrong, or servers unlike,
  are the variations. Engines shake hands before the first pull of a pair (0.15 s) and queue their pulls; planners are
  not told of the handshake in these cells (`FleetSpec.nixl` tells them), and learn what queues cost. Prompts come as
  token ids, so that no engine has text to read. One link joins all servers of a fleet
  (`FleetSpec.links` gives a pair its own: a slow one is learned and avoided, `tests/unit/test_sim_links.py`).
- `pd.peers` (prompts fetched from workers that decode) is off: no other rule has it. With it, over three seeds,
  Mooncake is the same to the last digit (nothing pays to be fetched there), and SLO attainment goes from 0.955 to 0.959
  in chat 4/s, from 0.989 to 0.986 in chat 2/s and from 0.875 to 0.893 in code 0.2/s, within what seeds differ by.
- Other routers' rules are written from their publications and sources; where these leave something open, what was
  taken stands in the arm's own text (`bench/sim/arms/`). Traces that are generated are described in
  `bench/sim/workloads/traces.py`."""


class Told(Protocol):
    """A target, as far as the page goes."""

    @property
    def name(self) -> str: ...
    @property
    def goal(self) -> str: ...
    @property
    def measured(self) -> float: ...
    @property
    def met(self) -> bool: ...
    @property
    def detail(self) -> str: ...
    @property
    def why(self) -> str: ...


@dataclass(frozen=True, slots=True)
class How:
    """What was asked for; `only` empty: all. Without a trace's file one like it was generated."""

    only: Sequence[str]
    full: bool
    mooncake: Path | None = None
    azure: Path | None = None


def page(sweep: Sweep, targets: Sequence[Told], how: How, validation: Sequence[Judged]) -> str:
    """The whole page. Of each trace file the name and a digest are told, not where it is."""
    bodies = (
        _what(sweep, how),
        _READ.splitlines(),
        _targets(targets),
        _cells(sweep),
        _others(sweep),
        _validation(validation),
    )
    lines = [*HEAD, "# Benchmarks"]
    for title, body in zip(SECTIONS, bodies, strict=True):
        lines += ["", f"## {title}", "", *body]
    return "\n".join(lines) + "\n"


def with_validation(text: str, tables: Sequence[Judged]) -> str:
    """The page `text` with its last section made anew. Raises ValueError for what is no such page."""
    before, heading, _ = text.partition(f"\n## {SECTIONS[-1]}\n")
    if not heading or not text.startswith("\n".join(HEAD)):
        raise ValueError("no page of this form: make all of it by the command in the head of docs/benchmarks.md")
    return "\n".join([before + heading, *_validation(tables)]) + "\n"


def commit() -> str:
    """Which commit of the checkout runs; of what is no checkout, that."""
    git = shutil.which("git")
    if git is None or not (_ROOT / ".git").exists():
        return "no checkout"
    name = subprocess.run(  # noqa: S603
        [git, "-C", _ROOT, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(  # noqa: S603
        [git, "-C", _ROOT, "diff", "--quiet", "HEAD", "--", "bench", "indexer", "scorer"], check=False
    )
    if name.returncode:
        return "no checkout"
    return f"commit {name.stdout.strip()}" + (" with changes" if changed.returncode else "")


def _what(sweep: Sweep, how: How) -> Iterator[str]:
    try:
        release = version("warmroute")
    except PackageNotFoundError:
        release = "from a checkout"
    seeds = sorted({len(sweep.seeds(cell)) for cell in sweep.cells.values()})
    only = f" --only {','.join(how.only)}" if how.only else ""
    yield f"- `python -m bench trace targets{' --full' if how.full else ''}{only}`" + (
        "" if how.full else ": the strongest arms and few seeds, not all"
    )
    ran = f"{len(sweep.cells)} cells, {sweep.made} runs, {sweep.cpu_s / 3600:.1f} h of CPU"
    yield f"- warmroute {release}, {commit()}; {ran}"
    yield f"- seeds 0 to n-1, with n = {', '.join(map(str, seeds))} by cell (see there); a run depends on nothing else"
    for name, path in (("Mooncake's conversation trace", how.mooncake), ("Azure's conversation lengths", how.azure)):
        digest = "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        yield f"- {name}: " + ("generated in its likeness" if path is None else f"recorded, sha256 {digest}...")


def _targets(targets: Sequence[Told]) -> Iterator[str]:
    yield f"{sum(target.met for target in targets)} of {len(targets)} met."
    yield ""
    rows = (
        [it.name, it.goal, f"{it.measured:.3f}", "yes" if it.met else "**no**", ". ".join(filter(None, _tail(it)))]
        for it in targets
    )
    yield from table(TARGET_HEADS, rows)


def _tail(target: Told) -> tuple[str, str]:
    return target.detail, "" if target.met else f"Why: {target.why or 'not known yet'}"


def _tabled(sweep: Sweep) -> set[str]:
    return {cell.name for cell in all_cells(Traces())} & sweep.cells.keys()


def _cells(sweep: Sweep) -> Iterator[str]:
    cells = [sweep.cells[cell.name] for cell in all_cells(Traces()) if cell.name in sweep.cells]
    yield from summary_table(sweep, cells)
    for cell in cells:
        yield ""
        yield f"### {cell.name}"
        yield ""
        yield f"{len(sweep.seeds(cell))} seeds." + (f" {cell.note}" if cell.note else "")
        yield ""
        yield from arms_table(sweep, cell)


def _others(sweep: Sweep) -> Iterator[str]:
    yield "Rates tried in search of the goodput, and servers or priors that are not what they are thought to be."
    yield ""
    yield from cells_table(sweep, [cell for name, cell in sweep.cells.items() if name not in _tabled(sweep)])


def _validation(tables: Sequence[Judged]) -> Iterator[str]:
    figures = [(each.name, figure) for each in tables for figure in each.figures]
    close = sum(figure.close for _, figure in figures)
    explained = sum(figure.explained for _, figure in figures)
    yield f"`python -m bench trace validate`, {commit()}: the simulator against two H200 (vLLM 0.26, a dense 7B model)."
    yield f"A median may be 15 % off, a p95 or p99 30 %. Of {len(figures)} figures {close} are within; of the others"
    yield f"{explained} are explained by what the command itself computes, {len(figures) - close - explained} are not."
    yield ""
    for text in NOT_SIMULATED:
        yield f"Not compared: {text}."
        yield ""
    rows = (
        [
            name, it.row, it.column, f"{it.measured:.4g}", f"{it.simulated:.4g}", f"{it.deviation:+.1%}",
            "" if it.interval is None else f"{it.interval[0]:.4g} to {it.interval[1]:.4g}",
            "ok" if it.close else it.reason or "**not explained**",
        ]
        for name, it in figures
    )  # fmt: skip
    yield from table(VALIDATION_HEADS, rows)
