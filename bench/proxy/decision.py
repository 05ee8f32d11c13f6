"""What our own decision takes by itself: body -> JSON -> token ids -> index -> planner -> booking, and back.

`python -m bench.proxy.decision CONFIG N_SMALL N_LARGE` is a gateway of that configuration that serves nobody. For every
line it reads, it decides over so many of the benchmark's bodies and prints CPU microseconds of the whole process per
decision.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence

from bench.proxy import prompts
from bench.proxy.load import fresh
from gateway.config import load_config
from gateway.run import Gateway
from scorer.types import Outcome, OutcomeKind

ROUTE = "chat"
_HEADERS = {"content-type": "application/json"}
_ids = itertools.count()


async def _decide(gateway: Gateway, bodies: Sequence[bytes]) -> float:
    """CPU microseconds of one decision, mean over `bodies`."""
    core = gateway.core
    began_s = time.process_time()
    for body in bodies:
        name = f"decision-{next(_ids)}"
        facts = await core.reader.read(name, ROUTE, body, _HEADERS)
        core.planner.plan(facts, core.up.names(), time.monotonic(), core.rng)
        core.planner.observe(name, Outcome(kind=OutcomeKind.END), time.monotonic())
    return (time.process_time() - began_s) / len(bodies) * 1e6


async def _serve(config_file: str, n_small: int, n_large: int) -> None:
    bodies = prompts.bodies(n_small=n_small, n_large=n_large)
    kinds = {
        "2kb": bodies.small * 2,
        "64kb": bodies.large,
        "2kb_fresh": bodies.fresh_small,
        "64kb_fresh": bodies.fresh_large[:16],
    }
    async with Gateway(load_config(config_file)) as gateway:
        print(json.dumps({"admin_port": gateway.admin_port}), flush=True)
        warm = False
        while await asyncio.to_thread(sys.stdin.readline):
            found = {}
            if not warm:  # Nobody has been decided on yet, and the workers were not known before.
                for asked in kinds.values():
                    await _decide(gateway, asked)
                warm = True
            for name, asked in kinds.items():
                found[name] = await _decide(gateway, [fresh(body, next(_ids)) for body in asked])
            print(json.dumps(found), flush=True)


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m bench.proxy.decision", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("n_small", type=int)
    parser.add_argument("n_large", type=int)
    args = parser.parse_args()
    uvloop.run(_serve(args.config, args.n_small, args.n_large))


if __name__ == "__main__":
    main()
