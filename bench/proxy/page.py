"""docs/proxy-benchmark.md, made from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.proxy import report
from bench.proxy.measure import MIN_ACCEPTED, MIN_BUSY
from bench.proxy.routers import PINS

HEAD = (
    "<!-- Generated; do not edit. python -m bench proxy --peers-venv PATH --markdown docs/proxy-benchmark.md -->",
    "# The proxy by itself",
)
SECTIONS = (
    "How it is measured",
    "What to keep in mind",
    "Targets",
    "Figures",
    "Memory and versions",
    "Our own decision",
)
TARGET_HEADS = ("target", "goal", "measured", "met")

_PINS = ", ".join(f"{name} {version}" for name, version in PINS.items())
_HOW = f"""
What a router costs by itself, in front of workers that cost next to nothing: **CPU microseconds of its whole process
tree per finished request, and per streamed chunk**. CPU time is what a core has to offer; wall time on a shared machine
says more about the neighbours.

- Four workers are raw protocols in one process (`bench/proxy/backend.py`) with vLLM's faces: models, version, metrics
  of some 30 kB, answers of fixed text, streams; neither `/render` nor `/tokenize`. The load is closed loops on raw
  connections (`bench/proxy/load.py`): each sends its next request when its last answer is complete. Both are Python on
  uvloop and take some 16 us of CPU per request together. Load and workers have one core, the router another.
- `direct` is the load against the workers without a router; `added` is what a router adds to its p50 and p99.
- 256 different bodies of 2 KB, of which the first half of the prompt is the same in all; 64 different ones of 64 KB,
  chats of some 25 turns. Every router has seen each before anything is counted. In the cases called new, the last 16
  characters of the prompt are different in each request, as in a chat that goes on.
- Streams: 64 at a time, 200 chunks of some 190 bytes each; as fast as they are taken, or one every 10 ms, all streams
  of a worker in one step as an engine's are. Each chunk bears the time it was written at; in the paced case it is read,
  and the times shown are delays of chunks.
- **Ours decides as it does by default**: the body is read, rendered and tokenised by a local tokenizer (a BPE trained
  when the benchmark starts), looked up in an index filled by KV events over ZeroMQ (each worker holds a quarter of the
  prompts and what they share), priced, booked; metrics, access log, scrapes and learning are on. `real ids` is the
  share of prompts that had token ids, `hits` the share of their tokens found cached on the worker chosen.
- `floor` is a proxy in Python that only passes whole requests on, to workers in turn (`bench/proxy/floor.py`): what
  the interpreter, the loop and the kernel cost before anything is read, decided, counted or logged.
- Peers run by the command lines their users write ({_PINS}),
  with their default logs, as ours. `python -m bench proxy --install-peers DIR` makes an environment for
  `--peers-venv DIR`; what is not there is named and left out.
- All routers are up at once and take turns: one sample each, case by case, in several rounds, each beginning with
  another router. Figures are medians over the rounds, with the least and the most beside them; `ours / it` is a ratio
  of two of them.
- A sample counts as accepted where one of the two sides was at least {100 * MIN_BUSY:.0f} % busy (with one request at a
  time and with paced streams nobody is, and all count). Where fewer than {MIN_ACCEPTED} were, all samples are used.
  Failures are counted in all of them and shown as `success`; a target is not judged on a case in which a side failed.
"""

_CAVEATS = """
- CPU per request depends on how busy a router is: with one request at a time every wake-up is paid by one request, with
  32 at a time they share. Latencies with 32 or 256 at a time are mostly the queue of a closed loop.
- Chunks that come as fast as they are taken are joined on the way by whoever is slower; per-chunk cost is then low for
  everybody, and lower for the slow. The paced case is the one to plan with.
- Bodies that repeat are found in caches (ours keeps token ids of prompts seen lately, peers their trees). The new ones
  show what a prompt costs that nobody has seen.
- With `--log-level error`, which their users may set, vllm-router round_robin took 13 % less than with its default and
  smg round_robin 22 % less (2 KB, 32 at a time); vllm-router cache_aware took the same.
- No TLS, no HTTP/2, no authentication, no failures, four workers.
- The KV events of all prompts arrive before the run; during it each worker announces a block now and then, as one that
  decodes does, and no more. What events cost is in `python -m bench micro`.
"""


def page(run: report.Run, targets: Sequence[Mapping[str, Any]]) -> str:
    parts = [*HEAD, ""]
    bodies = (
        [*_HOW.strip().splitlines(), "", "This run: " + "; ".join(run.setting) + "."],
        _CAVEATS.strip().splitlines(),
        _targets(targets),
        _figures(run),
        table(report.MEMORY_HEADS, report.memory_rows(run)) + _missing(run),
        _decision(run),
    )
    for title, lines in zip(SECTIONS, bodies, strict=True):
        parts += [f"## {title}", "", *lines, ""]
    return "\n".join(parts).rstrip() + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows)]


def _targets(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    met = {True: "yes", False: "**no**", None: "not measured"}
    rows = [
        (t["name"], t["goal"], "" if t["measured"] is None else f"{t['measured']:.2f}", met[t["met"]]) for t in targets
    ]
    return table(TARGET_HEADS, rows)


def _figures(run: report.Run) -> list[str]:
    lines: list[str] = []
    for case in run.cases:
        lines += [f"### {report.title(case)}", "", *table(report.TABLE_HEADS, report.rows(run, case)), ""]
    return lines[:-1]


def _missing(run: report.Run) -> list[str]:
    return ["", "Not measured:", *(f"- {text.splitlines()[0]}" for text in run.missing)] if run.missing else []


def _decision(run: report.Run) -> list[str]:
    return [
        "Body to booking and back (JSON, template, token ids, index, planner), in a process that serves nobody on the",
        "router's core, CPU time of all its threads, median of the rounds:",
        "",
        *table(("bodies", "CPU us"), [(kind.replace("_", ", "), f"{us:,.0f}") for kind, us in run.decision_us.items()]),
    ]
