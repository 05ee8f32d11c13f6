"""InferenceObjective: how urgent the requests that name it are."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from gateway.discovery.kubernetes.pool import PoolRef

PLURAL: Final = "inferenceobjectives"


class _Meta(msgspec.Struct):
    name: str


class _Spec(msgspec.Struct, rename="camel"):
    pool_ref: PoolRef
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] | None = None


class _Objective(msgspec.Struct):
    metadata: _Meta
    spec: _Spec


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """`priority`: higher goes first, below 0 may be shed; 0 where it says none."""

    name: str
    priority: int


_objective = msgspec.json.Decoder(_Objective)


def read_objective(text: bytes, pool: str) -> Objective | None:
    """None: it is for another pool. Raises msgspec.MsgspecError."""
    objective = _objective.decode(text)
    if not objective.spec.pool_ref.names(pool):
        return None
    return Objective(name=objective.metadata.name, priority=objective.spec.priority or 0)
