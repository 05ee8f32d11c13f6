"""Declared run-time dependencies and third-party imports are the same set."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "scorer", "indexer", "bench")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requirements}


def third_party_imports() -> dict[str, str]:
    """Top-level module -> one file that imports it."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    modules = [node.module or ""]
                for module in modules:
                    top = module.partition(".")[0]
                    if top not in (*PACKAGES, *sys.stdlib_module_names):
                        found.setdefault(top, str(path.relative_to(ROOT)))
    return found


RUNTIME = names(PROJECT["dependencies"])
NEVER_IMPORTED = ("dev", "docs", "engine")
OPTIONAL = set().union(*(names(v) for k, v in PROJECT["optional-dependencies"].items() if k not in NEVER_IMPORTED))


def test_every_third_party_import_is_declared() -> None:
    brings = packages_distributions()
    undeclared = {
        f"{module} ({file})"
        for module, file in third_party_imports().items()
        if not {normal(d) for d in brings.get(module, [])} & (RUNTIME | OPTIONAL)
    }
    assert undeclared == set()


def test_every_runtime_dependency_is_imported() -> None:
    brings = packages_distributions()
    imported = {normal(d) for module in third_party_imports() for d in brings.get(module, [])}
    assert RUNTIME - imported == set()


def test_every_runtime_dependency_has_a_lower_and_an_upper_bound() -> None:
    assert [r for r in PROJECT["dependencies"] if ">=" not in r or "<" not in r] == []
