"""Pods to workers: any pod beside a naive reading of it, and any history of pods beside a naive fleet."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.discovery.kubernetes.pods import Pod, Shape, endpoints_of, read_pod
from gateway.discovery.kubernetes.servers import Servers
from scorer.types import ChangeKind, WorkerChange
from tests.support.kube_world import Fleet

PORTS = st.lists(st.integers(1, 65535), min_size=1, max_size=8, unique=True).map(tuple)
ROLES = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "both": "both",
    "prefill-decode": "both",
    "encode-prefill-decode": "both",
    None: "both",
}
WORD = st.sampled_from(["", " ", "http", "-1", "0", "8000.0", "٣"]) | st.integers(1, 65535).map(str)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn, ports: tuple[int, ...]) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": "a", "uid": "u"}
    status: dict[str, Any] = {}
    if role := draw(st.none() | st.sampled_from([*filter(None, ROLES), "encode", "poet"])):
        meta["labels"] = {"llm-d.ai/role": role, "app": "vllm"}
    words = st.lists(WORD | st.sampled_from(ports).map(lambda port: f" {port}"), max_size=5).map(",".join)
    names = st.sampled_from(["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports", "x"])
    meta["annotations"] = draw(st.none() | st.dictionaries(names, words))
    if draw(st.booleans()):
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    if ip := draw(st.sampled_from([None, "", "10.1.2.3", "fd00::9"])):
        status["podIP"] = ip
    kinds = st.fixed_dictionaries(
        {"type": st.sampled_from(["Ready", "PodScheduled"]), "status": st.sampled_from(["True", "False", "Unknown"])}
    )
    status["conditions"] = draw(st.none() | st.lists(kinds, max_size=3))
    status["phase"] = draw(st.sampled_from(["Pending", "Running", "Failed", "Succeeded"]))
    return {"metadata": meta, "status": status}


def oracle(body: dict[str, Any], ports: tuple[int, ...]) -> tuple[bool, dict[str, tuple[str, str]]]:
    """(takes requests, {name: (url, role)}), read off the contract."""
    meta, status = body["metadata"], body["status"]
    ip = status.get("podIP")
    is_ready = any(it["type"] == "Ready" and it["status"] == "True" for it in status["conditions"] or [])
    serves = bool(ip) and is_ready and "deletionTimestamp" not in meta and status["phase"] in ("Pending", "Running")
    role = (meta.get("labels") or {}).get("llm-d.ai/role")
    if not ip or role not in ROLES:
        return serves, {}
    annotations = meta["annotations"] or {}
    active = annotations.get("llm-d.ai/active-ports", annotations.get("inference.networking.k8s.io/active-ports"))
    host = f"[{ip}]" if ":" in ip else ip
    found = {}
    for index, port in enumerate(ports):
        if active is None or str(port) in [word.strip() for word in active.split(",")]:
            found["a" if len(ports) == 1 else f"a-rank-{index}"] = (f"http://{host}:{port}", ROLES[role])
    return serves, found


@given(st.data(), PORTS)
def test_a_pod_is_read_as_the_contract_says(data: st.DataObject, ports: tuple[int, ...]) -> None:
    body = data.draw(bodies(ports))
    pod = read_pod(json.dumps(body).encode())
    found, _ = endpoints_of(pod, Shape(namespace="n", ports=ports))
    serves, expected = oracle(body, ports)
    assert pod.ready == serves
    assert {name: (it.worker.url, it.worker.role) for name, it in found.items()} == expected


@given(st.dictionaries(st.text(max_size=12).map(lambda key: f"warmroute/{key}"), st.text(max_size=12), max_size=4))
def test_whatever_is_written_into_annotations_the_pod_serves(annotations: dict[str, str]) -> None:
    body = {"metadata": {"name": "a", "annotations": annotations}, "status": {"podIP": "10.0.0.1"}}
    found, _ = endpoints_of(read_pod(json.dumps(body).encode()), Shape(namespace="n", ports=(8000,)))
    assert found["a"].worker.url == "http://10.0.0.1:8000"


POD = st.builds(
    Pod,
    name=st.just(""),
    uid=st.sampled_from(["u1", "u2"]),
    ip=st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
    ready=st.booleans(),
    role=st.sampled_from([None, "encode", "decode"]),
    active_ports=st.sampled_from([None, "", "8000", "8001"]),
)
STEP = st.tuples(st.sampled_from(["a", "b"]), st.none() | POD, st.sampled_from([(8000,), (8000, 8001)]))


SHARED = {"name": "", "uid": "u1", "ip": "10.0.0.1", "ready": True}


@example([("a", Pod(**SHARED), (8000,)), ("b", Pod(**SHARED), (8000,)), ("a", Pod(**SHARED), (8000, 8001))])
@given(st.lists(STEP, max_size=30))
def test_any_history_ends_with_who_is_ready_now(steps: list[tuple[str, Pod | None, tuple[int, ...]]]) -> None:
    servers, fleet = Servers(), Fleet()
    latest: dict[str, tuple[Pod, dict[str, str]]] = {}
    pods_of: dict[str, str] = {}
    urls: dict[str, str] = {}
    uids: dict[str, str] = {}
    for name, drawn, ports in steps:
        pod = None if drawn is None else Pod(**{f: getattr(drawn, f) for f in drawn.__struct_fields__} | {"name": name})
        endpoints = {} if pod is None else endpoints_of(pod, Shape(namespace="n", ports=ports))[0]
        before = dict(fleet.serving)
        changes = list(servers.settle(name, pod, endpoints))
        for change in changes:
            fleet.take(change)
        pods_of |= dict.fromkeys(endpoints, name)
        urls |= {worker: it.worker.url for worker, it in endpoints.items()}
        for change in changes:
            if change.kind is ChangeKind.ADDED:  # Nobody else is thought to drain there.
                assert change.url not in {urls[worker] for worker in fleet.draining}
        if pod is not None and uids.setdefault(name, pod.uid) != pod.uid:  # Nobody of the pod before drains.
            uids[name] = pod.uid
            assert not {worker for worker in fleet.draining if pods_of[worker] == name}
        if pod is None:
            latest.pop(name, None)
        else:
            latest[name] = pod, {worker: it.worker.url for worker, it in endpoints.items()}
        ready = {worker: url for pod_, urls in latest.values() if pod_.ready for worker, url in urls.items()}
        assert fleet.urls == dict(sorted(ready.items()))
        assert servers.serving.keys() == ready.keys()
        _of_one_pod_alone(changes, before, name, pods_of)
        assert list(servers.settle(name, pod, endpoints)) == []


def _of_one_pod_alone(
    changes: list[WorkerChange], before: dict[str, WorkerChange], name: str, pods_of: dict[str, str]
) -> None:
    """Of other pods only who no longer serves is touched, and that because its address is taken."""
    taken = {change.url for change in changes if change.kind is ChangeKind.ADDED}
    for change in changes:
        if pods_of[change.worker] != name:
            assert change.kind is ChangeKind.REMOVED
            assert change.worker not in before
            assert taken
