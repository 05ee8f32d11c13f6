"""`warmroute advise`: the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from gateway.advise.arguments import arguments
from gateway.advise.metrics import Lengths, count
from gateway.doctor.command import worker_url
from gateway.errors import UserError

_DRAWN = 20_000
"""Requests made from metrics: more than are ever simulated unasked."""


def main(args: Sequence[str]) -> int:
    """Exit code 0, or 1 when the plot that was asked for could not be drawn."""
    from bench.advise.errors import InputError

    options = arguments().parse(args)
    try:
        return _advise(options)
    except InputError as exc:
        raise UserError(str(exc)) from None


def _advise(options: argparse.Namespace) -> int:
    from bench.advise.advice import advise
    from bench.advise.errors import InputError
    from bench.advise.plot import plot
    from bench.advise.report import document, headline, text

    shown = sys.stderr.isatty() and not options.json
    advice = advise(_question(options), _progress if shown else lambda number, of, what: None)
    if shown:
        sys.stderr.write(f"\r{'':<78}\r")
    print(text(advice), flush=True)
    code = 0
    if options.plot is not None:
        try:
            plot(advice, options.plot, headline(advice))
            print(f"\nPlot: {options.plot}", flush=True)
        except InputError as exc:
            print(f"warmroute: no plot: {exc}", file=sys.stderr)
            code = 1
    if options.json:
        print(json.dumps(document(advice)))
    return code


def _question(options: argparse.Namespace) -> Any:
    from bench.advise.advice import Question
    from bench.advise.gpu import gpu
    from bench.advise.model_config import KV_DTYPES, read_model
    from bench.advise.network import DEFAULT_GBPS
    from bench.advise.server import plan_server
    from bench.advise.splits import Objectives
    from bench.advise.traffic import draw, read_trace

    if options.kv_dtype not in KV_DTYPES:
        raise UserError(f"--kv-dtype {options.kv_dtype}: not known; there is: {', '.join(KV_DTYPES)}")
    if options.trace is not None and options.metrics_interval_s is not None:
        raise UserError("--metrics-interval-s goes with --from-metrics, not with --trace")
    if options.plot is not None and not options.plot.parent.is_dir():
        raise UserError(f"--plot {options.plot}: {options.plot.parent} is no directory")
    model, kind = read_model(options.model_config), gpu(options.gpu)
    notes: list[str] = []
    kv_tokens, kv_source = options.kv_tokens, "as given"
    if options.trace is not None:
        traffic = read_trace(options.trace)
    else:
        given = [url.removesuffix("/").removesuffix("/metrics") for url in options.from_metrics]
        urls = list(dict.fromkeys(map(worker_url, given)))
        it = asyncio.run(count(urls, options.metrics_interval_s or 0.0))
        traffic = draw(
            ", ".join(urls), it.requests_per_s, _histogram(it.prompts), _histogram(it.answers), it.hit_share,
            options.requests or _DRAWN, options.seed,
        )  # fmt: skip
        notes.append(it.how)
        if kv_tokens is None and it.kv_tokens is not None:
            kv_tokens, kv_source = it.kv_tokens, "as the servers say"
    if options.rate is not None:
        traffic = traffic.at_rate(options.rate, options.seed)
        notes.append(f"arrivals made {options.rate:g} a second (--rate)")
    elif not traffic.span_s:
        raise UserError(f"{options.trace}: all requests bear the same time; give --rate")
    longest = model.max_context_tokens or traffic.longest_tokens
    plan = plan_server(
        model,
        kind,
        tensor_parallel=options.tensor_parallel,
        value_bytes=KV_DTYPES[options.kv_dtype],
        context_tokens=max(1, round(traffic.mean_input_tokens + traffic.mean_output_tokens)),
        memory_share=options.gpu_memory_utilization,
        kv_tokens=kv_tokens,
        kv_source=kv_source,
        chunk_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
    )
    if options.network_gbps is None:
        notes.append("the network was not given (--network-gbps)")
    return Question(
        plan=plan,
        traffic=traffic,
        servers=options.servers,
        objectives=Objectives(options.slo_ttft_ms / 1e3, options.slo_tpot_ms / 1e3),
        gbps=DEFAULT_GBPS if options.network_gbps is None else options.network_gbps or None,
        context_tokens=options.context_tokens or longest,
        requests=options.requests,
        block_size=options.block_size,
        seed=options.seed,
        notes=tuple(notes),
    )


def _histogram(lengths: Lengths) -> Any:
    from bench.advise.drawn import Histogram

    return Histogram(lengths.rising(), lengths.mean_tokens)


def _progress(number: int, of: int, what: str) -> None:
    """One line on a terminal, written over by the next."""
    sys.stderr.write(f"\r{f'simulating {number}/{of}: {what}':<78}")
    sys.stderr.flush()
