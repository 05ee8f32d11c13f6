"""The arms of a comparison, by name. Each module registers its own in a dict `ARMS: dict[str, Factory]`."""

from __future__ import annotations

import importlib
from functools import cache

from bench.sim.router import Factory

MODULES = ("basic", "fixed", "llmd", "dynamo", "kv_aware", "lmetric", "conductor", "ppd", "edpp", "clairvoyant")
"""Modules of this package that have an `ARMS`."""


@cache
def arms() -> dict[str, Factory]:
    """Every arm there is. Raises ValueError when two modules claim one name."""
    found: dict[str, Factory] = {}
    for module in MODULES:
        for name, factory in importlib.import_module(f"bench.sim.arms.{module}").ARMS.items():
            if name in found:
                raise ValueError(f"two arms are named {name!r}")
            found[name] = factory
    return found


def arm(name: str) -> Factory:
    """The arm called `name`; ValueError names the known ones."""
    try:
        return arms()[name]
    except KeyError:
        raise ValueError(f"no arm {name!r}; there is: {', '.join(sorted(arms()))}") from None
