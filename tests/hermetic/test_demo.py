"""`warmroute demo`, made small: the real gateway process over fake engines, every policy, and honest figures."""

from __future__ import annotations

import json

import pytest

from bench.demo import command, reuse, split
from bench.demo.client import Answer
from bench.engine.server import FakeVllm


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENGINES": 2, "SYSTEM_PROMPTS": 3, "SYSTEM_WORDS": 300, "SESSIONS": 6, "TURNS": 3}.items():
        monkeypatch.setattr(reuse, name, value)
    monkeypatch.setattr(reuse, "RAMP_S", 0.5)
    monkeypatch.setattr(reuse, "THINK_S", (0.0, 0.1))


@pytest.mark.usefixtures("small")
def test_demo_compares_both_policies_and_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json"]) == 0
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

    async def measure(name: str, policy: str, seed: int, quiet: bool) -> reuse.Run:
        return reuse.Run(ttfts_s=[0.1, 0.2], failed=3 if name == "warmroute" else 0)

    monkeypatch.setattr(reuse, "measure", measure)
    assert command.main(["--json"]) == 1
    shown = capsys.readouterr().out
    assert "(3 failed)" in shown
    assert json.loads(shown.splitlines()[-1])["warmroute"]["failed"] == 3


def test_a_machine_too_busy_to_tokenise_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(name: str, policy: str, seed: int, quiet: bool) -> reuse.Run:
        return reuse.Run(ttfts_s=[0.1] * 40, estimated=20 if name == "warmroute" else 0)

    monkeypatch.setattr(reuse, "measure", measure)
    command.main([])
    assert "under warmroute, 20 of 40 prompts could not be tokenised in time" in capsys.readouterr().out


def test_estimates_are_read_from_the_metrics() -> None:
    text = (
        'warmroute_decisions_total{policy="p",prefill="local",tokens="estimate"} 3.0\n'
        'warmroute_decisions_total{policy="p",prefill="remote",tokens="estimate"} 1.0\n'
        'warmroute_decisions_total{policy="p",prefill="local",tokens="engine"} 7.0\n'
    )
    assert reuse.estimated(text) == 4


@pytest.fixture
def small_split(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = split.Load(3, 2, (100, 200), (10, 20), 6, (0.0, 0.1), slo_ttft_s=30.0, slo_tpot_s=30.0)
    code = split.Load(1, 2, (2000, 2200), (10, 20), 6, (0.0, 0.1), slo_ttft_s=1e-6, slo_tpot_s=30.0)
    monkeypatch.setattr(split, "LOADS", {"chat": chat, "code": code})
    monkeypatch.setattr(split, "START_S", 0.2)
    monkeypatch.setattr(split, "_BUSY_S", 60.0)  # What is asked is not how busy this machine is.


@pytest.mark.usefixtures("small_split")
def test_pd_compares_four_policies_and_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--pd", "--json"]) == 0
    shown = capsys.readouterr().out
    figures = json.loads(shown.splitlines()[-1])
    assert list(figures) == ["local", "always-remote", "threshold:1024", "warmroute"]
    for run in figures.values():
        assert (run["requests"], run["failed"]) == (8, 0)
        # nobody can miss the chat's objectives, nobody can keep the code's
        assert run["slo_share"] == 0.75
        assert 0 < run["ttft_p50_ms"] <= run["ttft_p95_ms"]
        assert run["itl_p99_ms"] > 0
    assert "Equally good here: local and always-remote and threshold:1024 and warmroute" in shown
    assert "within 30000 ms, 30000 ms a token" in shown


@pytest.mark.usefixtures("small_split")
@pytest.mark.parametrize(("policy", "n_long", "n_short"), [("local", 0, 0), ("always-remote", 2, 6)])
async def test_prompts_are_computed_where_the_policy_says(
    monkeypatch: pytest.MonkeyPatch, policy: str, n_long: int, n_short: int
) -> None:
    """What the prefill engine computed, by its own account."""
    servers: list[FakeVllm] = []

    class Kept(FakeVllm):
        async def start(self) -> None:
            servers.append(self)
            await super().start()

    monkeypatch.setattr(split, "FakeVllm", Kept)
    run = await split.measure("x", policy, 1, True)
    assert (len(run.answers), run.failed) == (8, 0)
    lengths = [len(request.body["prompt"]) for request in servers[0].requests]
    assert (sum(n >= 2000 for n in lengths), sum(n < 2000 for n in lengths)) == (n_long, n_short)


def _run(n_late: int, n_slow: int, n_good: int, failed: int = 0) -> split.Run:
    load = split.Load(1, 1, (1, 1), (1, 1), 2, (0, 0), slo_ttft_s=1.0, slo_tpot_s=0.1)
    answers = [Answer(2.0, [0.01], output_tokens=2)] * n_late + [Answer(0.5, [0.2], output_tokens=2)] * n_slow
    answers += [Answer(0.5, [0.01], output_tokens=2)] * n_good
    return split.Run([(load, answer) for answer in answers], failed)


def test_s19_pd_says_who_was_best_and_what_the_others_lost_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        "local": _run(0, 30, 70),
        "always-remote": _run(40, 10, 50),
        "threshold:1024": _run(0, 1, 99),
        "warmroute": _run(0, 0, 90, failed=10),
    }

    async def measure(name: str, policy: str, seed: int, quiet: bool) -> split.Run:
        return runs[name]

    monkeypatch.setattr(split, "measure", measure)
    assert command.main(["--pd", "--json"]) == 1
    shown = capsys.readouterr().out
    figures = json.loads(shown.splitlines()[-1])
    assert {name: run["slo_share"] for name, run in figures.items()} == {
        "local": 0.7, "always-remote": 0.5, "threshold:1024": 0.99, "warmroute": 0.9,
    }  # fmt: skip
    assert "Best here: threshold:1024, 99.0% of the requests" in shown
    assert "local: 30.0% got a slow answer" in shown
    assert "always-remote: 40.0% waited too long for their first token, behind other prompts; 10.0% got a slow" in shown
    assert "warmroute: 10.0% failed" in shown
    assert "(10 failed)" in shown


def test_a_busy_machine_is_named_under_pd() -> None:
    busy, free = _run(0, 0, 9), _run(0, 0, 9)
    busy.late_s, free.late_s = [0.05] * 40, [0.001] * 40
    shown = split.verdict({"local": free, "warmroute": busy})
    assert "busy under warmroute" in shown
    assert "busy under local" not in shown
    assert "Best here" not in shown
    assert (busy.figures()["disturbed"], free.figures()["disturbed"]) == (True, False)
