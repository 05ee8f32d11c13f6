"""Workers of different speed: their weights, from the configuration to prices, load and what is learned."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from gateway.config.load import ConfigError, load_config, load_workers
from gateway.discovery import StaticDiscovery
from gateway.discovery.lines import read_lines
from scorer.calibrate import Part
from scorer.types import OutcomeKind
from tests.support.fleets import Rig, W, fleet, prompt


def serve_cold(rig: Rig, n: int, every_s: float, weights: dict[str, float], tokens: int = 4000) -> Counter[str]:
    """Cold prompts come `every_s`; each worker computes one after the other, as fast as its true weight says. By
    worker, how many it got.
    """
    got: Counter[str] = Counter()
    free_s = dict.fromkeys(weights, 0.0)
    due: list[tuple[float, int, OutcomeKind, object]] = []
    order = count()
    for i in range(n):
        now_s = 1000.0 + i * every_s
        while due and due[0][0] <= now_s:
            rig.now_s, _, kind, plan = heapq.heappop(due)
            rig.observe(plan, kind)  # type: ignore[arg-type]
        rig.now_s = now_s
        plan = rig.route(prompt(tokens, seed=i), streaming=True, max_output_tokens=1)
        worker = plan.chosen.decode[0]
        got[worker] += 1
        took_s = rig.planner.cost.comp_s(tokens, 0, weights[worker])
        front_s = rig.planner.cost.front_s(tokens, text=True)
        free_s[worker] = max(free_s[worker], now_s + front_s) + took_s
        heapq.heappush(due, (free_s[worker], next(order), OutcomeKind.FIRST_TOKEN, plan))
        heapq.heappush(due, (free_s[worker], next(order), OutcomeKind.END, plan))
    return got


@pytest.mark.parametrize(("weight", "share"), [(1.0, 1 / 2), (0.5, 1 / 3), (0.25, 1 / 5)])
def test_cold_load_goes_by_speed(weight: float, share: float) -> None:
    """A burst, so that none of it is done before the last is placed."""
    rig = fleet(W("h100", kv_blocks=None), W("other", weight=weight, kv_blocks=None))
    got = Counter(rig.route(prompt(4000, seed=i), max_output_tokens=1).chosen.decode[0] for i in range(60))
    assert got["other"] / 60 == pytest.approx(share, abs=0.04)


def test_a_steady_cold_load_leaves_the_slow_one_less_than_its_share_and_not_more() -> None:
    """Where there is a choice the fast one is quicker."""
    rig = fleet(W("h100", kv_blocks=None), W("a100", weight=0.5, kv_blocks=None))
    every_s = rig.planner.cost.comp_s(4000, 0) / 1.5 / 0.95
    got = serve_cold(rig, 200, every_s, {"h100": 1.0, "a100": 0.5})
    assert 2.0 <= got["h100"] / got["a100"] < 3.0


def test_a_weight_is_seen_in_the_prices() -> None:
    rig = fleet(W("fast", kv_blocks=None), W("slow", weight=0.5, kv_blocks=None))
    prices = {c.decode[0]: c.price for c in rig.route(prompt(4000), max_output_tokens=10).considered}
    assert prices["slow"].comp_s == pytest.approx(2 * prices["fast"].comp_s)
    assert prices["slow"].decode_s == pytest.approx(2 * prices["fast"].decode_s)


@pytest.mark.parametrize(("true_weight", "factor"), [(0.5, 1.0), (0.25, 2.0)])
def test_what_is_learned_is_relative_to_the_weight(true_weight: float, factor: float) -> None:
    """A right weight leaves nothing to learn; of a wrong one, the factor is what is missing."""
    rig = fleet(W("slow", weight=0.5, kv_blocks=None))
    serve_cold(rig, 60, 10.0, {"slow": true_weight})
    assert rig.planner.calibration.value(Part.WORK, "slow") == pytest.approx(factor, rel=0.05)


async def test_a_weight_is_given_in_the_configuration_and_in_both_kinds_of_file(tmp_path: Path) -> None:
    config = load_config(flags={("workers",): "[{url: 'http://a:1', weight: 0.5}, 'http://b:1']"})
    assert [c.weight async for c in StaticDiscovery(config.workers).changes()] == [0.5, 1.0]
    path = tmp_path / "workers.yaml"
    path.write_text("- {url: http://a:1, weight: 2}\n")
    assert [worker.weight for worker in load_workers(str(path))] == [2.0]
    assert [worker.weight for worker in read_lines("http://a:1 weight=0.25\n", "f")] == [0.25]


@pytest.mark.parametrize("weight", ["0", "-1", "101", ".nan", ".inf", "fast"])
def test_a_weight_that_is_none_is_refused(weight: str) -> None:
    with pytest.raises(ConfigError, match=r"workers\[0\]\.weight: expected a number >= 0.01 and <= 100"):
        load_config(flags={("workers",): f"[{{url: 'http://a:1', weight: {weight}}}]"})
