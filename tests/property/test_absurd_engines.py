"""What engines say of themselves may be absurd: a decision is made, and every price in it is a number."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.engine.metrics import parse_metrics
from scorer.types import Price
from tests.support.fleets import D, P, Rig, fleet, prompt

NUMBERS = st.sampled_from(["0", "1e-300", "1", "7.5", "1e12", "9e23", "1e308", "-1", "NaN", "+Inf"])
SERIES = (
    "num_requests_running", "num_requests_waiting", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "request_prefill_time_seconds_sum", "request_prefill_time_seconds_count", "kv_cache_usage_perc",
    "nixl_bytes_transferred_sum", "nixl_xfer_time_seconds_sum", "nixl_xfer_time_seconds_count",
)  # fmt: skip
ABSURD = ["9e23"] * 5 + ["1e-300"] + ["1"] * 4
"""Of SERIES: the mean of their prefills is endless."""


def said(values: list[str], sizes: list[str]) -> str:
    """The metrics of an engine of two ranks."""
    lines = [f"vllm:{name} {value}" for name, value in zip(SERIES, values, strict=True)]
    lines += [
        f'vllm:cache_config_info{{engine="{rank}",block_size="{sizes[0]}",num_gpu_blocks="{sizes[1]}"}} 1.0'
        for rank in range(2)
    ]
    return "\n".join(lines) + "\n"


def scrape(rig: Rig, name: str, text: str) -> None:
    rig.planner.fleet.set_stats(name, parse_metrics(text, rig.now_s).stats)
    rig.planner.configure_worker(name)


def check(price: Price) -> None:
    for part, seconds in msgspec.structs.asdict(price).items():
        assert isinstance(seconds, float | int), part
        assert math.isfinite(seconds), part


@given(
    values=st.lists(NUMBERS, min_size=len(SERIES), max_size=len(SERIES)),
    sizes=st.lists(NUMBERS, min_size=2, max_size=2),
    slo_ttft_s=st.sampled_from([None, 5e-324, 0.5, 1e300]),
    n_tokens=st.sampled_from([0, 1, 2000]),
)
@example(values=ABSURD, sizes=["16", "1e308"], slo_ttft_s=0.5, n_tokens=2000)
@example(values=ABSURD, sizes=["1e308", "16"], slo_ttft_s=None, n_tokens=0)
def test_every_price_is_a_number(values: list[str], sizes: list[str], slo_ttft_s: float | None, n_tokens: int) -> None:
    rig = fleet(D("a"), D("b"), P("p"), pd_policy="cost")
    for name in ("a", "b", "p"):
        scrape(rig, name, said(values, sizes))
    plan = rig.route(prompt(n_tokens), slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_ttft_s)
    for candidate in plan.considered:
        check(candidate.price)


@pytest.mark.parametrize("liar", ["a", "b"])
def test_one_that_says_what_cannot_be_is_no_harm_to_the_others(liar: str) -> None:
    rig = fleet(D("a"), D("b"))
    scrape(rig, liar, said(ABSURD, ["1e308", "1e308"]))
    other = {"a": "b", "b": "a"}[liar]
    assert {rig.route(prompt(100, seed=i)).chosen.decode[0] for i in range(3)} == {other}
