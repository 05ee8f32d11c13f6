"""The advice as text and as one JSON object."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from bench.advise.advice import Advice
from bench.advise.network import LINES_GBPS, USABLE, line_s
from bench.advise.splits import Outcome

EXAMPLE_TOKENS: Final = 4000
_WIDTH: Final = 110
_PREFILL_SHARE: Final = 0.2
"""A pull that takes no more than this share of computing the same prompt is no hindrance."""


def headline(advice: Advice) -> str:
    """The answer in one sentence."""
    verdict = advice.verdict
    n = advice.question.servers
    if not verdict.enough:
        return (
            f"{n} servers cannot carry this traffic, split or not."
            if n > 1
            else "One server cannot carry this traffic."
        )
    if verdict.split is None:
        return "There is nothing to split: one server."
    if verdict.pays:
        prefill, decode = verdict.split.fleet.prefill, n - verdict.split.fleet.prefill
        return f"The split pays: take {prefill} prefill and {decode} decode servers."
    chunk = verdict.whole.fleet.chunk_tokens
    how = f" with --max-num-batched-tokens {chunk}" if chunk else ""
    return f"The split does not pay: take {n} aggregated servers{how}."


def growth(advice: Advice) -> list[str]:
    """What would be with more traffic; no sentence or one."""
    if not advice.growth:
        return []
    faster, then = advice.growth[-1]
    split = then.split
    if split is None:
        return []
    shares = f"{split.fleet.name} would keep {split.met:.1%}, {then.whole.fleet.name} {then.whole.met:.1%}"
    if then.pays:
        return [f"It would pay at {faster:g} times the rate: {shares}."]
    return [f"It would not pay at {faster:g} times the rate either: {shares}."]


def text(advice: Advice) -> str:
    """Plain language first, then the figures."""
    question, traffic, verdict = advice.question, advice.question.traffic, advice.verdict
    goals = question.objectives
    answer = " ".join([headline(advice), *verdict.reasons, *growth(advice)])
    lines = [
        *_wrapped(answer),
        "",
        *_wrapped(
            f"Traffic: {traffic.source}, {traffic.requests_per_s:.3g} requests a second of "
            f"{traffic.mean_input_tokens:,.0f} tokens (p95 {traffic.p95_input_tokens:,}) with answers of "
            f"{traffic.mean_output_tokens:,.0f}; {traffic.reuse:.0%} of the prompt tokens were seen before. Objectives "
            f"for each request: TTFT {goals.ttft_s * 1e3:,.0f} ms, {goals.tpot_s * 1e3:g} ms for each further token. "
            f"{len(advice.simulated.rows):,} requests simulated."
        ),
        "",
        *table(advice),
        "",
        "Network",
        *_items(network(advice)),
        "",
        "KV capacity",
        *_items(capacity(advice)),
        "",
        "Block size",
        *_items(blocks(advice)),
        "",
        "Assumptions",
        *_items(advice.assumptions),
        *following(advice),
    ]
    return "\n".join(lines)


def following(advice: Advice) -> list[str]:
    """How to run the split, where it pays."""
    split = advice.verdict.split
    if not advice.verdict.pays or split is None:
        return []
    decode = split.fleet.servers - split.fleet.prefill
    command = (
        f"warmroute gateway --pd-policy cost, {split.fleet.prefill} times --prefill URL and {decode} times --decode "
        f"URL; every engine with a KV connector and --block-size {advice.recommended.tokens}"
    )
    return ["", "Next", *_items([command])]


def table(advice: Advice) -> list[str]:
    """One line for each fleet; the chosen one bears a star. Milliseconds."""
    heads = ("kept", "TTFT p50", "TTFT p95", "ITL p95", "ITL p99", "TPOT p95", "apart", "cached", "conversations")
    width = max(len(it.fleet.name) for it in advice.outcomes)
    lines = ["  ".join([" " * (width + 2), *heads])]
    for it in advice.outcomes:
        cells = (
            f"{it.met:.1%}", f"{it.ttft_p50_ms:,.0f}", f"{it.ttft_p95_ms:,.0f}", f"{it.itl_p95_ms:.1f}",
            f"{it.itl_p99_ms:.1f}", f"{it.tpot_p95_ms:.1f}", f"{it.remote:.0%}", f"{it.hits:.0%}",
            f"{_conversations(advice, it):,}",
        )  # fmt: skip
        mark = "*" if it is advice.verdict.choice else " "
        row = [f"{cell:>{len(head)}}" for head, cell in zip(heads, cells, strict=True)]
        over = "  (queue grows)" if it.overloaded else ""
        lines.append("  ".join([f"{mark} {it.fleet.name:<{width}}", *row]) + over)
    lines += _wrapped(
        "kept: requests within both objectives; times in ms; apart: prompts computed on a prefill server; cached: "
        "prompt tokens found in a cache; conversations: held in full, see KV capacity"
    )
    return lines


def _conversations(advice: Advice, outcome: Outcome) -> int:
    return advice.capacity.conversations(outcome.fleet.servers, outcome.fleet.prefill)


def token_bytes(advice: Advice) -> int:
    """KV of one token as it is moved: all layers, all ranks."""
    return advice.question.plan.hardware.kv_bytes_per_token


def network(advice: Advice) -> list[str]:
    plan, per_token = advice.question.plan, token_bytes(advice)
    example_bytes = plan.kv_bytes(EXAMPLE_TOKENS)
    lines = ", ".join(f"{_seconds(line_s(example_bytes, gbps))} at {gbps} Gb/s" for gbps in LINES_GBPS)
    kind = "8-bit" if plan.value_bytes == 1 else "16-bit"
    copies = plan.model.copies(plan.tensor_parallel)
    held = f", held {copies:g} times by the {plan.tensor_parallel} ranks" if copies > 1 else ""
    over = f", on average over {plan.context_tokens:,} tokens" if plan.model.layers.windowed else ""
    found = [
        f"{per_token / 1024:,.4g} KiB of KV per token{over} ({kind}, {plan.kv_layers} layers{held}); a prompt of "
        f"{EXAMPLE_TOKENS:,} tokens is {example_bytes / 1e9:.2f} GB: {lines} (full line rate)"
    ]
    need = needed_gbps(advice)
    found.append(
        f"from {need:,.0f} Gb/s per server on, fetching that prompt takes at most a fifth of computing it "
        f"({_seconds(_prefill_s(advice, EXAMPLE_TOKENS))}) at {USABLE:.0%} of the line"
    )
    split = advice.verdict.split
    if split is not None:
        decode = split.fleet.servers - split.fleet.prefill
        found.append(f"{split.fleet.name}: {split.pulled_gbps / decode:,.1f} Gb/s into each decode server on average")
    found.append("RDMA (InfiniBand, RoCE) or NVLink; NIXL over plain TCP is for tests only")
    return found


def _prefill_s(advice: Advice, tokens: int) -> float:
    return advice.question.plan.hardware.timing.step_s(0, 0, tokens, tokens * tokens / 2)


def needed_gbps(advice: Advice) -> float:
    """So that a pull takes a fifth of the prefill it replaces."""
    allowed_s = _PREFILL_SHARE * _prefill_s(advice, EXAMPLE_TOKENS)
    return advice.question.plan.kv_bytes(EXAMPLE_TOKENS) * 8e-9 / allowed_s / USABLE


def capacity(advice: Advice) -> list[str]:
    held, n = advice.capacity, advice.question.servers
    so_long = " in sequences so long" if held.kv_tokens != advice.question.plan.hardware.kv_tokens else ""
    found = [
        f"one server holds {held.kv_tokens:,} tokens{so_long}: {held.per_server:,} conversations of "
        f"{held.context_tokens:,} tokens in full; {n} aggregated servers hold {held.conversations(n):,}"
    ]
    split = advice.verdict.split
    if split is not None:
        left, whole = held.conversations(n, split.fleet.prefill), held.conversations(n)
        lost = split.fleet.prefill / n
        found.append(
            f"{split.fleet.name} hold {left:,}, {whole - left:,} fewer ({lost:.0%}): prefill servers compute and cache "
            "prompts, but hold no conversation while it is answered"
        )
    return found


def blocks(advice: Advice) -> list[str]:
    best, timing = advice.recommended, advice.question.plan.hardware.timing
    sizes = ", ".join(
        f"{it.tokens}: {it.descriptor_bytes / 1024:,.4g} KiB, {it.efficiency:.0%} of the bandwidth"
        for it in advice.sizes
    )
    found = [
        f"vllm serve --block-size {best.tokens}: one block of one layer is one descriptor of about 4 us, so small "
        f"blocks leave the network idle ({sizes}; for caches in use, where no blocks lie next to each other)",
        f"only whole blocks are found again: {best.lost_tokens:g} tokens (about "
        f"{best.lost_tokens * timing.prefill_per_token_s * 1e3:.1f} ms) more to compute on each hit, and posting the "
        f"pull of a usual prompt holds up running answers once for {best.post_s * 1e3:.0f} ms",
    ]
    if best.efficiency < 0.9:
        found.append("larger blocks would move faster still, but were not measured")
    if advice.block_size != best.tokens:
        found.append(f"simulated with {advice.block_size}, as given")
    return found


def document(advice: Advice) -> dict[str, Any]:
    """JSON-ready: the same figures, unrounded, with units in their names."""
    question, verdict, traffic = advice.question, advice.verdict, advice.question.traffic
    plan, split = question.plan, verdict.split
    per_token = token_bytes(advice)
    return {
        "pays": verdict.pays,
        "enough_servers": verdict.enough,
        "answer": headline(advice),
        "reasons": [*verdict.reasons, *growth(advice)],
        "choice": _fleet(verdict.choice),
        "best_split": None if split is None else _fleet(split),
        "fleets": [_figures(it) for it in advice.outcomes],
        "growth": [
            {"times_the_rate": faster, "pays": it.pays, "whole": _figures(it.whole)}
            | {"split": None if it.split is None else _figures(it.split)}
            for faster, it in advice.growth
        ],
        "objectives": {
            "slo_ttft_ms": question.objectives.ttft_s * 1e3, "slo_tpot_ms": question.objectives.tpot_s * 1e3,
        },
        "traffic": {
            "source": traffic.source,
            "requests": len(traffic.rows),
            "simulated_requests": len(advice.simulated.rows),
            "requests_per_s": traffic.requests_per_s,
            "mean_input_tokens": traffic.mean_input_tokens,
            "p95_input_tokens": traffic.p95_input_tokens,
            "mean_output_tokens": traffic.mean_output_tokens,
            "reuse": traffic.reuse,
        },
        "server": {
            "gpu": plan.gpu.name,
            "tensor_parallel": plan.tensor_parallel,
            "kv_tokens": plan.hardware.kv_tokens,
            "weight_bytes": plan.model.weights.bytes,
            "parameters": plan.model.weights.parameters,
            "times_from": plan.times.anchor.hardware,
            "times_scaled": not plan.times.is_known,
        },
        "network": {
            "kv_bytes_per_token": per_token,
            "example_tokens": EXAMPLE_TOKENS,
            "example_bytes": plan.kv_bytes(EXAMPLE_TOKENS),
            "example_s": {str(gbps): line_s(plan.kv_bytes(EXAMPLE_TOKENS), gbps) for gbps in LINES_GBPS},
            "needed_gbps": needed_gbps(advice),
            "assumed_gbps": question.gbps,
        },
        "capacity": {
            "context_tokens": advice.capacity.context_tokens,
            "conversations_per_server": advice.capacity.per_server,
            "conversations": {it.fleet.name: _conversations(advice, it) for it in advice.outcomes},
        },
        "block_size": {"recommended": advice.recommended.tokens, "simulated": advice.block_size}
        | {"sizes": [asdict(size) for size in advice.sizes]},
        "assumptions": list(advice.assumptions),
    }  # fmt: skip


def _figures(outcome: Outcome) -> dict[str, Any]:
    return _fleet(outcome) | {key: value for key, value in asdict(outcome).items() if key != "fleet"}


def _fleet(outcome: Outcome) -> dict[str, Any]:
    fleet = outcome.fleet
    decode = fleet.servers - fleet.prefill if fleet.prefill else 0
    return {
        "name": fleet.name, "aggregated": 0 if decode else fleet.servers, "prefill": fleet.prefill, "decode": decode,
        "max_num_batched_tokens": fleet.chunk_tokens or None,
    }  # fmt: skip


def _seconds(value_s: float) -> str:
    return f"{value_s:.2g} s" if value_s >= 0.1 else f"{value_s * 1e3:.2g} ms"


def _wrapped(paragraph: str) -> list[str]:
    return textwrap.wrap(paragraph, _WIDTH)


def _items(paragraphs: Iterable[str]) -> list[str]:
    return [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(paragraph, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    ]
