"""deploy/helm: rendered by Helm's own library, and held to the same as deploy/kustomize."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import IN_CI
from tests.support.deployed import DEPLOY
from tests.support.manifests import Manifest, config_of, containers, documents, of_kind, pod_spec_of, rendered
from tests.support.schemas import check

try:
    import helm_python
except ImportError:  # pragma: no cover - there are wheels for some platforms only
    if IN_CI:
        raise
    pytest.skip("helm_python is not installed (pip install -e '.[dev]')", allow_module_level=True)

CHART = DEPLOY / "helm" / "warmroute"
ALL = {"epp": {"enabled": True}, "indexer": {"enabled": True}, "serviceMonitor": True}
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version", "app.kubernetes.io/instance")


def chart(name: str = "warmroute", **values: Any) -> list[Manifest]:
    with helm_python.Chart.load(CHART) as loaded:
        loaded.validate_schema(values)
        files = loaded.render(values, name=name, namespace="llm")
    return [manifest for file, text in files.items() if file.endswith(".yaml") for manifest in documents(text)]


def plain(value: Any) -> Any:
    """Without what only Helm adds, and as the objects mean it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in OF_HELM and key != "namespace"}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_helm_finds_nothing_to_say() -> None:
    said = helm_python.lint(CHART, ALL, strict=True)
    assert said["errors"] == []
    assert [message["error"] for message in said["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("values", [{}, ALL, {"gateway": {"enabled": False}, "epp": {"enabled": True}}])
def test_every_manifest_is_one_that_kubernetes_takes(values: dict[str, Any]) -> None:
    manifests = chart(**values)
    assert manifests
    for manifest in manifests:
        check(manifest)


@pytest.mark.parametrize("base", ["gateway", "epp", "indexer"])
def test_the_chart_says_what_kustomize_says(base: str) -> None:
    ours = {(m["kind"], m["metadata"]["name"]): m for m in chart(**ALL)}
    for wanted in rendered(DEPLOY / "kustomize" / "base" / base):
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        if kind in ("InferencePool", "HTTPRoute"):
            continue  # The chart leaves these to whoever has the engines.
        found, wanted = copy.deepcopy(ours[kind, name]), copy.deepcopy(wanted)
        for manifest in (found, wanted):
            if kind == "ConfigMap":
                manifest["data"] = {file: yaml.safe_load(text) for file, text in manifest["data"].items()}
            if kind == "Deployment":
                for container in containers(pod_spec_of(manifest)):
                    container.pop("image"), container.pop("imagePullPolicy", None)
            if kind == "Service" and manifest["spec"].get("type") == "ClusterIP":
                del manifest["spec"]["type"]
            manifest["metadata"].pop("labels", None)
        assert plain(found) == plain(wanted)


def test_values_are_put_where_they_belong(tmp_path: Path) -> None:
    config = {"workers": ["http://a:1"], "gateway": {"drain_timeout_s": 90, "port": 8080}}
    env = [{"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    manifests = chart(
        "mine",
        image={"repository": "r.example/w", "tag": "1.2.3"},
        imagePullSecrets=[{"name": "pull"}],
        gateway={
            "config": config,
            "env": env,
            "networkPolicy": False,
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"pool": "cpu"},
        },
    )
    for manifest in manifests:
        check(manifest)
    assert of_kind(manifests, "NetworkPolicy") == []
    (deployment,) = of_kind(manifests, "Deployment")
    spec = pod_spec_of(deployment)
    assert spec["terminationGracePeriodSeconds"] == 105
    assert (spec["tolerations"], spec["nodeSelector"]) == ([{"operator": "Exists"}], {"pool": "cpu"})
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    (container,) = spec["containers"]
    assert container["image"] == "r.example/w:1.2.3"
    assert container["env"] == env
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]
    (configmap,) = of_kind(manifests, "ConfigMap")
    file = tmp_path / "gateway.yaml"
    file.write_text(configmap["data"]["gateway.yaml"])
    loaded = config_of(container["args"], {"/etc/warmroute/gateway.yaml": file})
    assert [worker.url for worker in loaded.workers] == ["http://a:1"]
    assert loaded.gateway.drain_timeout_s == 90


@pytest.mark.parametrize(
    ("value", "configured", "expected"), [(None, 1, 1), (None, 3, 3), (1, 3, 3), (4, 3, 4), (4, 1, 4)]
)
def test_a_gateway_may_have_several_processes(
    value: int | None, configured: int, expected: int, tmp_path: Path
) -> None:
    values = {"config": {"workers": ["http://a:1"], "gateway": {"processes": configured}}}
    manifests = chart(gateway=values if value is None else {**values, "processes": value})
    for manifest in manifests:
        check(manifest)
    (deployment,) = of_kind(manifests, "Deployment")
    (container,) = pod_spec_of(deployment)["containers"]
    (configmap,) = of_kind(manifests, "ConfigMap")
    file = tmp_path / "gateway.yaml"
    file.write_text(configmap["data"]["gateway.yaml"])
    assert config_of(container["args"], {"/etc/warmroute/gateway.yaml": file}).gateway.processes == expected


def test_spans_may_get_to_their_collector() -> None:
    endpoint = "http://collector.mine:4319"
    env = [{"name": "A", "value": "b"}]
    manifests = chart(epp={"enabled": True}, gateway={"env": env}, tracing={"endpoint": endpoint, "port": 4319})
    tracing = [
        {"name": "WARMROUTE_TRACING__ENABLED", "value": "true"},
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": endpoint},
    ]
    for manifest in manifests:
        check(manifest)
    said = [container["env"] for d in of_kind(manifests, "Deployment") for container in containers(pod_spec_of(d))]
    assert sorted(said, key=len) == [tracing, [*tracing, *env]]
    (limited,) = (m for m in of_kind(manifests, "NetworkPolicy") if "Egress" in m["spec"]["policyTypes"])
    assert {"ports": [{"port": 4319}]} in limited["spec"]["egress"]


@pytest.mark.parametrize(
    "values",
    [
        {"tracing": {"endpoint": "collector:4318"}},
        {"gatway": {}},
        {"gateway": {"replicas": "two"}},
        {"gateway": {"processes": 0}},
        {"gateway": {"processes": 65}},
        {"epp": {"processes": 2}},
        {"image": {"repository": ""}},
        {"gateway": {"confg": {}}},
    ],
)
def test_mistyped_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        chart(**values)


def test_more_can_be_reached_through_the_network_policy() -> None:
    rule = {"ports": [{"port": 6379}]}
    (before,) = of_kind(chart("mine"), "NetworkPolicy")
    manifests = chart("mine", gateway={"extraEgress": [rule]})
    (policy,) = of_kind(manifests, "NetworkPolicy")
    check(policy)
    assert policy["spec"]["egress"] == [*before["spec"]["egress"], rule]
