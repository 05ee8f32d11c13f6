"""Which model is asked for in place of the one a client names (InferenceModelRewrite of llm-d and GAIE)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from gateway.discovery.kubernetes import RewriteRule as Rule
from gateway.discovery.kubernetes import RewriteTarget as Target
from gateway.errors import UserError


class Rewrites:
    """Rules of a discovery, which `replace` sets as a whole, before those of the configuration. Of several for one
    model the first counts.
    """

    def __init__(self, configured: Sequence[Rule] = ()) -> None:
        self._configured = tuple(configured)
        self._found: tuple[Rule, ...] = ()
        self._by_model: dict[str, tuple[Target, ...]] = {}
        self._others: tuple[Target, ...] = ()
        self._index()

    def configure(self, configured: Sequence[Rule]) -> None:
        """Those of the configuration from now on."""
        self._configured = tuple(configured)
        self._index()

    def replace(self, found: Sequence[Rule]) -> None:
        self._found = tuple(found)
        self._index()

    def _index(self) -> None:
        by_model: dict[str, tuple[Target, ...]] = {}
        others: tuple[Target, ...] = ()
        for rule in (*self._found, *self._configured):
            for model in rule.models:
                by_model.setdefault(model, rule.targets)
            if not rule.models:
                others = others or rule.targets
        self._by_model, self._others = by_model, others

    def __bool__(self) -> bool:
        return bool(self._by_model or self._others)

    def target(self, model: str, rng: random.Random) -> str:
        """By weight, of which 0 is never taken; the model itself where nothing is said of it."""
        targets = self._by_model.get(model, self._others)
        weights = [max(0, target.weight) for target in targets]
        if not any(weights):
            return model
        return rng.choices(targets, weights)[0].model


def read_rewrites(entries: Iterable[str]) -> list[Rule]:
    """`model=target` or `model=target*weight` each; those of one model share its requests by weight. Raises
    UserError.
    """
    found: dict[str, list[Target]] = {}
    for entry in entries:
        model, equals, text = (part.strip() for part in entry.partition("="))
        target, star, weight = (part.strip() for part in text.rpartition("*"))
        if not star:
            target, weight = weight, "1"
        if not (equals and model and target and weight.isascii() and weight.isdigit() and len(weight) < 10):
            raise UserError(f"epp.rewrites: {entry!r} must be MODEL=TARGET or MODEL=TARGET*WEIGHT")
        found.setdefault(model, []).append(Target(target, int(weight)))
    return [Rule((model,), tuple(targets)) for model, targets in found.items()]
