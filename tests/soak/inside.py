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

_MOST_TYPES = 40


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

    signal.signal(signal.SIGUSR1, tell)
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
