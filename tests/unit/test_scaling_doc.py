"""docs/scaling.md shows what the command makes of the figures that are kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.scale import command, kept, sizes, tables
from bench.scale.fleet import SCRAPE_S
from bench.scale.held import Held

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
FIGURES = kept.read(kept.MEASURED)


def shown(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", DOC, re.DOTALL)
    assert found is not None
    return found[1].strip()


def test_the_tables_are_the_commands_own() -> None:
    assert shown("sizes") == "\n".join(sizes.lines(FIGURES)).strip()
    assert shown("figures") == "\n".join(tables.lines(FIGURES)).strip()
    assert f"Measured on {kept.told(kept.MEASURED)}." in " ".join(DOC.split())


def test_the_costs_of_a_request_are_those_of_the_benchmark_of_proxies() -> None:
    page = (ROOT / "docs" / "proxy-benchmark.md").read_text(encoding="utf-8")
    assert {name: FIGURES[name] for name in kept.proxy_costs(page)} == kept.proxy_costs(page)
    with pytest.raises(ValueError, match="no figure of ours"):
        kept.proxy_costs("another page")


def test_the_load_and_the_fleet_are_as_the_page_says() -> None:
    load, limits, held = sizes.Load(), sizes.Limits(), Held()
    for text in (
        f"{load.requests_per_s:g} request of {load.chunks_per_request:g} chunks",
        f"{load.new_tokens_per_s:,.0f} tokens computed",
        f"holds {load.blocks:,}",
        f"with {limits.busy:g} of its core, {limits.gb:g} GB and a start within {limits.start_s:g} s",
        f"{held.workers} made-up workers hold {held.blocks:,} blocks each",
        f"that {held.sharers} of them share",
    ):
        assert text in " ".join(DOC.split())
    assert set(re.findall(r"--only (\w+)", DOC)) <= set(command.PARTS)
    assert f"once in {SCRAPE_S:g} s" in DOC
