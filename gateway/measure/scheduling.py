"""Measuring wall-clock time on a machine that others use too."""

from __future__ import annotations

import os
from contextlib import suppress


def ahead_of_others() -> str:
    """On a shared machine other processes show in wall-clock times and, through the caches, in CPU times. Says how this
    process, with all threads it has and makes, is scheduled now.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        _others(os.SCHED_FIFO, 1)
    except (AttributeError, OSError):
        return "as any other"
    return "ahead of others"


def as_any_other() -> None:
    """Again."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        _others(os.SCHED_OTHER, 0)


def _others(policy: int, priority: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # It has ended meanwhile.
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))
