"""deploy/docker without a Docker: its build steps in a bare folder, its health check on a gateway that runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from bench.engine.server import FakeVllm
from tests.support.command import Command
from tests.support.deployed import DEPLOY, ROOT
from tests.support.gateway_world import engine
from tests.support.sidecar_world import free_port

DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
INSTALLED = "/opt/warmroute"


def build_context(into: Path) -> None:
    """What .dockerignore lets through: it begins with `*`, names what comes back, and patterns for any depth."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    never = [line.removeprefix("**/") for line in lines[1:] if line.startswith("**/")]
    for line in lines[1:]:
        if line.startswith("!"):
            source = ROOT / line[1:]
            if source.is_dir():
                shutil.copytree(source, into / line[1:], ignore=shutil.ignore_patterns(*never))
            else:
                shutil.copy(source, into / line[1:])


def test_its_build_steps_install_the_command_and_leave_no_installer(tmp_path: Path) -> None:
    context, installed = tmp_path / "src", tmp_path / "opt"
    context.mkdir()
    build_context(context)
    stage = DOCKERFILE.split("\nFROM ")[1]
    (step,) = re.findall(r"^RUN (.*)$", stage, re.MULTILINE)
    step = step.replace(INSTALLED, str(installed)).replace("python -m venv", f"{sys.executable} -m venv")
    done = subprocess.run(["/bin/sh", "-c", step], cwd=context, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "empty").mkdir()
    bare = {"PATH": f"{installed}/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path / "empty", env=bare, capture_output=True, text=True, check=False)

    assert run("warmroute", "version").stdout.startswith("warmroute ")
    assert "budget_bytes" in run("warmroute", "config", "--print-default").stdout
    assert run("python", "-m", "pip", "--version").returncode != 0
    names = {path.name for path in installed.rglob("*") if path.is_dir()}
    assert "gateway" in names
    assert not [path for path in installed.rglob("*") if fnmatch(path.name, "test_deploy_*")]


async def test_its_health_check_tells_a_live_gateway_from_none() -> None:
    found = re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    command = json.loads(found[1])
    assert command[0] == "python"

    def is_healthy(url: str) -> bool:
        done = subprocess.run(
            [sys.executable, *command[1:]], env={**os.environ, "HEALTH_URL": url}, capture_output=True, check=False
        )
        return done.returncode == 0

    async with FakeVllm(engine()) as worker, Command("gateway", "--worker", worker.url) as gateway:
        assert await asyncio.to_thread(is_healthy, gateway.url + "/livez")
        assert not await asyncio.to_thread(is_healthy, f"http://127.0.0.1:{free_port()}/livez")
    assert "HEALTH_URL=http://127.0.0.1:8000/livez" in DOCKERFILE
