"""docs/benchmarks.md is of the form its generator makes; the figures are not held, they are a run's."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from bench.sim import grid
from bench.sim.ahead import Ahead
from bench.sim.figure import Figure, Judged
from bench.sim.fleet import FleetSpec, servers
from bench.sim.jobs import Jobs
from bench.sim.kept import Kept
from bench.sim.page import HEAD, SECTIONS, TARGET_HEADS, VALIDATION_HEADS, How, commit, page, with_validation
from bench.sim.tables import COLUMNS, CONTROLS, SUMMARY_HEADS
from bench.sim.targets import Target
from bench.sim.workloads.generated import Mixed

DOC = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
ARM_HEADS = ("arm", *(name for name, _ in COLUMNS))
HOW = How(("3",), full=True)


def tiny(name: str) -> grid.Cell:
    return grid.Cell(
        name,
        FleetSpec(servers("h200-7b", prefill=1, decode=1), pd_policy=grid.PD_POLICY),
        lambda seed: Mixed(seed, rate=4.0, duration_s=2.0),
        ("warmroute",),
        ("warmroute", "clairvoyant", *CONTROLS),
        1,
        2,
    )


@pytest.fixture(scope="module")
def made() -> str:
    """The page of a tiny sweep."""
    tabled, other = tiny("mixed 3/s"), tiny("azure 1P3D 40/s")
    with Jobs(1) as jobs:
        sweep = Ahead(jobs, Kept(None, grid.Traces()), full=True)

        def ask() -> list[Target]:
            sweep.each([lambda: sweep.need(tabled, tabled.all_arms), lambda: sweep.need(other, ("warmroute",))])
            return [Target("3 a", "x >= 1", 2.0, True), Target("3 b", "x >= 1", 0.5, False, "half", "it is slow")]

        ((_, worked),) = sweep.work({"3": ask})
    figures = [
        Figure("a row", "p50", 10, 11, 0.15),
        Figure("a row", "p99", 10, 20, 0.3, (5, 30), "so it is"),
        Figure("a row", "p95", 10, 20, 0.3),
    ]
    return page(sweep, worked.answer, HOW, [Judged("a table", figures)])


def sections(text: str) -> dict[str, str]:
    return {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}


def heads(text: str) -> list[tuple[str, ...]]:
    """The first row of each table."""
    lines = text.splitlines()
    return [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line, below in pairwise(lines)
        if line.startswith("|") and below.startswith("|---")
    ]


def test_a_page_has_all_sections_and_columns(made: str) -> None:
    assert made.startswith("\n".join(HEAD))
    assert tuple(sections(made)) == SECTIONS
    assert "- `python -m bench trace targets --full --only 3`\n" in sections(made)["What was run"]
    assert heads(sections(made)["Targets"]) == [TARGET_HEADS]
    assert heads(sections(made)["Cells"]) == [SUMMARY_HEADS, ARM_HEADS]
    assert heads(sections(made)["Searches and variations"]) == [("cell", *ARM_HEADS)]
    assert heads(sections(made)["Validation"]) == [VALIDATION_HEADS]


def test_a_page_shows_every_arm_with_its_spread_and_regret(made: str) -> None:
    cell = sections(made)["Cells"].partition("### mixed 3/s")[2]
    rows = [line.split(" | ") for line in cell.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip("| ") for row in rows] == ["warmroute", "clairvoyant", *CONTROLS]
    regrets = {row[0].strip("| "): row[-1].strip(" |") for row in rows}
    assert regrets["clairvoyant"] == "+0.000 / +0.0%"
    assert all(row[1].count("±") == 1 for row in rows)
    assert all(len(row) == len(ARM_HEADS) for row in rows)


def test_a_page_sums_up_each_cell(made: str) -> None:
    (row,) = [line for line in sections(made)["Cells"].splitlines() if line.startswith("| mixed 3/s |")]
    assert len(row.strip("|").split("|")) == len(SUMMARY_HEADS)
    assert row.count("(least-load)") + row.count("(longest-prefix)") == 1


def test_a_page_says_why_a_target_is_missed(made: str) -> None:
    assert "| 3 b | x >= 1 | 0.500 | **no** | half. Why: it is slow |" in made
    assert "| 3 a | x >= 1 | 2.000 | yes |  |" in made
    assert "1 of 2 met" in made


def test_a_page_tells_explained_from_unexplained(made: str) -> None:
    assert "Of 3 figures 1 are within; of the others\n1 are explained" in made
    assert "| 5 to 30 | so it is |" in made
    assert made.count("**not explained**") == 1


def test_the_last_section_alone_can_be_made_anew(made: str) -> None:
    found = with_validation(made, [Judged("another table", [Figure("its row", "p50", 10, 11, 0.15)])])
    before, now = sections(made), sections(found)
    assert {name: text for name, text in now.items() if name != "Validation"} == {
        name: text for name, text in before.items() if name != "Validation"
    }
    assert "Of 1 figures 1 are within" in now["Validation"]
    assert "| another table | its row |" in now["Validation"]
    assert "a row" not in now["Validation"]
    with pytest.raises(ValueError, match="no page of this form"):
        with_validation("# Another page\n\n## Validation\n", [])


def test_a_page_names_the_commit_that_made_it(made: str) -> None:
    assert re.fullmatch(r"no checkout|commit [0-9a-f]{7,}( with changes)?", commit())
    assert commit() in sections(made)["What was run"]
    assert commit() in sections(made)["Validation"]


def test_a_page_names_no_place_of_the_machine_that_made_it(made: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    with Jobs(1) as jobs:
        text = page(Ahead(jobs, Kept(None, grid.Traces())), [], How((), True, mooncake=trace), [])
    assert str(tmp_path) not in text
    assert "recorded, sha256" in text
    assert "generated in its likeness" in text


def test_the_committed_page_is_of_this_form() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert text.startswith("\n".join(HEAD)), "made by another generator: run the command in its head again"
    assert tuple(sections(text)) == SECTIONS
    assert heads(sections(text)["Targets"]) == [TARGET_HEADS]
    summary, *each = heads(sections(text)["Cells"])
    assert summary == SUMMARY_HEADS
    assert set(each) == {ARM_HEADS}
    assert heads(sections(text)["Searches and variations"]) == [("cell", *ARM_HEADS)]
    assert heads(sections(text)["Validation"]) == [VALIDATION_HEADS]
    for section in ("What was run", "Validation"):
        assert re.search(r"commit [0-9a-f]{7}", sections(text)[section]), "of which code are its figures?"
