"""What one decision takes: a planner over 64 decode and 8 prefill workers, 20 answers running on each of the former, an
8k prompt of which they hold different parts, objectives on everything. Matching is in it, and of hashing what a prompt
takes that begins as an earlier one did; tokenising is not.
"""

from __future__ import annotations

import random
import statistics
import time

from bench.kv_frames import BLOCK_SIZE, frame, tokens
from indexer import PrefixIndex, decode_batch
from scorer.answers import Answer
from scorer.fleet import Fleet
from scorer.ledger import Booking
from scorer.planner import Planner
from scorer.types import ChangeKind, EngineStats, Outcome, OutcomeKind, RequestFacts, Role, TokenSource, WorkerChange

DECODERS, PREFILLERS = 64, 8
PROMPT_TOKENS = 8192
STREAMS = 20
_HELD_SHARES = (0.0, 0.125, 0.25, 0.5, 0.78125, 1.0)
_TTFT_S, _TPOT_S = 1.0, 0.03
_NOW_S = 1.0


def bench_decision(rounds: int) -> dict[str, float]:
    """`decision_64x8_8k_ms` with objectives, `decision_64x8_8k_no_slo_ms` without."""
    out: dict[str, float] = {}
    for name, slo_ttft_s, slo_tpot_s in (("", _TTFT_S, _TPOT_S), ("_no_slo", None, None)):
        rng = random.Random(17)
        prompt = tokens(rng, PROMPT_TOKENS)
        planner = loaded_planner(rng, prompt.tolist(), slo_tpot_s)
        facts = [
            RequestFacts(
                request_id=f"r{i}",
                model="m",
                prompt_tokens=PROMPT_TOKENS,
                tokens=prompt.tobytes(),
                token_source=TokenSource.GIVEN,
                max_output_tokens=200,
                streaming=True,
                slo_ttft_s=slo_ttft_s,
                slo_tpot_s=slo_tpot_s,
            )
            for i in range(rounds)
        ]
        times = []
        for each in facts:
            start = time.thread_time()
            planner.plan(each, None, _NOW_S, rng)
            times.append(time.thread_time() - start)
            planner.observe(each.request_id, Outcome(kind=OutcomeKind.END), _NOW_S)
        out[f"decision_{DECODERS}x{PREFILLERS}_8k{name}_ms"] = statistics.median(times) * 1e3
    return out


def loaded_planner(rng: random.Random, prompt: list[int], slo_tpot_s: float | None) -> Planner:
    """Over a fleet at work that holds different parts of `prompt`, from nothing to all of it."""
    planner = Planner(Fleet(), PrefixIndex(), pd_policy="cost")
    load(planner, rng, prompt, slo_tpot_s)
    return planner


def load(
    planner: Planner,
    rng: random.Random,
    prompt: list[int],
    slo_tpot_s: float | None,
    *,
    streams: int = STREAMS,
    hears: bool = True,
    now_s: float = _NOW_S,
) -> None:
    """The fleet of `loaded_planner`, with `streams` answers on each decode worker. `hears`: its index is told of the
    blocks here, not by somebody else.
    """
    fleet, index = planner.fleet, planner.index
    roles = {f"d{i}": Role.DECODE for i in range(DECODERS)} | {f"p{i}": Role.PREFILL for i in range(PREFILLERS)}
    stats = EngineStats(
        scraped_at_s=now_s,
        running=STREAMS,
        waiting=0,
        kv_usage=0.4,
        block_size=BLOCK_SIZE,
        kv_blocks=32_000,
        prefix_queries_tokens=1e6,
        prefix_hits_tokens=5e5,
        prefill_time_sum_s=10.0,
        prefill_time_count=100,
        nixl_bytes=0.0,
    )
    for name, role in roles.items():
        fleet.apply(WorkerChange(kind=ChangeKind.ADDED, worker=name, url=f"http://{name}", role=role))
        worker = fleet.workers[name]
        fleet.set_capabilities(name, models=["m"], max_model_len=131_072)
        fleet.set_stats(name, stats)
        worker.publishes_events = True
        planner.configure_worker(name)
        held = int(rng.choice(_HELD_SHARES) * (len(prompt) // BLOCK_SIZE))
        if held and hears:
            hashes = [rng.getrandbits(64) for _ in range(held)]
            index.apply(name, 0, decode_batch(frame(hashes, None, prompt[: held * BLOCK_SIZE], held)))
        for _ in range(streams if role is Role.DECODE else 0):
            booking = Booking(worker.loads[0], 0.1, 3_000, now_s - 1.0, answer=Answer(200, 1.0), slo_tpot_s=slo_tpot_s)
            booking.first_token(now_s - 0.9)
            booking.grow(rng.randrange(200))
