"""`make audit`: what was not checked is never told as clean, and what bandit leaves out ruff looks at."""

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def report(*dependencies: dict[str, object]) -> str:
    return json.dumps({"dependencies": dependencies, "fixes": []})


CLEAN = {"name": "yarl", "version": "1", "vulns": []}
BAD = {"name": "jinja2", "version": "3", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1"], "aliases": []}]}
UNKNOWN = {"name": "uvloop", "skip_reason": "Dependency not found on PyPI and could not be audited: uvloop (1)"}
OURS = {"name": "warmroute", "skip_reason": "distribution marked as editable"}


def test_clean(audit: ModuleType) -> None:
    read = audit.read(report(CLEAN, OURS))
    assert (read.exit_code, read.unchecked) == (0, {})
    assert read.lines() == ["audit: 1 packages checked, 0 vulnerabilities"]


def test_a_vulnerability_fails_and_says_what_mends_it(audit: ModuleType) -> None:
    read = audit.read(report(CLEAN, BAD))
    assert read.exit_code == 1
    assert read.lines()[0] == "audit: VULNERABLE: jinja2 3: PYSEC-1, fixed in 3.1"


def test_what_a_venv_brings_along_is_told_and_fails_nothing(audit: ModuleType) -> None:
    read = audit.read(report(CLEAN, {**BAD, "name": "pip", "version": "23.2.1"}))
    assert read.exit_code == 0
    assert "pip 23.2.1: PYSEC-1" in read.lines()[0]


def test_what_the_service_does_not_know_is_not_told_as_clean(audit: ModuleType) -> None:
    read = audit.read(report(UNKNOWN, OURS))
    assert read.exit_code == 0
    (line,) = read.lines()
    assert "NOT CHECKED" in line


def test_no_service_fails_nothing_and_says_so(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(service: str) -> None:
        raise ValueError(f"{service}: no such host")

    monkeypatch.setattr(audit, "run", none)
    assert audit.main() == 0
    said = capsys.readouterr().out
    assert "NOT CHECKED" in said
    assert "osv: no such host" in said


def test_a_service_that_knows_nothing_is_followed_by_the_next(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"pypi": report(UNKNOWN), "osv": report(BAD)}
    monkeypatch.setattr(audit, "run", lambda service: audit.read(answers[service]))
    assert audit.main() == 1


def test_what_bandit_leaves_out_ruff_looks_at() -> None:
    left_out = set(TOOLS["bandit"]["skips"]) - {"B404"}
    lint = TOOLS["ruff"]["lint"]
    assert "S" in lint["select"]
    assert "ignore" not in lint
    ignored = {rule for rules in lint["per-file-ignores"].values() for rule in rules} - {"S"}
    assert {rule.replace("S", "B") for rule in ignored} <= left_out
    assert left_out <= {"B101", "B104", "B105", "B310", "B311", "B603"}  # S101 and so on: the same numbers.
