"""What a pod is as workers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.discovery.kubernetes.pods import Pod, Shape, endpoints_of, read_pod
from tests.support.pods import pod

SHAPE = Shape(namespace="models", ports=(8000,))
THREE = Shape(namespace="models", ports=(8000, 8001, 8002))


def read(body: dict[str, Any], name: str = "a") -> Pod:
    return read_pod(json.dumps({**body, "metadata": {"name": name, "uid": "u", **body["metadata"]}}).encode())


def urls(body: dict[str, Any], shape: Shape = THREE) -> dict[str, str]:
    found, problems = endpoints_of(read(body), shape)
    assert problems == []
    return {name: endpoint.worker.url for name, endpoint in found.items()}


@pytest.mark.parametrize(
    ("body", "ready", "over"),
    [
        (pod(), True, False),
        (pod(ready=False), False, False),
        (pod(terminating=True), False, False),
        (pod(phase="Failed"), False, True),
        (pod(phase="Succeeded", ready=False), False, True),
        (pod(ip=""), False, False),
        ({"metadata": {}}, False, False),
        ({"metadata": {"labels": None, "annotations": None}, "status": {"conditions": None}}, False, False),
    ],
    ids=["ready", "not ready", "terminating", "failed", "succeeded", "no address", "new", "nulls"],
)  # fmt: skip
def test_ready(body: dict[str, Any], ready: bool, over: bool) -> None:
    found = read(body)
    assert (found.ready, found.over) == (ready, over)


@pytest.mark.parametrize(
    ("annotation", "ports"),
    [
        (None, [8000, 8001, 8002]),
        ("8000,8002", [8000, 8002]),
        (" 8002 ,, 8001", [8001, 8002]),
        ("", []),
        ("9000,http,-8000,8001.0,٨٠٠٠", []),
        ("8001,8001,bad", [8001]),
        ("08000,0", [8000]),
        pytest.param("8001," + "9" * 5000, [8001], id="more digits than Python reads"),
    ],
)
@pytest.mark.parametrize("name", ["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"])
def test_active_ports(annotation: str | None, ports: list[int], name: str) -> None:
    body = pod(annotations=None if annotation is None else {name: annotation})
    assert urls(body) == {f"a-rank-{port - 8000}": f"http://10.0.0.1:{port}" for port in ports}


def test_the_newer_name_of_active_ports_counts() -> None:
    both = {"inference.networking.k8s.io/active-ports": "8000", "llm-d.ai/active-ports": "8002"}
    assert list(urls(pod(annotations=both))) == ["a-rank-2"]


def test_names_addresses_and_schemes() -> None:
    assert urls(pod(), SHAPE) == {"a": "http://10.0.0.1:8000"}
    https = msgspec.structs.replace(SHAPE, scheme="https")
    assert urls(pod("fd00::7"), https) == {"a": "https://[fd00::7]:8000"}


@pytest.mark.parametrize(
    ("label", "role"),
    [
        (None, "both"),
        ("both", "both"),
        ("decode", "decode"),
        ("prefill", "prefill"),
        ("prefill-decode", "both"),
        ("encode-prefill", "prefill"),
        ("encode-prefill-decode", "both"),
    ],
)
def test_roles(label: str | None, role: str) -> None:
    found, _ = endpoints_of(read(pod(labels={} if label is None else {"llm-d.ai/role": label})), SHAPE)
    assert found["a"].worker.role == role


def test_an_encoder_answers_no_request_and_an_unknown_role_is_told() -> None:
    assert endpoints_of(read(pod(labels={"llm-d.ai/role": "encode"})), SHAPE) == ({}, [])
    found, problems = endpoints_of(read(pod(labels={"llm-d.ai/role": "Decode"})), SHAPE)
    assert found == {}
    assert problems == ["pod a: llm-d.ai/role=Decode is no role known here; it gets no requests"]


def test_annotations_say_what_the_keys_of_a_worker_say() -> None:
    annotations = {
        "warmroute/weight": "0.5",
        "warmroute/role": "decode",
        "warmroute/events": "tcp://{ip}:6000",
        "warmroute/replay": "tcp://*:6100",
        "warmroute/nixl": "{ip}:5600",
        "warmroute/server-name": "vllm.svc",
        "warmroute/label.gpu": "l4",
        "kubernetes.io/config.seen": "ignored",
    }
    body = pod("10.0.0.9", annotations=annotations, labels={"llm-d.ai/role": "prefill"}, node="n1")
    found, problems = endpoints_of(read(body), SHAPE)
    worker = found["a"].worker
    assert problems == []
    assert (worker.weight, worker.role, worker.server_name) == (0.5, "decode", "vllm.svc")
    assert (worker.events, worker.replay, worker.nixl) == (
        "tcp://10.0.0.9:6000",
        "tcp://10.0.0.9:6100",
        "10.0.0.9:5600",
    )
    assert worker.labels == {"node": "n1", "gpu": "l4"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight", "fast"),
        ("weight", "1e9"),
        ("weight", "nan"),
        ("role", "encode"),
        ("events", "http://x"),
        ("events", "tcp://{ip}:99999"),
        ("nixl", "a b"),
        ("server-name", ""),
        ("label.", "x"),
        ("colour", "red"),
        ("url", "http://elsewhere"),
        ("name", "b"),
    ],
)
def test_an_odd_annotation_is_told_and_left_out(key: str, value: str) -> None:
    found, problems = endpoints_of(read(pod(annotations={f"warmroute/{key}": value, "warmroute/weight2": "1"})), SHAPE)
    plain, _ = endpoints_of(read(pod()), SHAPE)
    assert found == plain
    assert len(problems) == 2
    assert problems[0].startswith(f"pod a: annotation warmroute/{key}: ") or key == "label."


def test_templates_of_the_configuration() -> None:
    shape = Shape(
        namespace="models", ports=(8000, 8001), events="tcp://{pod}.{namespace}:5557", replay="tcp://{ip}:{port}"
    )
    found, _ = endpoints_of(read(pod("fd00::1"), "vllm-0"), shape)
    worker = found["vllm-0-rank-1"].worker
    assert (worker.events, worker.replay) == ("tcp://vllm-0.models:5557", "tcp://[fd00::1]:8001")
    assert [endpoint.rank for endpoint in found.values()] == [0, 1]


def test_an_address_that_is_none_leaves_the_pod_out() -> None:
    found, problems = endpoints_of(read(pod("10.0.0.1/24@x")), SHAPE)
    assert found == {}
    assert "pod a: cannot be used" in problems[0]
