"""`python -m bench trace plot`: what is under the figures, and that they are written."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sim import plot
from bench.sim.decisions import decision_map
from bench.sim.fleet import FleetSpec, servers
from bench.sim.hardware import HARDWARE
from bench.sim.transfers import RDMA_40GB
from bench.trace import main

TOKENS = [64, 256, 1024, 4096, 16_384]
STREAMS = [0, 1, 4, 16, 64]


def spec(hardware: str) -> FleetSpec:
    return FleetSpec(servers(hardware, prefill=1, decode=1), link=RDMA_40GB)


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("waiting_tokens", [0, 20_000])
def test_the_more_answers_run_the_more_is_computed_elsewhere(hardware: str, waiting_tokens: int) -> None:
    it = decision_map(spec(hardware), TOKENS, STREAMS, waiting_tokens=waiting_tokens)
    assert not any(it.remote[0])  # nobody is harmed where nothing runs
    for column in range(len(TOKENS)):
        told = [row[column] for row in it.remote]
        assert told == sorted(told)
    for remote, local_s, remote_s in zip(it.remote, it.local_s, it.remote_s, strict=True):
        for is_remote, here_s, there_s in zip(remote, local_s, remote_s, strict=True):
            assert 0 < here_s < math.inf
            assert 0 < there_s < math.inf
            assert is_remote == (there_s < here_s - 1e-9) or abs(there_s - here_s) < 1e-3
    assert it.remote[-1][-1]  # who would stop 64 answers for 16k tokens?


def test_the_more_waits_at_the_prefill_worker_the_less_is_sent_there() -> None:
    maps = [decision_map(spec("h200-7b"), TOKENS, STREAMS, waiting_tokens=n) for n in (0, 10_000, 100_000)]
    for less, more in pairwise(maps):
        pairs = [(a, b) for rows in zip(less.remote, more.remote, strict=True) for a, b in zip(*rows, strict=True)]
        assert all(a or not b for a, b in pairs)
        assert any(a and not b for a, b in pairs)


def test_objectives_at_stake_are_asked_about() -> None:
    free, bound = (decision_map(spec("h200-7b"), TOKENS, STREAMS, slo_tpot_s=slo) for slo in (None, 0.01))
    assert bound.local_s[-1][-1] > free.local_s[-1][-1]


def test_a_prompt_shorter_than_a_block_has_one_way_only() -> None:
    it = decision_map(spec("h200-7b"), [63], [4])
    assert (it.remote, it.remote_s) == ([[False]], [[math.inf]])


@given(st.lists(st.one_of(st.floats(0, 100), st.just(math.inf)), max_size=500))
def test_points_lie_on_the_distribution(values: list[float]) -> None:
    points = plot.cdf(values)
    assert len(points) <= 201
    for value, share in points:
        below = sum(v < value for v in values)
        assert below < round(share * len(values)) <= sum(v <= value for v in values)
    done = [v for v in values if v < math.inf]
    if len(values) <= 200:
        assert len(points) == len(done)
    elif len(done) == len(values):
        assert points[-1][1] == 1


SHORT = ["--workload", "mixed", "--duration-s", "2", "--arm", "local", "--arm", "always-remote"]


def test_figures_and_their_numbers_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "plots"
    assert main(["plot", "--out", str(out), *SHORT, "--rates", "3,6"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out / f"{n}.png") for n in ("ttft", "goodput", "decisions")]
    for name in ("ttft", "goodput", "decisions"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    read: dict[str, Any] = {name: json.loads((out / f"{name}.json").read_text()) for name in plot.PLOTS}
    for points in read["ttft"].values():
        assert points == sorted(points)
        assert points[-1][1] == 1
    assert list(read["ttft"]) == list(read["goodput"]) == ["local", "always-remote"]
    for points in read["goodput"].values():
        assert [rate for rate, _ in points] == [3, 6]
        assert all(0 <= goodput <= 12 for _, goodput in points)
    assert list(read["decisions"]) == ["0", "8000", "32000"]
    assert len(read["decisions"]["0"]["remote"]) == len(plot.STREAMS)


def test_a_figure_of_its_own(tmp_path: Path) -> None:
    assert main(["plot", "--out", str(tmp_path), "--only", "decisions", "--hardware", "h100-llama3-8b"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"decisions.png", "decisions.json"}


def test_without_matplotlib_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", "--out", str(tmp_path / "x")]) == 2
    shown = capsys.readouterr()
    assert "pip install 'warmroute[bench]'" in shown.err
    assert shown.err.startswith("bench trace plot: error: ")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--only", "ttft,pie"], "no figure 'pie'"),
        (["--only", "goodput", "--workload", "hotspot"], "hotspot has no goodput by rate"),
        (["--only", "goodput", "--rates", "3,-1"], "--rates must be above 0"),
        (["--only", "goodput", "--rates", "many"], "many"),
        (["--only", "decisions", "--hardware", "abacus"], "no hardware 'abacus'"),
        (["--only", "ttft", "--workload", "nope"], "no workload 'nope'"),
        (["--only", "ttft", "--arm", "nope"], "nope"),
    ],
)
def test_a_wrong_word_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], why: str
) -> None:
    assert main(["plot", "--out", str(tmp_path), *args]) == 2
    assert why in capsys.readouterr().err
