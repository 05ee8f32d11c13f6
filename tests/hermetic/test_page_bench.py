"""`python -m bench page`, on a tiny run."""

import json

import pytest

from bench import page


def test_a_tiny_run_tells_what_viewers_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "N_WORKERS", 3)
    monkeypatch.setattr(page, "N_VIEWERS", 2)
    monkeypatch.setattr(page, "_SETTLE_S", 0.2)
    run = page.run
    monkeypatch.setattr(page, "run", lambda rounds, round_s: run(1, 1.5))
    assert page.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["bench"] == "page"
    figures = told["figures"]
    assert 1000 < figures["message_bytes"] < figures["first_message_bytes"] < 30_000
    assert 0 < figures["gateway_cpu_percent"] < 100
    assert [target["name"] for target in told["targets"]] == ["viewers_10_cpu_percent", "first_message_bytes"]
    assert told["targets"][1]["met"] is True
