"""The fixed rules by which routers decide whether a prompt is computed by the decode worker or by a prefill worker, and
`cost`, which is none: what is predicted to cost less.

header: only where somebody in front of us says so. local, always-remote: what they say. threshold:N: remote when at
least N prompt tokens are not cached on the decode worker (llm-d's prefix-based decider; 0 turns it off, as there).
isl:N,R: local when fewer than N tokens are uncached and they are less than the share R of the prompt (Dynamo's
isl_bounding: 2048, 0.7). isl-ratio:N,R: local when either is so (Dynamo's isl_or_load without its load: 4096, 0.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from scorer.types import PdReason

Rule = Callable[[int, int], bool]
"""(prompt tokens, tokens cached on the decode worker) -> whether a prefill worker is to compute the prompt."""

FORMS = "cost, header, local, always-remote, threshold:N, isl:N,RATIO or isl-ratio:N,RATIO"


class PdPolicy(NamedTuple):
    """A rule by its name. `reason` is what its decisions are put down to."""

    text: str
    rule: Rule
    reason: PdReason

    @property
    def by_cost(self) -> bool:
        return self.reason is PdReason.COST


def parse_policy(text: str) -> PdPolicy:
    """The policy named by `text`. Raises ValueError."""
    name, _, numbers = text.partition(":")
    if not numbers and name in _PLAIN and ":" not in text:
        return PdPolicy(text, *_PLAIN[name])
    try:
        if name == "threshold":
            return PdPolicy(text, _threshold(_tokens(numbers)), PdReason.THRESHOLD)
        if name in ("isl", "isl-ratio"):
            tokens, _, ratio = numbers.partition(",")
            rule = _isl if name == "isl" else _isl_ratio
            return PdPolicy(text, rule(_tokens(tokens), _ratio(ratio)), PdReason.THRESHOLD)
    except ValueError as exc:
        raise ValueError(f"{text!r} is no disaggregation policy: {exc}; there are {FORMS}") from None
    raise ValueError(f"{text!r} is no disaggregation policy; there are {FORMS}")


def _threshold(least: int) -> Rule:
    return lambda prompt, cached: 0 < least <= prompt - cached


def _isl(tokens: int, ratio: float) -> Rule:
    return lambda prompt, cached: not (prompt - cached < tokens and prompt - cached < ratio * prompt)


def _isl_ratio(tokens: int, ratio: float) -> Rule:
    return lambda prompt, cached: not (prompt - cached < tokens or prompt - cached < ratio * prompt)


_PLAIN: dict[str, tuple[Rule, PdReason]] = {
    "cost": (lambda prompt, cached: False, PdReason.COST),
    "header": (lambda prompt, cached: False, PdReason.NO_HINT),
    "local": (lambda prompt, cached: False, PdReason.POLICY),
    "always-remote": (lambda prompt, cached: True, PdReason.POLICY),
}


def _tokens(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is no number of tokens")
    return int(text)


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise ValueError(f"{text.strip()!r} is no share between 0 and 1")
    return ratio
