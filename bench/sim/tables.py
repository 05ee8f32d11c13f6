"""The results of a sweep as Markdown: a table for each cell, its arms below each other. Times in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.sim.grid import REFERENCES, Cell
from bench.sim.sweep import Sweep

_Text = Callable[[Sweep, Cell, str], str]
OURS, CLAIRVOYANT = "warmroute", REFERENCES[0]
CONTROLS = ("least-load", "longest-prefix")
"""Always shown: what everybody has, and what must not be done."""


def _one(key: str, form: str, *, spread: bool = False) -> _Text:
    def text(sweep: Sweep, cell: Cell, arm: str) -> str:
        found = form.format(sweep.figure(cell, arm, key))
        if spread and len(sweep.seeds(cell)) > 1:
            found += " ± " + form.format(sweep.spread(cell, arm, key))
        return found

    return text


def _percentiles(name: str, form: str) -> _Text:
    def text(sweep: Sweep, cell: Cell, arm: str) -> str:
        return " / ".join(form.format(sweep.figure(cell, arm, f"{name}_p{share}_ms")) for share in (50, 90, 99))

    return text


def _regret(sweep: Sweep, cell: Cell, arm: str) -> str:
    """In SLO attainment, and in mean end-to-end time."""
    if CLAIRVOYANT not in sweep.run_arms(cell):
        return "-"
    met, best = (sweep.figure(cell, each, "slo_share") for each in (arm, CLAIRVOYANT))
    e2e, least = (sweep.figure(cell, each, "e2e_mean_ms") for each in (arm, CLAIRVOYANT))
    return f"{best - met:+.3f} / {e2e / least - 1:+.1%}" if least else "-"


COLUMNS: Sequence[tuple[str, _Text]] = (
    ("SLO met", _one("slo_share", "{:.3f}", spread=True)),
    ("goodput /s", _one("goodput_per_s", "{:.2f}", spread=True)),
    ("TTFT mean", _one("ttft_mean_ms", "{:.0f}", spread=True)),
    ("TTFT p50 / p90 / p99", _percentiles("ttft", "{:.0f}")),
    ("ITL p50 / p90 / p99", _percentiles("itl", "{:.1f}")),
    ("TPOT p50 / p90 / p99", _percentiles("tpot", "{:.1f}")),
    ("E2E mean", _one("e2e_mean_ms", "{:.0f}", spread=True)),
    ("E2E p50 / p90 / p99", _percentiles("e2e", "{:.0f}")),
    ("hits", _one("hit_share", "{:.3f}")),
    ("remote", _one("remote_share", "{:.2f}")),
    ("success", _one("success_rate", "{:.3f}")),
    ("regret SLO / E2E", _regret),
)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


SUMMARY_HEADS = ("cell", "metric", OURS, "best other", *CONTROLS, CLAIRVOYANT, "regret")


def summary_table(sweep: Sweep, cells: Iterable[Cell]) -> Iterator[str]:
    """A row for each cell: its metric, under ours and under those it is to be seen beside."""
    return table(SUMMARY_HEADS, (_summary(sweep, cell) for cell in cells))


def _summary(sweep: Sweep, cell: Cell) -> list[str]:
    arms = sweep.run_arms(cell)
    rivals = [arm for arm in arms if arm not in REFERENCES and arm != OURS]
    if any(sweep.figure(cell, arm, "slo_share") < 0.99 for arm in arms if arm not in REFERENCES):
        name, key, form, best = "SLO met", "slo_share", "{:.3f}", max
    else:
        name, key, form, best = "E2E mean", "e2e_mean_ms", "{:.0f}", min
    told = {arm: sweep.figure(cell, arm, key) for arm in arms}
    texts = {arm: form.format(value) for arm, value in told.items()}
    first = best(rivals, key=lambda arm: told[arm]) if rivals else None
    shown = [texts.get(OURS, "-"), f"{texts[first]} ({first})" if first else "-"]
    shown += [texts.get(arm, "-") for arm in (*CONTROLS, CLAIRVOYANT)]
    return [cell.name, name, *shown, _regret(sweep, cell, OURS) if OURS in told else "-"]


def arms_table(sweep: Sweep, cell: Cell) -> Iterator[str]:
    rows = ([arm, *(text(sweep, cell, arm) for _, text in COLUMNS)] for arm in sweep.run_arms(cell))
    return table(["arm", *(name for name, _ in COLUMNS)], rows)


def cells_table(sweep: Sweep, cells: Iterable[Cell]) -> Iterator[str]:
    """Cells of few arms in one table."""
    rows = (
        [cell.name, arm, *(text(sweep, cell, arm) for _, text in COLUMNS)]
        for cell in cells
        for arm in sweep.run_arms(cell)
    )
    return table(["cell", "arm", *(name for name, _ in COLUMNS)], rows)
