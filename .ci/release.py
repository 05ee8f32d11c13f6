"""`make release-check`: what would be published, built and tried as a stranger gets it.

Wheel and sdist are built (the wheel out of the sdist, so that nothing is in it that is not in the sdist too), each is
installed with all it needs in a venv that has nothing, and started in an empty folder. Without `--any-version` the
version must be one to release: in the changelog, and no development version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
_LEFT_OUT = frozenset({".editorconfig", ".gitignore"})
"""Of no use outside a checkout."""
_TRIED_OF_SDIST = ("tests/unit/test_shipped_configs.py", "tests/unit/test_layout.py", "tests/unit/test_audit.py")


class NotReady(Exception):
    """Why this cannot be released."""


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def changelog_problems(text: str, released: str | None) -> list[str]:
    """What is wrong with its headings. `released`: the version that must be its newest; None: any."""
    headings = _HEADING.findall(text)
    names = [name for name, _ in headings]
    said = []
    if names[:1] != ["Unreleased"]:
        said.append("the first heading is not [Unreleased]")
    said += [f"[{name}] has no date" for name, date in headings[1:] if not date]
    said += [
        f"[{name}] is no version" for name in names[1:] if not re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", name)
    ]
    dates = [date for _, date in headings[1:]]
    if dates != sorted(dates, reverse=True):
        said.append("the newest is not first")
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    said += [
        f"no such kind of change: {kind}"
        for kind in kinds - {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    ]
    if released is not None:
        if "dev" in released:
            said.append(f"{released} is a development version")
        if released not in names[1:2]:
            said.append(f"{released} is not its newest version")
    return said


def built(out: Path) -> tuple[Path, Path]:
    """(wheel, sdist)"""
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)], ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def missing_in(sdist: Path) -> list[str]:
    """Files of the repository that it has not; none where there is no git to ask."""
    listed = subprocess.run(  # noqa: S603
        [shutil.which("git") or "git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    with tarfile.open(sdist) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    return sorted(set(listed) - held - _LEFT_OUT)


def installed(package: Path, folder: Path, needs_of: Path | None = None) -> Path:
    """Its `warmroute`, in a new venv, with all it needs. `needs_of`: another venv that has these already."""
    venv.create(folder, with_pip=True)
    without = []
    if needs_of is not None:
        without = ["--no-deps"]
        (own,), (others,) = folder.glob("lib/python*/site-packages"), needs_of.glob("lib/python*/site-packages")
        (own / "needs.pth").write_text(f"{others}\n", encoding="utf-8")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *without]
    _run([*pip, str(package)], folder)
    return folder / "bin" / "warmroute"


def started(command: Path, empty: Path) -> None:
    said = _run([str(command), "--version"], empty).strip()
    if said != f"warmroute {version()}":
        raise NotReady(f"{command} --version says {said!r}")
    if "budget_bytes" not in _run([str(command), "config", "--print-default"], empty):
        raise NotReady(f"{command} config --print-default prints no configuration")


def demonstrated(command: Path, empty: Path) -> None:
    """The demo serves from the package alone: engines, gateway, page."""
    last = json.loads(_run([str(command), "demo", "--json"], empty).strip().splitlines()[-1])
    if not last:
        raise NotReady("the demo says nothing")


def tried(sdist: Path, folder: Path) -> None:
    """Some tests out of the sdist, on its own sources."""
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TRIED_OF_SDIST], root, PYTHONPATH=str(root))


def _run(command: list[str], folder: Path, **env: str) -> str:
    mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=mine | env)  # noqa: S603
    if done.returncode:
        raise NotReady(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build and try what would be published.")
    parser.add_argument("--any-version", action="store_true", help="a development version will do")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where wheel and sdist go (dist)")
    options = parser.parse_args(argv)
    began_s = time.monotonic()

    def done(what: str) -> None:
        print(f"release: {what} ({time.monotonic() - began_s:.0f} s)", flush=True)

    try:
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        if problems := changelog_problems(changelog, None if options.any_version else version()):
            raise NotReady("CHANGELOG.md: " + "; ".join(problems))
        shutil.rmtree(options.dist, ignore_errors=True)
        wheel, sdist = built(options.dist)
        if missing := missing_in(sdist):
            raise NotReady(f"not in the sdist: {', '.join(missing)}")
        done(f"built {wheel.name} and {sdist.name}")
        with tempfile.TemporaryDirectory() as folder:
            empty = Path(folder) / "empty"
            empty.mkdir()
            command = installed(wheel, Path(folder) / "of-wheel")
            started(command, empty)
            done("the wheel installs in a bare venv and starts")
            demonstrated(command, empty)
            done("warmroute demo runs")
            started(installed(sdist, Path(folder) / "of-sdist", needs_of=Path(folder) / "of-wheel"), empty)
            done("the sdist installs in a bare venv and starts")
            tried(sdist, Path(folder) / "unpacked")
            done("tests run out of the sdist")
    except NotReady as exc:
        print(f"release: NOT READY: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
