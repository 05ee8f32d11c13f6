"""What picks and their watches share."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.epp.metrics import EppMetrics
from gateway.epp.places import Places
from gateway.epp.unseen import Unseen
from gateway.proxy.parts import Parts


class EppParts(msgspec.Struct, frozen=True, kw_only=True):
    """`began` and `over` are told of each pick, so that a drain can wait for them."""

    parts: Parts
    places: Places
    metrics: EppMetrics
    unseen: Unseen
    began: Callable[[], None] = lambda: None
    over: Callable[[], None] = lambda: None
