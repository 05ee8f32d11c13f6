"""Paths that only processes of one gateway ask each other for, on sockets in their folder."""

from __future__ import annotations

from typing import Final

import msgspec

FRONT_SOCKET: Final = "front.sock"
"""The supervisor's."""
METRICS: Final = "/internal/metrics"
RECORD: Final = "/internal/record"
NOTICE: Final = "/internal/notice"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to engines by one process. `cleared`: workers whose prefix cache is empty; `models`: adapters may
    have come or gone.
    """

    cleared: list[str] = []
    models: bool = False
