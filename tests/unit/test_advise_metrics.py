"""Traffic out of what vLLM servers count: reading, rates, and requests drawn from it."""

from __future__ import annotations

import math
import random
import re

import pytest

from bench.advise.drawn import Histogram
from bench.advise.errors import InputError
from bench.advise.gpu import gpu
from bench.advise.model_config import parse_model
from bench.advise.server import plan_server
from bench.advise.splits import Fleet, Objectives, simulate
from bench.advise.traffic import draw
from bench.sim.transfers import RDMA_40GB
from gateway.advise.metrics import Reading, counted, read
from gateway.errors import UserError
from tests.support.model_configs import LLAMA_70B
from tests.support.vllm_metrics import metrics


def reading(at_s: float = 1100.0, **changes: float) -> Reading:
    return read(metrics(**changes), at_s)


def test_lengths_rate_hits_and_capacity_since_the_start() -> None:
    it = counted([reading()], None)
    assert it.requests_per_s == 20 / 100
    assert it.prompts.rising() == [(1000.0, 10.0), (2000.0, 8.0), (5000.0, 2.0), (math.inf, 0.0)]
    assert it.prompts.mean_tokens == 1200
    assert it.answers.mean_tokens == 100
    assert it.hit_share == 0.25
    assert it.kv_tokens == 16 * 1000
    assert "since the servers were started" in it.how


def test_several_servers_add_up() -> None:
    it = counted([reading(), reading(1200.0, blocks=500)], None)
    assert it.requests_per_s == pytest.approx(20 / 100 + 20 / 200)
    assert it.prompts.requests == 40
    assert it.prompts.rising()[0] == (1000.0, 20.0)
    assert it.kv_tokens == 16 * 500


def test_between_two_readings_only_what_came_in_between_counts() -> None:
    it = counted([reading(1110.0, times=3)], [reading()])
    assert it.requests_per_s == 40 / 10
    assert it.prompts.rising()[0] == (1000.0, 20.0)
    assert it.prompts.mean_tokens == 1200
    assert it.hit_share == 0.25
    assert "in the last 10 s" in it.how


def test_what_cannot_be_told_is_said() -> None:
    with pytest.raises(UserError, match="restarted between"):
        counted([reading(1110.0)], [reading(times=3)])
    restarted = read(
        metrics(times=3).replace("process_start_time_seconds 1000.0", "process_start_time_seconds 1105"), 1110
    )
    with pytest.raises(UserError, match="restarted between"):
        counted([restarted], [reading()])
    for at_s in (1100.0, 1000.0):
        with pytest.raises(UserError, match="the clock went back"):
            counted([reading(at_s, times=3)], [reading()])
    with pytest.raises(UserError, match="fewer than two requests; raise --metrics-interval-s"):
        counted([reading(1110.0)], [reading()])
    with pytest.raises(UserError, match="fewer than two requests"):
        counted([reading(times=0)], None)
    without_start = metrics().replace("process_start_time_seconds", "something_else")
    with pytest.raises(UserError, match="give --metrics-interval-s"):
        counted([read(without_start, 1100.0)], None)


def test_hits_nobody_counts_are_unknown() -> None:
    text = metrics().replace("prefix_cache", "other_cache")
    assert counted([read(text, 1100.0)], None).hit_share is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is it a vLLM server"),
        ("vllm:request_prompt_tokens 4\n", "is it a vLLM server"),
        *(
            (re.sub(rf"(_tokens{end}.*) \d+\n", rf"\1 {value}\n", metrics()), "is no count")
            for end in ("_sum", "_count", "_bucket")
            for value in ("NaN", "+Inf", "-5", "1e308")
        ),
        (metrics().replace('le="1000.0"', 'le="NaN"'), "is no count"),
        (metrics().replace('le="1000.0"', 'le="many"'), "could not convert"),
    ],
)
def test_what_is_no_engine_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(text, 0.0)


@pytest.mark.parametrize("mean", [100.0, 5000.0])
@pytest.mark.parametrize(
    "buckets",
    [
        [(1.0, 4.0), (1000.0, 1.0)],
        [(100.0, 10.0), (1000.0, 0.0), (2000.0, 5.0), (math.inf, 1.0)],
        [(math.inf, 3.0)],
    ],
)
def test_draws_keep_the_mean(buckets: list[tuple[float, float]], mean: float) -> None:
    it, rng = Histogram(buckets, mean), random.Random(1)
    values = [it.draw(rng) for _ in range(20_000)]
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.04)
    assert min(values) >= 1


def test_nothing_counted_is_nothing_to_draw_from() -> None:
    with pytest.raises(InputError, match="no finished request"):
        Histogram([(10.0, 0.0), (math.inf, 0.0)], 5.0)


def test_draws_fall_into_their_buckets_in_proportion() -> None:
    buckets = [(100.0, 0.0), (200.0, 3.0), (400.0, 0.0), (800.0, 1.0), (math.inf, 0.0)]
    middle = (3 * (100 / math.log(2)) + 400 / math.log(2)) / 4
    rng, it = random.Random(1), Histogram(buckets, middle)
    values = [it.draw(rng) for _ in range(4000)]
    assert all(100 <= value <= 200 or 400 <= value <= 800 for value in values)
    assert sum(value <= 200 for value in values) == pytest.approx(3000, abs=120)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_drawn_prompts_share_what_was_counted(share: float) -> None:
    lengths = Histogram([(2000.0, 1.0), (4000.0, 1.0)], 2000.0)
    traffic = draw("here", 2.0, lengths, Histogram([(20.0, 1.0)], 10.0), share or None, 400, 1)
    assert traffic.requests_per_s == pytest.approx(2.0, rel=0.2)
    assert traffic.mean_input_tokens == pytest.approx(2000, rel=0.1)
    assert any("all are taken as new" in note for note in traffic.notes) == (share == 0)
    server = plan_server(
        parse_model(LLAMA_70B), gpu("h100"), tensor_parallel=4, value_bytes=2, context_tokens=4000, memory_share=0.9
    )  # fmt: skip
    run = simulate(Fleet(1), server, traffic, RDMA_40GB, Objectives(10, 1), block_size=16, seed=0)
    assert run.hits == pytest.approx(share, abs=0.06)
