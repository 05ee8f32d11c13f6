"""`warmroute demo`, made small: the real gateway process over fake engines, both policies, and honest figures."""

from __future__ import annotations

import json

import pytest

from bench import demo


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENGINES": 2, "SYSTEM_PROMPTS": 3, "SYSTEM_WORDS": 300, "SESSIONS": 6, "TURNS": 3}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "RAMP_S", 0.5)
    monkeypatch.setattr(demo, "THINK_S", (0.0, 0.1))


@pytest.mark.usefixtures("small")
def test_demo_compares_both_policies_and_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--json"]) == 0
    shown = capsys.readouterr().out
    figures = json.loads(shown.splitlines()[-1])
    assert list(figures) == ["round_robin", "warmroute"]
    for run in figures.values():
        assert run["requests"] == 18
        assert run["failed"] == 0
        assert run["ttft_p50_ms"] > 0
        assert run["ttft_p95_ms"] >= run["ttft_p50_ms"]
        # which of the two is higher is for a free machine to say: on a busy one prompts are placed without tokens
        assert 0 < run["cached_share"] <= 1
    assert "Next:" in shown


def test_s19_failures_are_shown_and_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S19: a comparison that hides failed requests makes the worse router look faster."""

    async def measure(name: str, policy: str, seed: int, quiet: bool) -> demo.Run:
        return demo.Run(ttfts_s=[0.1, 0.2], failed=3 if name == "warmroute" else 0)

    monkeypatch.setattr(demo, "measure", measure)
    assert demo.main(["--json"]) == 1
    shown = capsys.readouterr().out
    assert "(3 failed)" in shown
    assert json.loads(shown.splitlines()[-1])["warmroute"]["failed"] == 3


def test_a_machine_too_busy_to_tokenise_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(name: str, policy: str, seed: int, quiet: bool) -> demo.Run:
        return demo.Run(ttfts_s=[0.1] * 40, estimated=20 if name == "warmroute" else 0)

    monkeypatch.setattr(demo, "measure", measure)
    demo.main([])
    assert "under warmroute, 20 of 40 prompts could not be tokenised in time" in capsys.readouterr().out


def test_estimates_are_read_from_the_metrics() -> None:
    text = (
        'warmroute_decisions_total{policy="p",prefill="local",tokens="estimate"} 3.0\n'
        'warmroute_decisions_total{policy="p",prefill="remote",tokens="estimate"} 1.0\n'
        'warmroute_decisions_total{policy="p",prefill="local",tokens="engine"} 7.0\n'
    )
    assert demo.estimated(text) == 4
