"""Runs in several processes, ahead of who asks for them, and kept in a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bench.sim import grid, kept, targets
from bench.sim.ahead import Ahead
from bench.sim.fleet import FleetSpec, servers
from bench.sim.jobs import Jobs
from bench.sim.kept import Kept
from bench.sim.sweep import Ran, Sweep
from bench.sim.workloads.generated import Mixed

ROOT = Path(__file__).resolve().parents[2]


def small(rate: float, *, seeds: int = 1) -> grid.Cell:
    return grid.Cell(
        f"small {rate:g}/s",
        FleetSpec(servers("h200-7b", prefill=1, decode=1), pd_policy=grid.PD_POLICY),
        lambda seed: Mixed(seed, rate=rate, duration_s=3.0),
        ("warmroute", "least-load"),
        ("warmroute", "least-load", "random"),
        seeds,
        2,
    )


def searched(sweep: Sweep) -> float:
    """Each run is chosen by the one before."""
    return targets.goodput(sweep, small, "always-remote", 8.0)


def compared(sweep: Sweep) -> list[float]:
    return [sweep.score(small(rate, seeds=2), "warmroute") for rate in (2.0, 20.0)]


def apart(sweep: Sweep) -> list[float]:
    return sweep.each([partial(sweep.figure, small(2.0), arm, "ttft_mean_ms") for arm in ("random", "least-load")])


ASKERS: dict[str, Callable[[Sweep], object]] = {"searched": searched, "compared": compared, "apart": apart}


def ahead(n: int, path: Path | None = None, *, told: list[str] | None = None) -> dict[str, object]:
    lines: list[str] = [] if told is None else told
    with Jobs(n) as jobs:
        sweep = Ahead(jobs, Kept(path, grid.Traces()), told=lines.append)
        return {name: worked.answer for name, worked in sweep.work({k: partial(f, sweep) for k, f in ASKERS.items()})}


def test_several_processes_come_to_what_one_comes_to() -> None:
    alone = Sweep()
    plain = {name: ask(alone) for name, ask in ASKERS.items()}
    told: list[str] = []
    assert list(ahead(3, told=told).items()) == list(plain.items())
    assert ahead(1) == plain
    assert len(told) == len(set(told)) == alone.made  # nothing twice, and nothing that was not asked for
    assert not multiprocessing.active_children()


def test_what_was_kept_is_not_run_again(tmp_path: Path) -> None:
    path, first, second = tmp_path / "runs.jsonl", [], []
    plain = ahead(2, path, told=first)
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[: len(last) // 2])  # killed in the middle of a line
    assert ahead(2, path, told=second) == plain
    assert len(second) == 1 < len(first)
    for line in path.read_bytes().splitlines()[len(whole) + 1 :]:
        assert json.loads(line)["cell"].startswith("small")
    assert ahead(1, path, told=second) == plain
    assert len(second) == 1


def test_runs_of_other_servers_or_traces_are_others(tmp_path: Path) -> None:
    path, ran = tmp_path / "runs.jsonl", Ran({"slo_share": 1.0}, 0.1)
    Kept(path, grid.Traces()).add(small(2.0), "random", 0, ran)
    cache = Kept(path, grid.Traces())
    assert cache.find(small(2.0), "random", 0) == ran
    assert cache.find(small(2.0), "random", 1) is None
    assert cache.find(small(2.0), "least-load", 0) is None
    other = grid.Cell("small 2/s", FleetSpec(servers("h200-7b", prefill=1, decode=2)), small(2.0).load)
    assert cache.find(other, "random", 0) is None
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    assert Kept(path, grid.Traces(mooncake=trace)).find(small(2.0), "random", 0) is None


def test_no_module_that_a_run_needs_is_left_out_of_its_digest() -> None:
    code = "import sys, bench.sim.sweep; from bench.sim.arms import arms; arms(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    needed = done.stdout.split()
    assert "bench.sim.world" in needed
    assert not {f"bench.sim.{name}" for name in kept._TELLING} & set(needed)
    ours = {name for name in needed if name.startswith("bench.") and name.count(".") == 1}
    assert ours == {"bench.engine", "bench.sim"}  # and nothing beside them


def test_a_cache_that_cannot_be_written_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert targets.main(["--only", "4", "--cache", str(tmp_path / "nowhere" / "runs.jsonl")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_trace_that_cannot_be_read_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert targets.main(["--only", "4", "--mooncake", str(trace)]) == 2
    trace.write_text("no trace\n")
    assert targets.main(["--only", "4", "--mooncake", str(trace)]) == 2
    assert "bench trace targets: error:" in capsys.readouterr().err


def test_a_call_that_fails_names_its_key_and_leaves_no_process() -> None:
    def fails() -> int:
        raise ValueError("broken here")

    with Jobs(2) as jobs:
        jobs.begin("two", lambda: time.sleep(60))
        jobs.begin("one", fails)
        with pytest.raises(RuntimeError, match=r"(?s)one.*broken here"):
            jobs.wait()
    assert not multiprocessing.active_children()


def test_a_process_that_was_killed_is_told_of() -> None:
    with Jobs(2) as jobs:
        jobs.begin("one", lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RuntimeError, match="without a result"):
            jobs.wait()


def test_all_calls_come_back_in_their_order() -> None:
    with Jobs(2) as jobs:
        found = jobs.all({n: partial(pow, n, 2) for n in (3, 1, 2)})
    assert list(found.items()) == [(3, 9), (1, 1), (2, 4)]
    with pytest.raises(ValueError, match="at least one"):
        Jobs(0)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_a_good_cache_and_no_process(tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "bench", "trace", "targets", "--only", "3", "--jobs", "2", "--cache", str(path)]
    process = subprocess.Popen(
        [*command, "--verbose"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None
    assert b"seed" in process.stderr.readline()  # one run is over, others are under way
    if how is signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.send_signal(how)
    _, err = process.communicate(timeout=300)  # ends when no child holds the pipe any more
    assert process.returncode == 130
    assert f"stopped; what is finished is in {path}".encode() in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    lines = path.read_bytes().splitlines()
    assert lines
    assert all(json.loads(line)["figures"]["requests"] for line in lines)
