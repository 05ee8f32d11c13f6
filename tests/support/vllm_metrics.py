"""The part of a vLLM server's `/metrics` that says what its traffic is like."""

from __future__ import annotations

_TEXT = """\
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1000.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
# HELP vllm:request_prompt_tokens Number of prefill tokens processed.
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{{engine="0",le="1000.0",model_name="m"}} {short}
vllm:request_prompt_tokens_bucket{{engine="0",le="2000.0",model_name="m"}} {middle}
vllm:request_prompt_tokens_bucket{{engine="0",le="5000.0",model_name="m"}} {all}
vllm:request_prompt_tokens_bucket{{engine="0",le="+Inf",model_name="m"}} {all}
vllm:request_prompt_tokens_count{{engine="0",model_name="m"}} {all}
vllm:request_prompt_tokens_sum{{engine="0",model_name="m"}} {prompt}
# TYPE vllm:request_prompt_tokens_created gauge
vllm:request_prompt_tokens_created{{engine="0",model_name="m"}} 1000.0
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_bucket{{engine="0",le="100.0",model_name="m"}} {short}
vllm:request_generation_tokens_bucket{{engine="0",le="200.0",model_name="m"}} {all}
vllm:request_generation_tokens_bucket{{engine="0",le="+Inf",model_name="m"}} {all}
vllm:request_generation_tokens_count{{engine="0",model_name="m"}} {all}
vllm:request_generation_tokens_sum{{engine="0",model_name="m"}} {answer}
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}"}} 1.0
"""


def metrics(*, times: int = 1, blocks: int = 1000) -> str:
    """20 requests of 1,200 tokens with answers of 100, a quarter of the prompts cached, `times` over; in names and
    labels as vLLM 0.32 writes it. The server was started at 1000 s.
    """
    return _TEXT.format(
        short=10 * times, middle=18 * times, all=20 * times, prompt=24_000 * times, answer=2000 * times,
        queries=24_000 * times, hits=6000 * times, blocks=blocks,
    )  # fmt: skip
