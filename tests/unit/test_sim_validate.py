"""The simulator beside measurements: how many figures agree, and that what is said of the others is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from bench.sim import against, measured, mixed_load, validate
from bench.sim.figure import Figure, Table
from bench.sim.jobs import Jobs
from bench.sim.mixed_load import draw, mixed, rarity, seeds
from bench.sim.validate import TABLES
from bench.sim.workloads.generated import Mixed

QUICK = [it for it in TABLES if it.name not in ("mixed load", "decode step")]


@pytest.mark.parametrize("table", QUICK, ids=lambda it: it.name)
def test_the_simulator_agrees_with_what_was_measured(table: Table) -> None:
    with Jobs(1) as jobs:
        off = [figure for figure in table.figures(jobs) if not figure.close]
    assert not [(it.row, it.column, it.deviation) for it in off if it.unexplained]
    assert len(off) <= 2


def test_a_reason_is_given_only_to_what_is_off_and_only_if_shown() -> None:
    off, close = Figure("r", "c", 10, 20, 0.15), Figure("r", "c", 10, 11, 0.15)
    assert off.because(True, "so").explained
    assert off.because(False, "so").unexplained
    assert off.because(True, "so").because(True, "other").reason == "so"
    assert not close.because(True, "so").reason
    assert not close.explained
    assert not close.unexplained


def test_near_allows_for_the_tolerance_and_the_measurement_s_own_error() -> None:
    figure = Figure("r", "c", 100, 80, 0.15)
    assert figure.near(85)
    assert not figure.near(84)
    assert figure.near(84, noise=2)
    assert figure.near(116, noise=2)
    assert not figure.near(118, noise=2)


def test_the_noise_of_the_suffixes_is_half_of_what_cannot_fall() -> None:
    assert against._least_noise({0: {1: (10, 0, 20), 2: (10, 0, 50), 3: (10, 0, 30)}}) == 10.0
    assert against._least_noise({0: {1: (10, 0, 20), 2: (10, 0, 50)}}) == 0.0


def test_draws_have_as_many_requests_as_were_measured() -> None:
    first = next(iter(seeds(3)))
    assert len(Mixed(first, rate=3)) == measured.MIXED_REQUESTS[3] == 69


def test_each_long_pull_counted_twice_makes_the_tail_longer_and_no_more() -> None:
    found = draw(3, "disagg", next(iter(seeds(3))))
    p99 = found.figures[mixed_load.NAMES.index("ITL p99")]
    p50 = found.figures[mixed_load.NAMES.index("ITL p50")]
    assert p99 < found.itl_p99 <= p50 + measured.OUTSIDE[8192] * 9000 / 8192


def test_rarity_is_two_sided_and_never_nought() -> None:
    values = [float(n) for n in range(99)]
    assert rarity(-1.0, values) == rarity(99.0, values) == 0.02
    assert rarity(0.0, values) == rarity(98.0, values) == 0.04
    assert rarity(49.0, values) == 1.0
    assert rarity(1.0, [1.0] * 9) == 1.0


def test_a_measurement_no_draw_comes_near_is_not_explained_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MIXED_REQUESTS", {3: 69})
    rows = {key: list(row) for key, row in measured.MIXED.items() if key[0] == 3}
    rows[3, "agg"][2] = 2000
    monkeypatch.setattr(measured, "MIXED", rows)
    with Jobs(1) as jobs:
        found = {(it.row, it.column): it for it in mixed(jobs, draws=12)}
    assert len(found) == 24
    assert found["3/s agg", "TTFT p50 long"].unexplained
    assert found["3/s agg", "TTFT p50 short"].close
    assert all(it.interval is not None and it.interval[0] <= it.simulated <= it.interval[1] for it in found.values())


def test_the_command_counts_and_fails_by_what_is_unexplained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [Figure("r", "close", 10, 11, 0.15), Figure("r", "told", 10, 20, 0.15, (9, 30), "so it is")]

    def table(jobs: Jobs) -> Iterator[Figure]:
        yield from figures

    monkeypatch.setattr(validate, "TABLES", [Table("one", table)])
    assert validate.main(["--json", "--jobs", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "1 of 2 within tolerance, 1 explained, 0 unexplained" in lines
    assert any("explained: so it is" in line for line in lines)
    assert any(line.startswith("not compared: mixed load, 1P2D at 4/s") for line in lines)
    assert json.loads(last)["not_compared"] == list(measured.NOT_SIMULATED)
    assert [each["met"] for each in json.loads(last)["targets"]] == [False, True]
    figures.append(Figure("r", "strange", 10, 20, 0.15))
    assert validate.main(["--json", "--jobs", "1"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert any("UNEXPLAINED" in line for line in lines)
    assert json.loads(last)["targets"][1] == {
        "name": "off and unexplained", "goal": "<= 0", "measured": 1, "met": False,
    }  # fmt: skip
    with pytest.raises(SystemExit):
        validate.main(["--table", "nothing"])
    assert "there is: one" in capsys.readouterr().err
