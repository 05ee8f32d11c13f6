"""The wheel ships our four packages and nothing else, and its command runs from an empty folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"gateway", "indexer", "scorer", "bench"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = out.glob("*.whl")
    return zipfile.Path(file)


def test_top_level_names(wheel: zipfile.Path) -> None:
    names = {entry.name for entry in wheel.iterdir()}
    (dist_info,) = names - PACKAGES
    assert names >= PACKAGES
    assert dist_info.startswith("warmroute-")
    assert dist_info.endswith(".dist-info")


def test_contents(wheel: zipfile.Path) -> None:
    names = wheel.root.namelist()
    assert [n for n in names if n.endswith((".proto", ".pyc")) or "test" in n.split("/")[0]] == []
    assert {p for p in PACKAGES if f"{p}/py.typed" in names} == PACKAGES
    on_disk = {
        str(f.relative_to(ROOT)) for p in PACKAGES for f in (ROOT / p).rglob("*") if f.suffix in (".py", ".html")
    }
    assert on_disk <= set(names)
    (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
    assert "warmroute = gateway.cli:main" in wheel.root.read(entry_points).decode()
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_command_runs_from_an_empty_folder(wheel: zipfile.Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    wheel.root.extractall(site)
    empty.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")} | {"PYTHONPATH": str(site)}

    def run(*args: str) -> str:
        return subprocess.run(
            [sys.executable, *args], cwd=empty, env=env, capture_output=True, text=True, check=True
        ).stdout

    assert run("-c", "import gateway; print(gateway.__file__)").startswith(str(site))
    assert "budget_bytes" in run("-m", "gateway", "config", "--print-default")
    assert run("-m", "gateway", "version").startswith("warmroute 0.")
