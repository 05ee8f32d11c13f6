"""InferenceModelRewrite: which model a request for a model is to be sent for, by weight."""

from __future__ import annotations

from typing import Final, Literal

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
    weight: int | None = None


class _Rule(msgspec.Struct):
    matches: list[_Match] | None = None
    targets: list[_Target] | None = None


class _Spec(msgspec.Struct, rename="camel"):
    pool_ref: PoolRef
    rules: list[_Rule]


class _Rewrite(msgspec.Struct):
    metadata: _Meta
    spec: _Spec


class RewriteTarget(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    weight: int


class RewriteRule(msgspec.Struct, frozen=True, kw_only=True):
    """`models`: the names it is for, None for any."""

    models: tuple[str, ...] | None
    targets: tuple[RewriteTarget, ...]


class ModelRewrite(msgspec.Struct, frozen=True, kw_only=True):
    """`created`: as the API writes times, which sort as texts; the older of two that match is believed."""

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
        rules=tuple(RewriteRule(models=_models(rule), targets=_targets(rule)) for rule in rewrite.spec.rules),
    )


def _models(rule: _Rule) -> tuple[str, ...] | None:
    if not rule.matches or any(match.model is None for match in rule.matches):
        return None
    return tuple(match.model.value for match in rule.matches if match.model is not None)


def _targets(rule: _Rule) -> tuple[RewriteTarget, ...]:
    targets = rule.targets or ()
    if any(target.weight is not None and target.weight < 0 for target in targets):
        raise ValueError("a weight is below 0")
    return tuple(RewriteTarget(model=it.model_rewrite, weight=1 if it.weight is None else it.weight) for it in targets)
