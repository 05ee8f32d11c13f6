"""The fleets as a picture. Needs the extra `bench`."""

from __future__ import annotations

from pathlib import Path

from bench.advise.advice import Advice
from bench.advise.errors import InputError
from bench.plots import NoPlots, blank


def plot(advice: Advice, path: Path, title: str) -> None:
    """Objectives kept, TTFT and gaps between tokens of each fleet. The ending of `path` decides the format. Raises
    InputError for one that is not known, for a file that cannot be written, or without matplotlib.
    """
    try:
        drawn = blank(10, 7.5)
    except NoPlots as exc:
        raise InputError(str(exc)) from None
    names = [it.fleet.name.replace(", ", ",\n") for it in advice.outcomes]
    colours = ["tab:green" if it is advice.verdict.choice else "tab:gray" for it in advice.outcomes]
    kept, ttft, gaps = drawn.subplots(3, 1, sharex=True)
    kept.bar(names, [100 * it.met for it in advice.outcomes], color=colours)
    kept.set_ylabel("objectives kept, %")
    objectives = advice.question.objectives
    ttft.plot(names, [it.ttft_p50_ms for it in advice.outcomes], "o--", label="p50")
    ttft.plot(names, [it.ttft_p95_ms for it in advice.outcomes], "o-", label="p95")
    ttft.axhline(1e3 * objectives.ttft_s, color="tab:red", linewidth=0.8, label="objective")
    ttft.set_ylabel("TTFT, ms")
    gaps.plot(names, [it.itl_p95_ms for it in advice.outcomes], "o--", label="ITL p95")
    gaps.plot(names, [it.itl_p99_ms for it in advice.outcomes], "o-", label="ITL p99")
    gaps.plot(names, [it.tpot_p95_ms for it in advice.outcomes], "s-", label="TPOT p95")
    gaps.axhline(1e3 * objectives.tpot_s, color="tab:red", linewidth=0.8, label="TPOT objective")
    gaps.set_ylabel("between tokens, ms")
    for axes in (ttft, gaps):
        axes.set_yscale("log", subs=[2, 3, 5])  # With all of them, labels lie upon each other.
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend()
    gaps.tick_params(axis="x", rotation=30)
    drawn.suptitle(title)
    try:
        drawn.savefig(path)
    except OSError as exc:
        raise InputError(f"--plot {path}: {exc.strerror or exc}") from None
    except ValueError as exc:
        raise InputError(f"--plot {path}: {exc}") from None
