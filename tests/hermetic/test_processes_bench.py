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
