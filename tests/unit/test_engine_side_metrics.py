"""vLLM's metrics text, of several generations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.engine.metrics import parse_metrics
from scorer.types import EngineStats

# vLLM 0.32.0, shortened to a few series; label values are the recorded ones.
RECORDED = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79598730986e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 714.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.795987338194446e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 352.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 9999.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 714.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 362.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 31.0
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="tiny"} 15.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny"} 15.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 0.11629891900111033
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",enable_prefix_caching="True",\
engine="0",hash_block_size="None",kv_cache_dtype_skip_layers="[]",kv_cache_size_tokens="6400",num_cpu_blocks="None",\
num_gpu_blocks="200",num_gpu_blocks_override="200",sliding_window="None"} 1.0
"""

OLD = """\
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 60.0
vllm:num_requests_running{model_name="m"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""


def stats(text: str) -> EngineStats:
    return parse_metrics(text, 5.0).stats


def test_recorded() -> None:
    assert stats(RECORDED) == EngineStats(
        scraped_at_s=5.0,
        running=3,
        waiting=2,
        waiting_for_room=9,
        kv_usage=0.25,
        block_size=32,
        kv_blocks=200,
        kv_capacity_tokens=6400,
        prefix_caching=True,
        prefix_queries_tokens=714,
        prefix_hits_tokens=352,
        prompt_tokens=714,
        generation_tokens=31,
        preemptions=1,
        prefill_time_sum_s=0.11629891900111033,
        prefill_time_count=15,
        process_start_s=1795987309.86,
    )
    assert parse_metrics(RECORDED, 5.0).asleep is False


def test_s12_old_names_and_new_names_both_count() -> None:
    """S12: the gauge was renamed; with only the one or the other name the load is read all the same."""
    old, new = (
        stats(OLD),
        stats(OLD.replace("gpu_", "", 1).replace("gpu_", "").replace(":cache_usage", ":kv_cache_usage")),
    )
    assert old.kv_usage == new.kv_usage == 0.5
    assert old.prefix_queries_tokens == 100
    assert old.prefix_hits_tokens == 60
    assert (old.block_size, old.kv_blocks, old.kv_capacity_tokens) == (16, 100, 1600)
    both = stats("vllm:gpu_cache_usage_perc{} 0.9\nvllm:kv_cache_usage_perc{} 0.1\n")
    assert both.kv_usage == 0.1


def test_s12_engines_are_summed_and_averaged() -> None:
    """S12: two engine labels: requests add up, the share of blocks in use is the mean."""
    both = stats(RECORDED.rstrip() + "\n" + RECORDED.replace('engine="0"', 'engine="1"').replace("0.25", "0.75"))
    assert (both.running, both.waiting) == (6, 4)
    assert both.kv_usage == 0.5
    assert (both.block_size, both.kv_blocks, both.kv_capacity_tokens) == (32, 400, 12800)
    assert both.prompt_tokens == 1428


def test_s12_what_is_missing_is_none_not_zero() -> None:
    """S12: missing is not 0."""
    assert stats("") == EngineStats(scraped_at_s=5.0)
    nothing = stats("vllm:num_requests_running{} NaN\nvllm:num_requests_waiting{} what\nvllm:cache_config_info{} 1\n")
    assert nothing == EngineStats(scraped_at_s=5.0)
    assert parse_metrics("", 5.0).asleep is None


def test_asleep() -> None:
    text = RECORDED.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
    assert parse_metrics(text, 5.0).asleep is True


def test_labels_may_hold_anything() -> None:
    odd = 'vllm:num_requests_running{model_name="a } b \\" c, {x=1}\\\\"} 4 1700000000000\n'
    assert stats(odd).running == 4
    assert stats("vllm:num_requests_running 5\r\n").running == 5
    assert stats('vllm:num_requests_running{ engine = "0" , } 6').running == 6
    assert stats("vllm:num_requests_running_x 7\nx_vllm:num_requests_running 8\n").running is None


@given(st.dictionaries(st.text(min_size=0, max_size=8), st.floats(0, 1e9), max_size=4))
def test_agrees_with_the_reference_parser(samples: dict[str, float]) -> None:
    lines = []
    for label, value in samples.items():
        quoted = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'vllm:prompt_tokens_total{{model_name="{quoted}"}} {value}')
    text = "# TYPE vllm:prompt_tokens counter\n" + "\n".join(lines) + "\n"
    try:
        expected = [s.value for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError:
        return
    assert stats(text).prompt_tokens == (sum(expected) if expected else None)


@given(st.text(alphabet='vllm:num_requests_running{}="\\ \n0123.e', max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    parse_metrics(text, 0.0)


def test_unclosed_labels_cost_no_more_than_their_length() -> None:
    """Labels never span lines: a page of broken series must not be scanned to its end from each of them."""
    broken = "vllm:num_requests_running{\n" * 50_000
    stats = parse_metrics(broken + "vllm:num_requests_waiting 2.0\n", 1.0).stats
    assert (stats.running, stats.waiting) == (None, 2.0)


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf", "1e308"])
def test_what_can_be_no_count_is_not_said(value: str) -> None:
    told = stats(f"vllm:num_requests_waiting {value}\nvllm:request_prefill_time_seconds_sum {value}\n")
    assert told == EngineStats(scraped_at_s=5.0)


def test_sizes_below_one_are_unknown() -> None:
    told = stats('vllm:cache_config_info{block_size="-16",num_gpu_blocks="-100",kv_cache_size_tokens="-1"} 1.0\n')
    assert (told.block_size, told.kv_blocks, told.kv_capacity_tokens) == (None, None, None)


def test_who_waits_for_a_transfer_is_told_from_who_waits_for_room() -> None:
    text = "".join(
        f'vllm:num_requests_waiting_by_reason{{engine="{engine}",model_name="m",reason="{reason}"}} {n}\n'
        for engine, reason, n in ((0, "capacity", 3), (0, "deferred", 20), (1, "capacity", 2), (1, "deferred", 5))
    )
    read = stats(text + 'vllm:num_requests_waiting{engine="0",model_name="m"} 30.0\n')
    assert (read.waiting, read.waiting_for_room) == (30, 5)
