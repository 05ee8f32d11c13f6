"""The arguments of `warmroute advise`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from gateway.cli import Parser

_LEAST_REQUESTS = 10


def arguments() -> Parser:
    parser = Parser(
        "warmroute advise",
        "Does it pay to split prefill from decode for this traffic? Simulates whole servers and every split of as many "
        "under a recorded trace, or under traffic like that which running vLLM servers have counted.",
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake JSON lines or Azure CSV")
    source.add_argument("--from-metrics", nargs="+", metavar="URL", help="running vLLM servers, or their gateway")
    add("--model-config", type=Path, required=True, metavar="PATH", help="the model's config.json, or its directory")
    add("--gpu", required=True, metavar="NAME", help="h100, h200, ...; an unknown one lists the known")
    add("--servers", type=_positive_int, required=True, metavar="N", help="vLLM servers in all")
    add("--tensor-parallel", type=_positive_int, default=1, metavar="N", help="GPUs of one server (default: 1)")
    add("--slo-ttft-ms", type=_positive, default=1000.0, metavar="MS", help="time to first token (default: 1000)")
    add("--slo-tpot-ms", type=_positive, default=50.0, metavar="MS", help="mean time per further token (default: 50)")
    add("--network-gbps", type=_network, metavar="N", help="of one server, or nvlink for one host (default: 400)")
    add("--kv-dtype", default="auto", metavar="TYPE", help="vLLM's --kv-cache-dtype (default: auto, 16 bits)")
    add("--kv-tokens", type=_positive_int, metavar="N", help="KV cache of a server (default: memory less weights)")
    add("--gpu-memory-utilization", type=_share, default=0.9, metavar="SHARE", help="as vLLM's (default: 0.9)")
    add("--max-num-batched-tokens", type=_positive_int, default=8192, metavar="N", help="as vLLM's (default: 8192)")
    add("--max-num-seqs", type=_positive_int, default=256, metavar="N", help="as vLLM's (default: 256)")
    add("--block-size", type=_positive_int, metavar="N", help="to simulate with (default: the recommended one)")
    add("--context-tokens", type=_positive_int, metavar="N", help="of a full conversation (default: the model's most)")
    add("--rate", type=_positive, metavar="R", help="requests a second (default: the traffic's own)")
    add("--requests", type=_enough, metavar="N", help="to simulate (default: what takes about half a minute)")
    add(
        "--metrics-interval-s", type=_positive, metavar="S",
        help="with --from-metrics: count between two readings so far apart (default: since the servers were started)",
    )  # fmt: skip
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE", help="draw the fleets (png, svg, pdf; needs warmroute[bench])")
    add("--json", action="store_true", help="end with one JSON line")
    return parser


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _positive_int(text: str) -> int:
    value = _number(text)
    if not (value >= 1 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(value)


def _enough(text: str) -> int:
    value = _positive_int(text)
    if value < _LEAST_REQUESTS:
        raise argparse.ArgumentTypeError(f"{text} requests say nothing; at least {_LEAST_REQUESTS}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share (0 to 1)")
    return value


def _network(text: str) -> float:
    """Gb/s; 0 stands for NVLink."""
    return 0.0 if text.lower() == "nvlink" else _positive(text)
