"""doctor: the gateway's flags, file and environment, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.doctor import command
from gateway.doctor.examine import Options
from gateway.doctor.findings import Report
from scorer.types import Role

Asked = tuple[list[str], Options, Sequence[str]]
A, B, C = "http://a:8000", "http://b:8000", "http://c:8000"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What `examine` was asked for."""
    found: list[Asked] = []

    async def examine(urls: list[str], options: Options, *, rng: Any, repeated: Sequence[str] = ()) -> Report:
        found.append((urls, options, repeated))
        return Report({url: [] for url in urls}, [])

    monkeypatch.setattr(command, "examine", examine)
    for name in ("WARMROUTE_CONFIG", "WARMROUTE_WORKERS", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_urls_are_workers_of_both_roles(asked: list[Asked]) -> None:
    assert main(["doctor", A, f"{B}/", A]) == 0
    ((urls, options, repeated),) = asked
    assert (urls, list(repeated)) == ([A, B], [A])
    assert options.roles == {A: Role.BOTH, B: Role.BOTH}
    assert (options.probe, options.admin, options.headers) == (True, None, {})


def test_roles_by_flag(asked: list[Asked]) -> None:
    assert main(["doctor", "--prefill", f"{A},{B}", "--decode", C, "--no-probe"]) == 0
    ((urls, options, _),) = asked
    assert urls == [A, B, C]
    assert options.roles == {A: Role.PREFILL, B: Role.PREFILL, C: Role.DECODE}
    assert not options.probe


def test_the_gateways_file(asked: list[Asked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = tmp_path / "workers.txt"
    more.write_text(f"# two\n{B}\n{C} role=decode events=tcp://c:5557\n", encoding="utf-8")
    file = tmp_path / "gateway.yaml"
    file.write_text(
        f"""
workers:
  - {{url: {A}, role: prefill, events: "tcp://a:5557", replay: "tcp://a:5657", nixl: "10.0.0.1:5600"}}
workers_file: {more}
engine_api_key_env: MY_KEY
pd: {{lease_s: 20}}
events: {{mode: bind, bind_endpoint: "tcp://0.0.0.0:5557"}}
""",
        encoding="utf-8",
    )
    monkeypatch.setenv("MY_KEY", "hunter2")
    assert main(["doctor", "--config", str(file), "--pd-lease-margin-s", "3", "--admin", "gw:8001"]) == 0
    ((urls, options, _),) = asked
    assert urls == [A, B, C]
    assert options.roles == {A: Role.PREFILL, B: Role.BOTH, C: Role.DECODE}
    assert (options.events, options.replays) == ({A: "tcp://a:5557", C: "tcp://c:5557"}, {A: "tcp://a:5657"})
    assert options.nixl == {A: "10.0.0.1:5600"}
    assert options.headers == {"Authorization": "Bearer hunter2"}
    assert (options.config.pd.lease_s, options.config.pd.lease_margin_s) == (20.0, 3.0)
    assert options.config.events.mode == "bind"
    assert options.admin == "http://gw:8001"


def test_workers_on_the_command_line_replace_the_files(asked: list[Asked], tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    more = tmp_path / "workers.txt"
    more.write_text(C, encoding="utf-8")
    file.write_text(f"workers: [{B}]\nworkers_file: {more}\npd: {{lease_s: 20}}\n", encoding="utf-8")
    for args in ([A], ["--prefill", A]):
        assert main(["doctor", "--config", str(file), *args]) == 0
    assert [(urls, options.config.pd.lease_s) for urls, options, _ in asked] == [([A], 20.0), ([A], 20.0)]
    assert main(["doctor", A, "--workers-file", str(more)]) == 0
    assert asked[-1][0] == [A, C]


def test_a_list_of_workers_in_yaml(asked: list[Asked], tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(f"- {A}\n- {{url: {B}, role: decode}}\n", encoding="utf-8")
    assert main(["doctor", "--workers-file", str(file)]) == 0
    assert asked[0][1].roles == {A: Role.BOTH, B: Role.DECODE}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no worker is named"),
        (["--workers-file", "/no/such"], "No such file"),
        (["--config", "/no/such.yaml", A], "/no/such.yaml"),
        (["--prefill", "ftp://x"], "http:// or https://"),
        (["--pd-lease-s", "3", A], "lease_margin_s"),
        (["--pd-polcy", "cost", A], "--pd-polcy"),
        (["--admin", "http://gw/debug", A], "without a path"),
    ],
)
def test_bad_usage(args: list[str], said: str, asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *args]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert asked == []
