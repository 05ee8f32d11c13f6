"""What a process shares with the others of its gateway (gateway/processes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.auth.door import MakeAccount
from gateway.proxy.places import Places


class Siblings(msgspec.Struct, frozen=True, kw_only=True):
    """`hub` makes clients of what is told there, given their longest wait in seconds; None: nothing is told there.
    `keeps_learned`: this is the one of them that has the file of what was learned.
    """

    hub: Callable[[float], Any] | None
    account: MakeAccount
    places: Places
    keeps_learned: bool
