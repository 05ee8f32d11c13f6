"""The house rules that can be read off the source: which way imports point, and that the core does no I/O."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "scorer", "indexer", "bench")

# Package -> the packages of ours it may import.
ALLOWED = {
    "indexer": {"indexer"},
    "scorer": {"scorer", "indexer"},
    "bench": {"bench", "scorer", "indexer"},
    "gateway": {"gateway", "scorer", "indexer"},
}
# ... and those it may import only inside a function, so that serving never loads them.
ALLOWED_LAZILY = {"gateway": {"bench"}}

PURE = {"indexer", "scorer"}
# fmt: off
IO_MODULES = {
    "aiohttp", "asyncio", "concurrent", "datetime", "fcntl", "http", "io", "logging", "mmap", "multiprocessing", "os",
    "pathlib", "queue", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket", "socketserver",
    "ssl", "subprocess", "syslog", "tempfile", "threading", "time", "urllib", "uuid", "uvloop", "zmq",
}
# fmt: on
IO_CALLS = {"open", "print", "input"}


def violations(package: str, source: str) -> list[str]:
    """What `source`, a module of `package`, does against the rules; one text each."""
    found = []
    tree = ast.parse(source)
    in_function = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    for node, module, names in imports(tree):
        top = module.partition(".")[0]
        lazily = ALLOWED_LAZILY.get(package, set()) if id(node) in in_function else set()
        if top in (*PACKAGES, "tests", "proto") and top not in ALLOWED[package] | lazily:
            found.append(f"line {node.lineno}: {package} imports {module}")
        if package in PURE and is_io(package, top, names):
            found.append(f"line {node.lineno}: {package} imports {module} ({', '.join(names) or 'all'})")
    if package in PURE:
        found += [f"line {node.lineno}: {package} uses {what}" for node, what in impure_uses(package, tree)]
    return found


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str, list[str]]]:
    """(node, absolute module, names taken from it); a relative import stays inside its package and is left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, []
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node, node.module or "", [alias.name for alias in node.names]


def is_io(package: str, top: str, names: list[str]) -> bool:
    if top == "threading":
        return package != "indexer" or any(name != "Lock" for name in names)
    if top == "random":
        return any(name != "Random" for name in names)
    return top in IO_MODULES


def impure_uses(package: str, tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = node.value.id
            if (owner == "random" and node.attr != "Random") or (owner == "threading" and node.attr != "Lock"):
                yield node, f"{owner}.{node.attr}"
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if isinstance(node.func, ast.Name) and called in IO_CALLS:
                yield node, f"{called}()"
            if called == "Random" and not node.args:
                yield node, "an unseeded Random()"


def modules() -> list[Path]:
    return sorted(
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "pb" not in path.parts
    )


@pytest.mark.parametrize("path", modules(), ids=str)
def test_module_keeps_the_rules(path: Path) -> None:
    assert violations(path.parts[0], (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("indexer", "import scorer"),
        ("indexer", "from gateway.config import Config"),
        ("scorer", "import gateway.cli"),
        ("scorer", "def f():\n    import bench.micro"),
        ("bench", "def f():\n    from gateway import cli"),
        ("gateway", "import bench"),
        ("gateway", "from bench.engine import model"),
        ("gateway", "if TYPE_CHECKING:\n    import bench"),
        ("gateway", "import tests.conftest"),
        ("scorer", "import socket"),
        ("scorer", "from threading import Lock"),
        ("indexer", "from threading import Thread"),
        ("indexer", "import threading\nt = threading.Thread()"),
        ("indexer", "from time import monotonic"),
        ("indexer", "def f():\n    import time"),
        ("scorer", "import logging"),
        ("scorer", "import os.path"),
        ("scorer", "import concurrent.futures"),
        ("scorer", "from random import choice"),
        ("scorer", "import random\nx = random.random()"),
        ("scorer", "import random\nx = random.Random()"),
        ("scorer", "from random import Random\nx = Random()"),
        ("indexer", "def f():\n    open('x')"),
        ("indexer", "print('x')"),
    ],
)
def test_checker_finds(package: str, source: str) -> None:
    assert len(violations(package, source)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("gateway", "def f():\n    from bench import demo"),
        ("gateway", "import time, socket, scorer, indexer.events"),
        ("bench", "import time\nimport scorer.planner"),
        ("scorer", "import random\ndef f(rng: random.Random, x=random.Random(1)): return rng.random()"),
        ("scorer", "from random import Random\nfrom . import cost"),
        ("indexer", "from threading import Lock"),
        ("indexer", "import threading\nlock = threading.Lock()"),
        ("indexer", "import xxhash, msgspec, array, heapq"),
    ],
)
def test_checker_accepts(package: str, source: str) -> None:
    assert violations(package, source) == []


def test_every_package_is_typed() -> None:
    assert [p for p in PACKAGES if not (ROOT / p / "py.typed").is_file()] == []


def test_proto_holds_sources_only() -> None:
    assert [p.name for p in (ROOT / "proto").rglob("*") if p.is_file() and p.suffix not in (".proto", ".md")] == []
