"""Headers by which a client, or who stands in front, says what a request is worth.

llm-d's names come before the ones that Gateway API Inference Extension had for the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from multidict import CIMultiDict

OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
REWRITE = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
CHOSEN_BY_TEST = "test-epp-endpoint-selection"
"""Of the conformance suite of GAIE, as the next."""
SERVED_FOR_TEST = "x-conformance-test-served-endpoint"
PICKED_FOR_TEST = "x-conformance-test-selected-endpoint"

_OURS = frozenset({*OBJECTIVE, *FAIRNESS, *REWRITE, CHOSEN_BY_TEST})
"""They have done their work here. Headers that steer workers go no further than the protocol."""
_LONGEST = 256


class Control(msgspec.Struct, frozen=True):
    """None: not said."""

    objective: str | None = None
    fairness_id: str | None = None
    model: str | None = None


def read_control(headers: Mapping[str, str]) -> Control:
    return Control(_first(headers, OBJECTIVE), _first(headers, FAIRNESS), _first(headers, REWRITE))


def not_for_workers(headers: CIMultiDict[str]) -> Iterator[str]:
    """Names of those that do not go on."""
    for name in headers:
        lower = name.lower()
        if lower in _OURS:
            yield lower


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    for name in names:
        value = headers.get(name, "").strip()
        if value:
            return value[:_LONGEST]
    return None
