"""doctor on real engines that hand prompts over: what it says of a pair that is well, and of one thing set wrongly."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from engines import BLOCK_TOKENS, REPOSITORY, VllmServer, serving
from pd_fleet import LEASE_FLAGS, pd_server


@pytest.fixture(scope="module")
def pair(engine_logs: pathlib.Path) -> Iterator[tuple[VllmServer, VllmServer]]:
    servers = (pd_server("patient-p", engine_logs, "kv_producer"), pd_server("patient-d", engine_logs, "kv_consumer"))
    with serving(servers):
        yield servers


def doctor(pair: tuple[VllmServer, VllmServer], *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, findings by code). Of several with one code the last."""
    prefill, decode = pair
    command = [sys.executable, "-m", "gateway", "doctor", "--prefill", prefill.url, "--decode", decode.url, "--json"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([*command, "--timeout-s", "20", *flags], capture_output=True, text=True, env=env, timeout=300)
    assert run.stderr == ""
    document = json.loads(run.stdout)
    findings = [each for some in document["workers"].values() for each in some] + document["fleet"]
    assert document["exit_code"] == run.returncode
    return run.returncode, {each["code"]: each for each in findings}


def test_a_pair_that_is_well(pair: tuple[VllmServer, VllmServer]) -> None:
    code, found = doctor(pair, *LEASE_FLAGS)
    assert code == 0, [each for each in found.values() if each["severity"] in ("warning", "error")]
    assert {"handoff", "side-channel", "events", "replay", "nixl-unjudged"} <= set(found)
    # 256 tokens and one, in whole blocks: the last one is pulled too.
    blocks = 256 // BLOCK_TOKENS + 1
    assert found["handoff"]["evidence"]["bytes"] % blocks == 0
    assert "clock-skew" not in found
    # The engine's page for development fails where neither pip nor uv is installed.
    assert ("settings-unknown" in found) != ("connector" in found)


def test_a_prefill_server_that_is_gone(pair: tuple[VllmServer, VllmServer]) -> None:
    """The last test of these two."""
    pair[0].stop()
    code, found = doctor(pair, *LEASE_FLAGS)
    assert code == 2
    assert found["unreachable"]["severity"] == "error"
    assert "handoff" not in found
