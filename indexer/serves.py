"""Which models and adapters a worker serves, and so under which namespace a query meets its blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Serves:
    """One worker's names: `models` are all names of its one base model; with None (undeclared) any name is."""

    __slots__ = ("_adapters", "_models")

    def __init__(self, models: Iterable[str] | None, adapters: Iterable[str]) -> None:
        self._models = None if models is None else frozenset(models)
        self._adapters = frozenset(adapters)

    def namespace(
        self, model: str | None, lora: str | int | None, learned: Collection[str]
    ) -> tuple[bool, str | int | None]:
        """(whether this worker answers such a query, the adapter whose blocks count; None is the base model).

        An adapter may be asked for as `lora`, or as `model` the way OpenAI clients do. `learned` are the adapters that
        the worker's events have named.
        """
        is_adapter = model in self._adapters or model in learned
        is_base = model is None or (self._models is not None and model in self._models)
        if lora is not None:
            return self._models is None or is_base or is_adapter, lora
        if is_base or not is_adapter:
            return self._models is None or is_base, None
        return True, model


UNDECLARED = Serves(None, ())
"""Stands for a worker that nothing is known about."""
