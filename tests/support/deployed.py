"""Where deploy/ is, and the tools its files are checked by: needed in CI, elsewhere a reason to skip."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support import IN_CI

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def tool(name: str, where: str) -> str:
    """The path of a command, that of this environment first. `where` says how to get it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        if IN_CI:
            pytest.fail(f"{name} is missing ({where})")
        pytest.skip(f"{name} is not installed ({where})")
    return found
