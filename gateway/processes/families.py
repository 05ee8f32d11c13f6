"""Metric families on their way from a process to the supervisor."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

Labels = tuple[tuple[str, str], ...]


class Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    name: str
    labels: Labels
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[Sample]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Family])


def read(registry: CollectorRegistry) -> bytes:
    """All there is, encoded."""
    return _encode([_family(metric) for metric in registry.collect()])


def decode(data: bytes) -> list[Family]:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(data)


def metrics(families: Iterable[Family]) -> Iterable[Metric]:
    for family in families:
        metric = Metric(family.name, family.text, family.kind)
        for sample in family.samples:
            metric.add_sample(sample.name, dict(sample.labels), sample.value)
        yield metric


def _family(metric: Metric) -> Family:
    samples = [Sample(it.name, tuple(it.labels.items()), float(it.value)) for it in metric.samples]
    return Family(metric.name, metric.documentation, metric.type, samples)
