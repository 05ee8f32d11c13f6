"""gateway/pb is what `make proto` makes of proto/."""

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PB = ROOT / "gateway" / "pb"
NAMES = sorted(path.stem for path in (ROOT / "proto").glob("*.proto"))


def compiler() -> str:
    """The version `make proto` takes."""
    found = re.search(r"grpcio-tools==([\d.]+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def test_every_source_is_generated_and_nothing_else_is() -> None:
    expected = {"__init__.py"} | {f"{name}_pb2{suffix}" for name in NAMES for suffix in (".py", ".pyi")}
    assert {path.name for path in PB.iterdir() if path.is_file()} == expected


def test_generating_anew_changes_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None or version("grpcio-tools") != compiler():
        pytest.skip(f"grpcio-tools {compiler()} is not installed (make proto has a venv of its own for it)")
    sources = [f"gateway/pb/{name}.proto" for name in NAMES]
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "gateway/pb=proto", *out, *sources]
    subprocess.run(command, cwd=ROOT, check=True)
    made = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "gateway" / "pb").iterdir()}
    assert made == {name: (PB / name).read_text(encoding="utf-8") for name in made}


@pytest.mark.parametrize("name", NAMES)
def test_messages_are_in_packages_of_our_own(name: str) -> None:
    """Another copy of Envoy's API, or of gRPC's health, may be in the same process."""
    assert f"package warmroute.{name}." in (ROOT / "proto" / f"{name}.proto").read_text(encoding="utf-8")
