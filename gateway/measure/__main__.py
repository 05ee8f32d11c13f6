"""`python -m gateway.measure front MODEL ROUNDS`, `... stall MODEL WINDOWS WINDOW_S` and `... ingest ROUNDS`: one JSON
object on stdout.

`... indexer WORKERS BLOCKS SECONDS` does so too, beside a process of `... serve-indexer WORKERS BLOCKS SOCKET`.
`... ask HELD ADDRESS`, `... watch ADDRESS` and `... keep WORKERS COPIES REDIS_URL` are of `python -m bench scale`.
`... planner|hub|asks|decides SETTING NUMBER` are of `python -m bench processes --central`.
`... picker PORT seen|unseen fast|grpcio ENDPOINT...` is the picker of `python -m bench epp` until it is told to stop.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from gateway.measure.asking import ask_indexer, keep_snapshots, watch_indexer
from gateway.measure.deciding import ask_planner, decide, serve_board, serve_planner
from gateway.measure.front import measure_front
from gateway.measure.indexer import measure_indexer, serve_indexer
from gateway.measure.ingest import measure_ingest
from gateway.measure.picker import serve_picker
from gateway.measure.scheduling import ahead_of_others
from gateway.measure.stall import measure_stall
from gateway.service import tune_interpreter

_DECIDING = {"planner": serve_planner, "hub": serve_board, "asks": ask_planner, "decides": decide}


def main(args: Sequence[str]) -> None:
    if args[0] == "serve-indexer":
        tune_interpreter()
        return serve_indexer(int(args[1]), int(args[2]), args[3])
    if args[0] == "ask":
        return ask_indexer(args[1], args[2])
    if args[0] == "watch":
        return watch_indexer(args[1])
    if args[0] == "keep":
        tune_interpreter()
        return keep_snapshots(args[1], int(args[2]), args[3])
    if args[0] in _DECIDING:
        tune_interpreter()
        return _DECIDING[args[0]](args[1], int(args[2]))
    if args[0] == "picker":
        return serve_picker(int(args[1]), args[2] == "seen", "fast" if args[3] == "fast" else "grpcio", args[4:])
    if args[0] == "indexer":
        tune_interpreter()
        measured, of = measure_indexer(int(args[1]), int(args[2]), float(args[3]))
        print(json.dumps({"figures": measured, "used": of}))
        return None
    used: dict[str, Any] = {"scheduled": ahead_of_others()}
    tune_interpreter()
    if args[0] == "ingest":
        figures = measure_ingest(int(args[1]))
    elif args[0] == "front":
        figures, encoder = measure_front(int(args[2]), args[1])
        used |= encoder
    else:
        figures = measure_stall(int(args[2]), float(args[3]), args[1])
    print(json.dumps({"figures": figures, "used": used}))
    return None


main(sys.argv[1:])
