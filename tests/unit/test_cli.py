"""The command: its table, its exit codes and how it reports what the user can put right."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from bench import __main__ as bench_command
from gateway import cli
from gateway.config import Config
from gateway.errors import UserError


def test_every_registered_command_exists_and_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        module, _, function = command.target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name
        assert name in shown
        assert command.summary in shown


@pytest.mark.parametrize("args", [["--help"], ["version"]])
def test_help_and_version_import_nothing_heavy(args: list[str]) -> None:
    code = (
        f"import sys; from gateway.cli import main; main({args!r});"
        "print(sorted({'msgspec', 'yaml', 'asyncio', 'aiohttp', 'zmq', 'xxhash', 'gateway.config'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


@pytest.mark.parametrize("args", [["version"], ["--version"]])
def test_version(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 0
    assert capsys.readouterr().out.startswith("warmroute 0.")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["confg"], "warmroute: error: no command named confg; did you mean config?\n"),
        (["zzzzzz"], "warmroute: error: no command named zzzzzz; see warmroute --help\n"),
        (["version", "--jsn"], "warmroute: error: unknown argument --jsn\n"),
        (["config", "--check"], "warmroute: error: argument --check: expected one argument\n"),
        (["config", "--check", "/no/such"], "warmroute: error: /no/such: No such file or directory\n"),
        (
            ["config", "--index-budget-byte=1"],
            "warmroute: error: command line: --index-budget-byte: unknown argument; "
            "did you mean --index-budget-bytes?\n",
        ),
        (["config", "--gateway-prot", "5", "junk"], None),
        (
            ["config", "--print-default", "--gateway-port", "1"],
            "warmroute: error: --print-default takes no other argument than --json, "
            "got --print-default --gateway-port 1\n",
        ),
        (
            ["config", "--check", "a", "--config", "b"],
            "warmroute: error: --check and --config each name a file; give one of them\n",
        ),
    ],
)
def test_user_errors_are_plain_lines_and_exit_code_2(
    args: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    if message is None:  # the value of an unknown flag is not a second mistake; a stray word is
        assert [line.split(": ")[3] for line in shown.err.splitlines()] == ["--gateway-prot", "junk"]
    else:
        assert shown.err == message


def test_no_command_is_an_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: warmroute COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("one\ntwo"), 2, "warmroute: error: one\nwarmroute: error: two\n"),
        (FileNotFoundError(2, "No such file or directory", "x.bin"), 2, "warmroute: error: x.bin: No such file"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(0), 0, ""),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    raised: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(args: Sequence[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "version", command)
    assert cli.main(["version"]) == code
    assert capsys.readouterr().err.startswith(message)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(args: Sequence[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "version", command)
    with pytest.raises(ZeroDivisionError):
        cli.main(["version"])


@pytest.mark.parametrize("args", [["config", "--print-default"], ["version"], ["--help"]])
def test_reader_that_left_is_no_error(args: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gateway", *args], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_config_print_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--print-default"]) == 0
    as_yaml = yaml.safe_load(capsys.readouterr().out)
    assert cli.main(["config", "--print-default", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == as_yaml
    assert as_yaml["gateway"]["port"] == Config().gateway.port


def test_config_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("workers: [http://a:8000]\n")
    assert cli.main(["config", "--check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    monkeypatch.setenv("WARMROUTE_INDEX__ORPHAN_BLOCKS", "few")
    assert cli.main(["config", "--check", str(file)]) == 2
    assert "WARMROUTE_INDEX__ORPHAN_BLOCKS" in capsys.readouterr().err
    assert cli.main(["config", "--check", str(file), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert [p["key"] for p in answer["problems"]] == ["index.orphan_blocks"]


def test_config_check_reads_the_workers_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workers, file = tmp_path / "workers.yaml", tmp_path / "w.yaml"
    workers.write_text("- ftp://a\n")
    file.write_text(f"workers_file: {workers}\n")
    assert cli.main(["config", "--check", str(file)]) == 2
    assert f"{workers}:1: workers[0].url" in capsys.readouterr().err
    workers.write_text("- http://a\n")
    assert cli.main(["config", "--check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": []}


def test_config_in_force(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WARMROUTE_GATEWAY__PORT", "9")
    assert (
        cli.main(["config", "--json", "--workers", "http://a:1", "--workers=http://b:2", "--gateway-response-headers"])
        == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["gateway"]["port"] == 9
    assert shown["gateway"]["response_headers"] is True
    assert [w["url"] for w in shown["workers"]] == ["http://a:1", "http://b:2"]


def test_every_registered_measurement_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (module, summary) in bench_command.BENCHES.items():
        assert callable(importlib.import_module(module).main), name
        assert name in shown
        assert summary in shown


def test_unknown_measurement_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_command.main(["macro"]) == 2
    known = ", ".join(bench_command.BENCHES)
    assert capsys.readouterr().err == f"bench: error: no measurement named 'macro'; there is: {known}\n"
