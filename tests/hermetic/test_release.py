"""What would be published: built, installed in bare venvs, started (`make release-check`); and the changelog's form."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import IN_CI

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "release.py"
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_release", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wheel_and_sdist_install_in_bare_venvs_and_run(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--any-version", "--dist", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not IN_CI and any(said in done.stderr for said in ("No matching distribution", "ConnectionError")):
        pytest.skip("no package index to install from")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warmroute demo runs" in done.stdout
    assert {path.suffix for path in tmp_path.iterdir()} >= {".whl", ".gz"}


def test_the_changelog_has_its_form(release: ModuleType) -> None:
    assert release.changelog_problems(CHANGELOG, None) == []


def test_a_development_version_is_not_released(release: ModuleType) -> None:
    said = release.changelog_problems(CHANGELOG, "0.1.0.dev0")
    assert said == ["0.1.0.dev0 is a development version", "0.1.0.dev0 is not its newest version"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("## [0.1.0] - 2027-01-01\n", "the first heading is not [Unreleased]"),
        ("## [Unreleased]\n## [0.1.0]\n", "[0.1.0] has no date"),
        ("## [Unreleased]\n## [one] - 2027-01-01\n", "[one] is no version"),
        ("## [Unreleased]\n## [0.1.0] - 2027-01-01\n## [0.2.0] - 2027-02-01\n", "the newest is not first"),
        ("## [Unreleased]\n### News\n", "no such kind of change: News"),
    ],
)
def test_a_changelog_that_is_wrong(release: ModuleType, text: str, says: str) -> None:
    assert release.changelog_problems(text, None) == [says]


def test_one_that_is_right_is_released(release: ModuleType) -> None:
    text = "## [Unreleased]\n## [0.2.0] - 2027-02-01\n### Added\n## [0.1.0] - 2027-01-01\n"
    assert release.changelog_problems(text, "0.2.0") == []
    assert release.changelog_problems(text, "0.1.0") == ["0.1.0 is not its newest version"]
