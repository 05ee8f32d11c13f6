"""docs/epp-cases.md names every case there is, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.epp_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/epp-cases.md").read_text(encoding="utf-8")
LLM_D = {1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26}
GAIE = {28, 29, 31, 32, 34, 35, 37, 38}
WITHOUT_A_TEST = {
    "HTTPRouteInvalidInferencePoolRef",
    "InferencePoolAccepted",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolInvalidEPPService",
    "InferencePoolMissingEPPRef",
    "InferencePoolResolvedRefsCondition",
}
N_CONFORMANCE = 14


def rows(section: str) -> dict[str, str]:
    """What stands behind the first cell, by it."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\w+) \|(.*)$", text, re.M)
    by_name = {name: rest for name, rest in found if name != "case"}
    assert len(by_name) == sum(name != "case" for name, _ in found), section
    return by_name


def named(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"`(tests/\S+?)::(test_\w+)`", text))


def test_every_case_of_other_pickers_has_a_test_and_each_of_the_table_is_there() -> None:
    numbers = {int(match[0]) for case in CASES if (match := re.match(r"\d+", case.name))}
    for section, cases in (("llm-d's integration tests", LLM_D), ("GAIE's reference picker", GAIE)):
        found = rows(section)
        assert set(map(int, found)) == cases
        for number, rest in found.items():
            in_table = rest.rpartition("| table")[1] == "| table"
            assert in_table or named(rest), number
            assert not in_table or int(number) in numbers, number
    assert numbers - {12} <= LLM_D | GAIE  # 12 is ours: a subset of nobody.


def test_every_pitfall_has_a_test_of_its_number() -> None:
    found = rows("What Envoy does")
    assert set(map(int, found)) == set(range(1, 26))
    for number, rest in found.items():
        tests = named(rest)
        assert tests, number
        assert any(f"_{int(number):02}_" in name for _, name in tests), number


def test_every_case_of_the_conformance_suite_is_there() -> None:
    found = rows("GAIE's conformance suite")
    assert len(found) == N_CONFORMANCE
    assert {name for name, rest in found.items() if not named(rest)} == WITHOUT_A_TEST


def test_every_test_that_is_named_exists_and_none_with_a_number_is_left_out() -> None:
    on_page = named(PAGE)
    assert len(on_page) > 50
    for path, name in on_page:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M), f"{path}::{name}"
    for file in (*ROOT.glob("tests/hermetic/test_e*.py"), *ROOT.glob("tests/unit/test_e*.py")):
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"^(?:async )?def (test_(?:envoy_\d\d|case_\d+)_\w+)\(", text, re.M):
            assert (str(file.relative_to(ROOT)), name) in on_page, name
