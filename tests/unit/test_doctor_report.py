"""doctor: codes and their page, what is printed, the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.doctor.catalogue import RULES, finding
from gateway.doctor.command import worker_url
from gateway.doctor.findings import Report, Severity
from gateway.doctor.report import as_document, as_text, exit_code

ROOT = Path(__file__).parents[2]


def rows_of_the_page() -> list[list[str]]:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").partition("## Findings")[2].splitlines()
    return [line.strip("| ").split(" | ") for line in page if line.startswith("| `")]


def test_the_page_lists_every_code_as_it_is() -> None:
    assert [(code.strip("`"), severity, meaning, fix) for code, severity, _, meaning, fix in rows_of_the_page()] == [
        (code, rule.severity.name.lower(), rule.meaning, rule.fix or "-") for code, rule in RULES.items()
    ]


def test_the_page_has_an_example_of_each_with_its_evidence() -> None:
    examples = {row[0].strip("`"): row[2] for row in rows_of_the_page()}
    assert all(examples.values())
    shown = {code: json.loads(text[text.index("`{") + 1 : -1]) for code, text in examples.items() if "`{" in text}
    assert shown["lease-short"] == {"lease_s": 10.0, "pd_lease_s": 30.0}
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "gateway" / "doctor").glob("*.py"))
    assert [(name, key) for name, evidence in shown.items() for key in evidence if f'"{key}"' not in code] == []


def test_every_code_is_used_and_has_a_test() -> None:
    tests = [p for p in (ROOT / "tests").rglob("test_doctor*.py") if p != Path(__file__).resolve()]
    tested = "".join(path.read_text(encoding="utf-8") for path in tests)
    code = "".join(
        p.read_text(encoding="utf-8") for p in (ROOT / "gateway" / "doctor").glob("*.py") if p.stem != "catalogue"
    )
    assert [name for name in RULES if f'"{name}"' not in tested] == []
    assert [name for name in RULES if f'"{name}"' not in code] == []


def test_every_rule_tells_what_to_do() -> None:
    for code, rule in RULES.items():
        assert rule.meaning.endswith("."), code
        assert bool(rule.fix) == (rule.severity is not Severity.OK), code


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([], 0), (["reachable", "clock-skew"], 0), (["clock-skew", "replay-off"], 1), (["replay-off", "asleep"], 2)],
)
def test_exit_code(codes: list[str], expected: int) -> None:
    assert exit_code(Report({"w": [finding(code, "w", "s") for code in codes]}, [])) == expected
    assert exit_code(Report({}, [finding(code, "", "s") for code in codes])) == expected


def report() -> Report:
    first = [finding("reachable", "http://a", "fine"), finding("rank-silent", "http://a", "quiet", rank=1)]
    return Report(
        {"http://a": first, "http://b": [finding("replay-off", "http://b", "none")]}, [finding("url-twice", "", "x")]
    )


def test_text_is_grouped_aligned_and_worst_first() -> None:
    lines = as_text(report(), colour=False).splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "http://a",
        "http://b",
        "all workers",
        "2 workers: 1 error, 2 warnings",
    ]
    assert lines[1].startswith("  error    rank-silent  rank 1: quiet. ")
    assert lines[2].startswith("  ok       reachable    fine.")
    assert "Fix: " in lines[1]
    assert "\x1b" not in "".join(lines)
    assert "\x1b[31merror" in as_text(report(), colour=True)


def test_document_is_json() -> None:
    document = json.loads(json.dumps(as_document(report())))
    assert document["exit_code"] == 2
    assert document["workers"]["http://a"][1]["rank"] == 1
    assert document["fleet"][0]["code"] == "url-twice"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("http://Host:8000/", "http://host:8000"),
        ("https://[::1]:8443", "https://[::1]:8443"),
        ("vllm", "http://vllm"),
    ],
)
def test_worker_url(text: str, url: str) -> None:
    assert worker_url(text) == url


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["ftp://x"],
        ["http://x:99999"],
        ["http://x/v1"],
        ["http://user:hunter2@x"],
        ["http://x", "--timeout-s", "0"],
        ["http://x", "--timeout-s", "nan"],
        ["http://x", "--tokenizer", "/no/such"],
        ["http://x", "--events", "5557"],
        ["http://x", "--events", "tcp://x"],
        ["http://x", "http://y", "--events", "tcp://x:1"],
        ["http://x", "--events", "tcp://x:1", "--events", "tcp://x:2"],
        ["http://x", "--replay", "tcp://*:1"],
    ],
)
def test_bad_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *args]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("warmroute: error: ")
    assert "hunter2" not in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
