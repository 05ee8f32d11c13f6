"""A pod and the ports of its pool, as workers. Nothing here asks anybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.config.schema import Worker

ROLE_LABEL: Final = "llm-d.ai/role"
ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""The newer name is believed before the older one."""
_OWN: Final = "warmroute/"
_OWN_KEYS: Final = ("role", "weight", "events", "replay", "nixl", "server_name")
_LABEL: Final = _OWN + "label."
_ROLES: Final = {
    "both": "both",
    "decode": "decode",
    "prefill": "prefill",
    "prefill-decode": "both",
    "encode-prefill": "prefill",
    "encode-prefill-decode": "both",
    "encode": None,
}
"""What llm-d's roles are here; an encoder alone answers no request. Without a label a pod serves whole requests."""
_OVER: Final = ("Failed", "Succeeded")


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[_Condition] | None = None


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str | None = None


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """What of a pod matters here. `ready`: it takes requests; `over`: its containers have ended for good, and its
    address may be another pod's by now.
    """

    name: str
    uid: str
    ip: str
    node: str | None = None
    ready: bool = False
    over: bool = False
    role: str | None = None
    active_ports: str | None = None
    own: Mapping[str, str] = {}
    """Our own annotations, by key of a worker or `label.NAME`."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods of a pool have in common. Templates have {ip}, {port}, {pod} and {namespace} in them, `*` is {ip}
    too.
    """

    namespace: str
    ports: tuple[int, ...]
    scheme: str = "http"
    events: str | None = None
    replay: str | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """One port of a pod. `rank` is the data-parallel rank of its engine, where that does not say it."""

    worker: Worker
    rank: int


_pod = msgspec.json.Decoder(_Pod)


def read_pod(text: bytes) -> Pod:
    """Raises msgspec.MsgspecError."""
    pod = _pod.decode(text)
    meta, status = pod.metadata, pod.status
    annotations = meta.annotations or {}
    ready = any(it.type == "Ready" and it.status == "True" for it in status.conditions or ())
    return Pod(
        name=meta.name,
        uid=meta.uid,
        ip=status.pod_ip,
        node=pod.spec.node_name,
        ready=ready and meta.deletion_timestamp is None and status.phase not in _OVER and bool(status.pod_ip),
        over=status.phase in _OVER,
        role=(meta.labels or {}).get(ROLE_LABEL),
        active_ports=next((annotations[name] for name in ACTIVE_PORTS if name in annotations), None),
        own={name.removeprefix(_OWN): value for name, value in annotations.items() if name.startswith(_OWN)},
    )


def endpoints_of(pod: Pod, shape: Shape) -> tuple[dict[str, Endpoint], list[str]]:
    """(an endpoint for each active port by name, what is wrong with the pod); ready or not. Of a pool with one port
    they are called like the pod, else `<pod>-rank-<index of the port in the pool>`.
    """
    if not pod.ip:
        return {}, []
    problems: list[str] = []
    shared = _of_pod(pod, problems)
    if shared is None:
        return {}, problems
    found: dict[str, Endpoint] = {}
    active = _active(pod.active_ports, shape.ports)
    for rank, port in enumerate(shape.ports):
        if port not in active:
            continue
        name = pod.name if len(shape.ports) == 1 else f"{pod.name}-rank-{rank}"
        worker = _worker(pod, name, port, shape, shared)
        if isinstance(worker, str):
            return {}, [*problems, worker]
        found[name] = Endpoint(worker, rank)
    return found, problems


def _active(given: str | None, ports: Sequence[int]) -> set[int]:
    if given is None:
        return set(ports)
    words = {word.strip().lstrip("0") for word in given.split(",")}
    return {port for port in ports if str(port) in words}


def _of_pod(pod: Pod, problems: list[str]) -> dict[str, Any] | None:
    """Keys of its workers from label and annotations; None: it is none of our workers."""
    shared: dict[str, Any] = {"labels": {"node": pod.node} if pod.node else {}}
    if pod.role is not None:
        if pod.role not in _ROLES:
            problems.append(f"pod {pod.name}: {ROLE_LABEL}={pod.role} is no role known here; it gets no requests")
            return None
        role = _ROLES[pod.role]
        if role is None:
            return None
        shared["role"] = role
    for key, value in sorted(pod.own.items()):
        problem = _take_own(key.replace("-", "_"), key, value, shared)
        if problem is not None:
            problems.append(f"pod {pod.name}: annotation {_OWN}{key}: {problem}; it is left out")
    return shared


def _take_own(field: str, key: str, value: str, shared: dict[str, Any]) -> str | None:
    """The problem with one annotation of ours; None when it was taken."""
    if key.startswith("label.") and key != "label.":
        shared["labels"] = {**shared["labels"], key.removeprefix("label."): value}
        return None
    if field not in _OWN_KEYS:
        return "is not known"
    try:
        read = msgspec.convert({"url": "http://pod", field: _at(value, "0.0.0.0", 1)}, Worker, strict=False)  # noqa: S104
    except msgspec.ValidationError as exc:
        return str(exc)
    shared[field] = value if field in ("events", "replay", "nixl") else getattr(read, field)
    return None


def _worker(pod: Pod, name: str, port: int, shape: Shape, shared: Mapping[str, Any]) -> Worker | str:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    keys = {"url": f"{shape.scheme}://{host}:{port}", **shared}
    for field in ("events", "replay"):
        template = keys.get(field) or getattr(shape, field)
        if template is not None:
            text = _at(template, host, port)
            keys[field] = text.replace("{pod}", pod.name).replace("{namespace}", shape.namespace)
    if keys.get("nixl") is not None:
        keys["nixl"] = _at(keys["nixl"], host, port)
    try:
        return msgspec.convert({"name": name, **keys}, Worker, strict=False)
    except msgspec.ValidationError as exc:
        return f"pod {pod.name}: cannot be used: {exc}"


def _at(template: str, host: str, port: int) -> str:
    text = template.replace("{ip}", host).replace("{port}", str(port))
    return text.replace("//*:", f"//{host}:")
