"""docs/debug-page.md names what there is, and its pictures are there."""

import re
from pathlib import Path

from gateway.debug.decisions import KEPT
from gateway.debug.saved import MOST_BLOCKS
from gateway.debug.state import SHOWN_DECISIONS
from gateway.debug.stream import MOST_VIEWERS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "debug-page.md").read_text()


def test_figures_are_those_of_the_code() -> None:
    assert f"{MOST_VIEWERS} may watch at once" in PAGE
    assert f"({KEPT} are kept)" in PAGE
    assert f"the last {SHOWN_DECISIONS}:" in PAGE
    assert f"At most {MOST_BLOCKS // 1_000_000} million blocks" in PAGE


def test_pictures_are_there_and_small() -> None:
    named = set(re.findall(r"\(images/([\w.-]+)\)", PAGE))
    there = {file.name for file in (DOCS / "images").glob("debug-page-*.png")}
    assert named == there
    for name in there:
        assert (DOCS / "images" / name).stat().st_size < 200_000
