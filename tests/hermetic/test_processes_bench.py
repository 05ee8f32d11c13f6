"""`python -m bench processes`, small."""

from __future__ import annotations

import json
import subprocess
import sys


def test_it_measures_one_gateway_of_so_many_processes() -> None:
    command = [sys.executable, "-m", "bench", "processes", "--json", "--quick", "--processes", "1,2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert [it["processes"] for it in figures] == [1, 2]
    assert all(it["requests_per_s"] > 1 and it["cpu_us_per_request"] > 10 and not it["failures"] for it in figures)


def test_it_measures_decisions_of_one_planner_beside_those_of_each_process() -> None:
    command = [sys.executable, "-m", "bench", "processes", "--central", "--json", "--quick", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    figures = told["figures"]
    for size in ("2kb", "8k"):
        for arm in ("central", "own"):
            at = f"{size}_2_{arm}"
            assert figures[f"{at}_cpu_us"] > figures[f"{at}_middle_cpu_us"] > 0
            assert figures[f"{at}_p99_us"] >= figures[f"{at}_p50_us"] > 0
            assert figures[f"{at}_full_at_per_s"] > 0
            assert figures[f"{at}_fed_share"] > 0
        assert figures[f"{size}_2_central_full_at_without_events_per_s"] > figures[f"{size}_2_central_full_at_per_s"]
    asked = ("over_central_cpu", "over_central_full_at", "below_central_p50_us")
    targets = {each["name"] for each in told["targets"]}
    assert targets == {f"{size}_2_own_{what}" for size in ("2kb", "8k") for what in asked}
