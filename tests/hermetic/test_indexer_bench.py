"""`python -m bench indexer`, small."""

from __future__ import annotations

import json
import subprocess
import sys


def test_it_measures_lookups_and_copies() -> None:
    command = [
        sys.executable,
        "-m",
        "bench",
        "indexer",
        "--json",
        "--workers",
        "2",
        "--blocks",
        "300",
        "--seconds",
        "0.4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["snapshot_blocks"] >= 2 * 2048
    assert figures["match_keys_unix_p50_us"] > 0
    assert figures["watch_most_blocks_per_s"] > 1000
