"""What a decision takes by itself: body -> JSON -> token ids -> index -> planner -> booking, and back.

`python -m gateway.debug.decision CONFIG` is a gateway of that configuration that serves nobody; `python -m bench proxy`
starts one. Its first line says `{"admin_port": N}`. Every line it reads is a JSON object of lists of bodies of
/v1/chat/completions by name; it answers CPU microseconds per decision by name, of all its threads.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from itertools import count

from gateway.config import load_config
from gateway.core import Core
from gateway.run import Gateway
from scorer.types import Outcome, OutcomeKind

_HEADERS = {"content-type": "application/json"}
_ids = count()


async def decide(core: Core, bodies: Sequence[bytes]) -> float:
    """CPU microseconds of one decision, mean over `bodies`. Raises what refuses a request with such a body."""
    began_s = time.process_time()
    for body in bodies:
        name = f"decision-{next(_ids)}"
        facts = await core.reader.read(name, "chat", body, _HEADERS)
        core.planner.plan(facts, core.up.names(), time.monotonic(), core.rng)
        core.planner.observe(name, Outcome(kind=OutcomeKind.END), time.monotonic())
    return (time.process_time() - began_s) / len(bodies) * 1e6


async def _serve(config_file: str) -> None:
    async with Gateway(load_config(config_file)) as gateway:
        print(json.dumps({"admin_port": gateway.admin_port}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = {name: [body.encode() for body in bodies] for name, bodies in json.loads(line).items()}
            found = {name: await decide(gateway.core, bodies) for name, bodies in asked.items()}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(sys.argv[1]))
