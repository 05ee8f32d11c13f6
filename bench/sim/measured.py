"""What was measured on two NVIDIA H200 (vLLM 0.26, NIXL 1.5.1 over NVLink, a Qwen3-shaped dense model of 7.2 B
parameters in bf16, blocks of 64, chunks of 8192, 128 sequences, 2026-11-29), as the simulator is compared with it. All
in milliseconds; single runs where nothing else is said.
"""

from __future__ import annotations

from typing import Final

IDLE_TTFT: Final = {512: (50, 65), 2048: (57, 81), 8192: (233, 275), 32_768: (1338, 1445)}
"""Prompt tokens -> median TTFT (local on D, remote)."""

SUFFIX_TTFT: Final = {
    8192: {64: (71, 277, 109), 1024: (74, 335, 141), 4096: (171, 441, 227), 8192: (317, 610, 399)},
    24_576: {64: (106, 1006, 176), 1024: (119, 1067, 194), 4096: (265, 1222, 358), 8192: (485, 1441, 563)},
}
"""Held on D -> new tokens -> median TTFT (local, remote with P cold, remote with P holding the prefix too)."""

STALLS: Final = {
    (8192, False): (5.8, 182, 254),
    (8192, True): (5.8, 14.8, 305),
    (32_768, False): (5.7, 425, 1366),
    (32_768, True): (5.9, 13.8, 1540),
}
"""(long prompt, remote) -> inter-token latency of 16 streams (p50, p99) and the long prompt's own TTFT."""

CHUNKS: Final = {
    (8192, 8192): (5.7, 178, 262),
    (4096, 8192): (5.8, 106, 259),
    (2048, 8192): (5.8, 55, 271),
    (1024, 8192): (5.8, 44, 319),
    (8192, 32_768): (5.7, 426, 1377),
    (4096, 32_768): (5.8, 218, 1389),
    (2048, 32_768): (6.5, 114, 1445),
    (1024, 32_768): (38.7, 102, 1580),
}
"""(max_num_batched_tokens, long prompt computed locally) -> (p50, p99) of 16 streams, its own TTFT."""

STEPS: Final = {
    (1, 512): 5.1, (4, 512): 5.2, (16, 512): 5.5, (32, 512): 6.0, (64, 512): 7.0, (128, 512): 9.2,
    (1, 8192): 5.3, (4, 8192): 6.2, (8, 8192): 7.5, (16, 8192): 9.5, (32, 8192): 14.1,
    (64, 2048): 10.3, (64, 4096): 14.6, (1, 32_768): 6.2, (4, 32_768): 9.4, (8, 32_768): 13.9,
}  # fmt: skip
"""(streams, context of each) -> p50 of the inter-token latency."""

PREFILL_QUEUE: Final = {
    1: (243,),
    2: (243, 454),
    4: (244, 456, 670, 895),
    8: (247, 466, 680, 901, 1132, 1344, 1551, 1766),
}
"""Remote prompts of 8,192 at once -> the prefill stages in order."""

PULL_QUEUE: Final = {1: 52, 2: 93, 4: 130, 8: 194}
"""Decode legs of 8,192 at once (prompts ready on P), aged cache -> the longest leg; the middle where a range was seen.
"""

AGED_TTFT: Final = {2048: (97, 34), 8192: (299, 56), 32_768: (1536, 169)}
"""Prompt tokens -> remote (TTFT, decode leg) with caches that have been in use."""

MIXED: Final = {
    (3, "agg"): (56, 389, 268, 447, 5.5, 48, 9.9, 1.0),
    (3, "disagg"): (103, 907, 467, 957, 5.5, 19, 6.7, 68 / 69),
    (3, "cond"): (62, 103, 469, 948, 5.5, 29, 6.9, 1.0),
    (6, "agg"): (62, 276, 280, 425, 5.6, 56, 12.7, 1.0),
    (6, "disagg"): (143, 505, 364, 851, 5.7, 20, 6.4, 1.0),
    (6, "cond"): (59, 98, 371, 831, 5.9, 43, 8.5, 1.0),
    (9, "agg"): (56, 345, 315, 595, 6.6, 182, 20.7, 160 / 177),
    (9, "disagg"): (708, 1471, 1157, 1724, 6.5, 24, 7.5, 94 / 177),
    (9, "cond"): (60, 105, 907, 1523, 6.7, 44, 10.2, 151 / 177),
}
"""(requests a second, policy) -> TTFT p50 and p95 of short and of long prompts, ITL p50 and p99, TPOT p95, share that
met 1 s and 20 ms; 1P1D, one run of about 20 s each.
"""

NOT_SIMULATED: Final = (
    "mixed load, 1P2D at 4/s (3 rows): both decode servers shared one GPU, which doubled their steps (ITL p50 10.4 to"
    " 13.1 ms; 5.5 at 1P1D); each simulated engine has a GPU of its own",
)
"""Of the tables compared, what the simulator has nothing to compare with, and why."""

MIXED_REQUESTS: Final = {3: 69, 6: 109, 9: 177}
"""Requests a second -> how many came, the same for all three policies: they had the same requests."""

OUTSIDE: Final = {512: 3, 2048: 4, 8192: 18, 32_768: 54}
"""Prompt tokens, sent as ids and cached on D -> what of the TTFT the server's own figure does not hold: the body read,
the answer written, the client. Not separated; the streams pass the same processes. (vLLM 0.32's request class alone, on
another machine: 15 ms of the event loop for a body of 32,768 ids, 0.8 for 8,192.)
"""

CACHED_STEP: Final = (33, 36)
"""The one eager step of a prompt that is cached."""

BEGIN_STEP: Final = 16
"""The step in which a pulled prompt of 32,768 begins, by the server's own account."""

CHUNKS_MAX: Final = {(4096, 32_768): 256, (2048, 32_768): 157, (1024, 32_768): 109}
"""(max_num_batched_tokens, long prompt) -> the longest gap of the streams of `CHUNKS`."""

STALLED_AGAIN: Final = (14.7, 16, 24, 39)
"""The p99 of 16 streams beside a remote prompt of 32,768, measured four times more."""
