"""InferenceModelRewrite: which model a request for a model is to be sent for, by weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec

from gateway.discovery.kubernetes.pool import PoolRef

PLURAL: Final = "inferencemodelrewrites"


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    creation_timestamp: str = ""


class _Model(msgspec.Struct):
    value: str
    type: Literal["Exact"] = "Exact"


class _Match(msgspec.Struct):
    model: _Model | None = None


class _Target(msgspec.Struct, rename="camel"):
    model_rewrite: str
    weight: Annotated[int, msgspec.Meta(lt=1 << 31)] | None = None


class _Rule(msgspec.Struct):
    matches: list[_Match] | None = None
    targets: list[_Target] | None = None


class _Spec(msgspec.Struct, rename="camel"):
    pool_ref: PoolRef
    rules: list[_Rule]


class _Rewrite(msgspec.Struct):
    metadata: _Meta
    spec: _Spec


class RewriteTarget(msgspec.Struct, frozen=True):
    """`weight` relative to those beside it."""

    model: str
    weight: int = 1


class RewriteRule(msgspec.Struct, frozen=True):
    """`models`: whom it is for, exactly; empty: any that no rule names."""

    models: tuple[str, ...]
    targets: tuple[RewriteTarget, ...]


class ModelRewrite(msgspec.Struct, frozen=True, kw_only=True):
    """`created`: as the API writes times, which sort as texts."""

    name: str
    created: str
    rules: tuple[RewriteRule, ...]


_rewrite = msgspec.json.Decoder(_Rewrite)


def read_rewrite(text: bytes, pool: str) -> ModelRewrite | None:
    """None: it is for another pool. Raises msgspec.MsgspecError, or ValueError for a negative weight."""
    rewrite = _rewrite.decode(text)
    if not rewrite.spec.pool_ref.names(pool):
        return None
    return ModelRewrite(
        name=rewrite.metadata.name,
        created=rewrite.metadata.creation_timestamp,
        rules=tuple(RewriteRule(_models(rule), _targets(rule)) for rule in rewrite.spec.rules),
    )


def in_order(rewrites: Iterable[ModelRewrite]) -> tuple[RewriteRule, ...]:
    """All rules: those of the oldest rewrite first, which are believed where two are for one model."""
    ordered = sorted(rewrites, key=lambda rewrite: (rewrite.created, rewrite.name))
    return tuple(rule for rewrite in ordered for rule in rewrite.rules)


def _models(rule: _Rule) -> tuple[str, ...]:
    models = [match.model for match in rule.matches or ()]
    return tuple(model.value for model in models if model is not None) if None not in models else ()


def _targets(rule: _Rule) -> tuple[RewriteTarget, ...]:
    targets = rule.targets or ()
    if any(target.weight is not None and target.weight < 0 for target in targets):
        raise ValueError("a weight is below 0")
    return tuple(RewriteTarget(it.model_rewrite, 1 if it.weight is None else it.weight) for it in targets)
