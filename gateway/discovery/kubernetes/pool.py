"""InferencePool: which pods, by which ports."""

from __future__ import annotations

from typing import Final

import msgspec

GROUP: Final = "inference.networking.k8s.io"
KIND: Final = "InferencePool"
_MOST_PORTS: Final = 8


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str]


class _Port(msgspec.Struct):
    number: int


class _Spec(msgspec.Struct, rename="camel"):
    selector: _Selector
    target_ports: list[_Port]


class _Meta(msgspec.Struct):
    name: str


class _Pool(msgspec.Struct):
    metadata: _Meta
    spec: _Spec


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """`selector` is a label selector as the API's query takes it."""

    name: str
    selector: str
    ports: tuple[int, ...]


_pool = msgspec.json.Decoder(_Pool)


def path_of(namespace: str) -> str:
    return f"/apis/{GROUP}/v1/namespaces/{namespace}/inferencepools"


def read_pool(text: bytes) -> Pool:
    """Raises msgspec.MsgspecError, or ValueError for a pool that no API server would have taken."""
    pool = _pool.decode(text)
    labels, ports = pool.spec.selector.match_labels, [port.number for port in pool.spec.target_ports]
    if not labels:
        raise ValueError("its selector has no matchLabels, and would take every pod")
    if not 0 < len(ports) <= _MOST_PORTS or len(set(ports)) < len(ports) or not all(0 < it <= 65535 for it in ports):
        raise ValueError(f"its targetPorts have to be 1 to {_MOST_PORTS} different ports")
    return Pool(
        name=pool.metadata.name,
        selector=",".join(f"{name}={value}" for name, value in sorted(labels.items())),
        ports=tuple(ports),
    )


class PoolRef(msgspec.Struct):
    """Which pool an objective or a rewrite is for."""

    name: str
    group: str = GROUP
    kind: str = KIND

    def names(self, pool: str) -> bool:
        return (self.name, self.group or GROUP, self.kind or KIND) == (pool, GROUP, KIND)
