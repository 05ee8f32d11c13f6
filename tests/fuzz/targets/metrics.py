"""A worker's `/metrics`: numbers or nothing, never an error, and never the time that a hostile text could cost."""

from __future__ import annotations

import math
from contextlib import suppress

import msgspec

from gateway.advise.metrics import read
from gateway.engine.metrics import parse_metrics
from scorer.types import EngineStats
from tests.support.recorded import load
from tests.support.vllm_metrics import metrics


def _recorded() -> bytes:
    return b"\n".join(
        b"%b{%b} 1.0" % (name.encode(), b",".join(b'%b="0"' % label.encode() for label in labels))
        for name, labels in load("metrics")["series"].items()
    )


SEEDS = [metrics().encode(), _recorded(), metrics(times=3, blocks=0).encode()]
# fmt: off
WORDS = [
    b"vllm:", b"vllm_", b"vllm:num_requests_running", b'{engine="0"} ', b" ", b"\t", b'"', b"\\", b"{", b"}", b"NaN",
    b"+Inf", b"1e999", b"-1", b"\n", b'num_gpu_blocks="', b'block_size="', b"a", b'le="',
    b"process_start_time_seconds 1", b'vllm:engine_sleep_state{sleep_state="awake"} 0', b'vllm:cache_config_info{',
]
# fmt: on


def fuzz_one(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    scrape = parse_metrics(text, 1.0)
    for field in msgspec.structs.fields(EngineStats):
        value = getattr(scrape.stats, field.name)
        if isinstance(value, int | float):
            assert math.isfinite(value), field.name
            assert value >= 0, field.name
    with suppress(ValueError):
        read(text, 1.0)
