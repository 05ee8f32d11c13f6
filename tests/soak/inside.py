"""`python -m tests.soak.inside FILE COMMAND...`: warmroute's command, which tells FILE about itself on SIGUSR1."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from gateway import cli
from gateway.tokens.cache import IdCache
from indexer import keys

_IDS_BYTES = 1 << 20
_RUNS = 256
_MOST_TYPES = 40


def _with_small_caches() -> None:
    """What is bounded, but takes hours to fill: it would be growth that means nothing."""
    made = IdCache.__init__
    IdCache.__init__ = lambda cache, most_bytes: made(cache, min(most_bytes, _IDS_BYTES))  # type: ignore[method-assign]
    keys._MOST_RUNS = _RUNS


def _told() -> dict[str, object]:
    try:
        n_tasks = len(asyncio.all_tasks(asyncio.get_running_loop()))
    except RuntimeError:
        n_tasks = -1
    gc.collect()
    kinds = Counter(type(each).__name__ for each in gc.get_objects())
    return {
        "tasks": n_tasks,
        "threads": threading.active_count(),
        "objects": kinds.total(),
        "kinds": dict(kinds.most_common(_MOST_TYPES)),
    }


def main() -> int:
    file = Path(sys.argv[1])

    def tell(number: int, frame: FrameType | None) -> None:
        half = file.with_suffix(".half")
        half.write_text(json.dumps(_told()), encoding="utf-8")
        os.replace(half, file)

    _with_small_caches()
    signal.signal(signal.SIGUSR1, tell)
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
