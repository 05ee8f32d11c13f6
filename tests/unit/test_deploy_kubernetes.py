"""deploy/kustomize and deploy/examples: rendered, held to the schemas of Kubernetes, and each part to the others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import load_config
from tests.support.deployed import DEPLOY
from tests.support.manifests import (
    WORKLOADS,
    Manifest,
    config_of,
    containers,
    documents,
    is_ours,
    of_kind,
    pod_spec_of,
    rendered,
)
from tests.support.promql import rules
from tests.support.schemas import check

OVERLAYS = ("gateway", "gateway-pd", "epp", "indexer")
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(DEPLOY / "kustomize" / "overlays" / request.param)


@pytest.fixture(scope="module")
def gateway() -> list[Manifest]:
    return rendered(DEPLOY / "kustomize" / "overlays" / "gateway")


@pytest.fixture(scope="module")
def epp() -> list[Manifest]:
    return rendered(DEPLOY / "kustomize" / "overlays" / "epp")


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in of_kind(manifests, kind) if m["metadata"]["name"] == name]
    return found


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def pods(manifests: list[Manifest]) -> list[tuple[dict[str, str], Manifest]]:
    """(labels, spec) of each kind of pod."""
    workloads = of_kind(manifests, *WORKLOADS)
    return [(workload["spec"]["template"]["metadata"]["labels"], pod_spec_of(workload)) for workload in workloads]


def ports(spec: Manifest) -> dict[str | int, int]:
    """Of a pod's containers, by name and by number."""
    found: dict[str | int, int] = {}
    for container in containers(spec):
        for port in container.get("ports", ()):
            assert port["name"] not in found, "a name of two ports"
            found[port["name"]] = found[port["containerPort"]] = port["containerPort"]
    return found


def test_every_manifest_is_one_that_kubernetes_takes(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        check(manifest)


def test_no_two_have_one_name(manifests: list[Manifest]) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(names) == len(set(names))
    assert {m["metadata"].get("namespace") for m in manifests} == {"llm"}


def test_services_monitors_and_policies_select_what_is_there(manifests: list[Manifest]) -> None:
    for service in of_kind(manifests, "Service"):
        chosen = [spec for labels, spec in pods(manifests) if selects(service["spec"]["selector"], labels)]
        assert len(chosen) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert port.get("targetPort", port["port"]) in ports(chosen[0])
    for policy in of_kind(manifests, "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]["matchLabels"]
        chosen = [spec for labels, spec in pods(manifests) if selects(selector, labels)]
        assert chosen
        for rule in policy["spec"].get("ingress", ()):
            assert all(port["port"] in ports(spec) for port in rule.get("ports", ()) for spec in chosen)
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert any(selects(budget["spec"]["selector"]["matchLabels"], labels) for labels, _ in pods(manifests))
    services = of_kind(manifests, "Service")
    for monitor in of_kind(manifests, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        chosen = [service for service in services if selects(selector, service["metadata"]["labels"])]
        named_ports = {port["name"] for service in chosen for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} & named_ports


def test_probes_and_mounts_name_what_the_pod_has(manifests: list[Manifest]) -> None:
    maps = {m["metadata"]["name"] for m in of_kind(manifests, "ConfigMap")}
    for _, spec in pods(manifests):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        assert {v["configMap"]["name"] for v in volumes.values() if "configMap" in v} <= maps
        for container in containers(spec):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys()
            own = ports({"containers": [container]})
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                kind = next(iter(set(container[probe]) & {"httpGet", "tcpSocket", "grpc"}))
                assert container[probe][kind]["port"] in own, (container["name"], probe)


def configs_in(manifests: list[Manifest], spec: Manifest, container: Manifest, here: Path) -> dict[str, Path]:
    """Files that the container finds in its ConfigMaps, written `here`."""
    found = {}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            for file, text in named(manifests, "ConfigMap", volume["configMap"]["name"])["data"].items():
                (here / file).write_text(text)
                found[f"{mount['mountPath']}/{file}"] = here / file
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_our_containers_start_with_what_they_are_given(overlay: str, tmp_path: Path) -> None:
    manifests = rendered(DEPLOY / "kustomize" / "overlays" / overlay)
    hosts = {service["metadata"]["name"] for service in of_kind(manifests, "Service")}
    ours = 0
    for _, spec in pods(manifests):
        for container in filter(is_ours, containers(spec)):
            ours += 1
            config = config_of(container["args"], configs_in(manifests, spec, container, tmp_path))
            asked = {worker.url.removeprefix("http://").partition(":")[0] for worker in config.discovery.dns}
            assert asked <= hosts
            assert {where.partition(":")[0] for where in config.index.service.addresses} <= hosts
            pool = config.kubernetes.pool
            assert pool is None or named(manifests, "InferencePool", pool)
            state = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/var/lib/warmroute"]
            assert state, "nowhere to keep what was learned"
            assert spec["terminationGracePeriodSeconds"] > config.gateway.drain_timeout_s + 5
    assert ours == {"gateway": 1, "gateway-pd": 1, "epp": 2, "indexer": 2}[overlay]


def test_our_containers_may_do_little(manifests: list[Manifest]) -> None:
    for _, spec in pods(manifests):
        for container in containers(spec):
            if container["image"].startswith("vllm/"):
                continue
            own = {**spec.get("securityContext", {}), **container["securityContext"]}
            assert own["runAsNonRoot"] is True
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own["seccompProfile"] == {"type": "RuntimeDefault"}


def test_engines_publish_events_on_the_ports_they_open(manifests: list[Manifest]) -> None:
    for _, spec in pods(manifests):
        for container in containers(spec):
            if not container["image"].startswith("vllm/"):
                continue
            flags = dict(arg.partition("=")[::2] for arg in container["args"])
            events = json.loads(flags["--kv-events-config"])
            opened = ports({"containers": [container]})
            assert {int(events[key].rpartition(":")[2]) for key in ("endpoint", "replay_endpoint")} <= opened.keys()
            assert int(flags["--port"]) in opened
            if "--kv-transfer-config" in flags:
                assert json.loads(flags["--kv-transfer-config"])["kv_connector"] == "NixlConnector"
                env = {row["name"]: row for row in container["env"]}
                assert int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"]) in opened
                host = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]
                assert host == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_the_sidecar_is_a_native_one_before_the_engine(epp: list[Manifest]) -> None:
    spec = pod_spec_of(named(epp, "Deployment", "vllm-decode"))
    (sidecar,) = spec["initContainers"]
    (engine,) = spec["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert "--port=8200" in engine["args"]
    plain = pod_spec_of(named(epp, "Deployment", "vllm-prefill"))
    patched = [arg.replace("8200", "8000").replace("kv_consumer", "kv_producer") for arg in engine["args"]]
    assert patched == plain["containers"][0]["args"]  # The patch repeats them: nothing else may differ.


def test_the_pool_names_our_picker(epp: list[Manifest]) -> None:
    pool = named(epp, "InferencePool", "vllm")
    reference = pool["spec"]["endpointPickerRef"]
    service = named(epp, "Service", reference["name"])
    assert reference["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    (route,) = of_kind(epp, "HTTPRoute")
    backend = route["spec"]["rules"][0]["backendRefs"][0]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    workers = [spec for labels, spec in pods(epp) if selects(pool["spec"]["selector"]["matchLabels"], labels)]
    assert len(workers) == 2
    for spec in workers:
        assert {port["number"] for port in pool["spec"]["targetPorts"]} <= ports(spec).keys()


def test_the_autoscaler_goes_by_a_metric_that_is_recorded(gateway: list[Manifest]) -> None:
    (autoscaler,) = of_kind(gateway, "HorizontalPodAutoscaler")
    assert named(gateway, "Deployment", autoscaler["spec"]["scaleTargetRef"]["name"])
    values = yaml.safe_load(
        (DEPLOY / "kustomize" / "components" / "autoscaling" / "prometheus-adapter-values.yaml").read_text()
    )
    (rule,) = values["rules"]["external"]
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    recorded = [each["record"] for each in rules(DEPLOY / "prometheus" / "rules.yaml") if "record" in each]
    assert rule["seriesQuery"].partition("{")[0] in recorded


def test_the_operators_rules_are_the_rules() -> None:
    (manifest,) = documents((DEPLOY / "prometheus" / "prometheusrule.yaml").read_text())
    assert manifest["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())


def test_no_right_is_for_more_than_our_namespace(epp: list[Manifest]) -> None:
    assert of_kind(epp, "ClusterRole", "ClusterRoleBinding") == []
    granted = {
        (resource, verb)
        for role in of_kind(epp, "Role")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert not any(resource == "*" or verb in ("*", "delete", "patch") for resource, verb in granted)
    assert not any(resource in ("secrets", "configmaps") for resource, _ in granted)


@pytest.mark.parametrize("overlay", ["gateway", "epp"])
def test_with_tracing_spans_may_get_to_their_collector(overlay: str, tmp_path: Path) -> None:
    here, there = tmp_path.resolve(), DEPLOY / "kustomize"
    ours = {
        "resources": [os.path.relpath(there / "overlays" / overlay, here)],
        "components": [os.path.relpath(there / "components" / "tracing", here)],
    }
    (here / "kustomization.yaml").write_text(yaml.safe_dump(ours))
    manifests = rendered(here)
    for manifest in manifests:
        check(manifest)
    traced = [
        spec["containers"][0]["env"]
        for labels, spec in pods(manifests)
        if labels["app.kubernetes.io/name"] == "warmroute"
    ]
    assert traced
    for env in traced:
        said = {each["name"]: each["value"] for each in env}
        assert said["WARMROUTE_TRACING__ENABLED"] == "true"
        port = int(said["OTEL_EXPORTER_OTLP_ENDPOINT"].rpartition(":")[2])
        policy = named(manifests, "NetworkPolicy", "warmroute-gateway-to-collector")["spec"]
        assert policy["egress"] == [{"ports": [{"port": port}]}]
    limited = [m["spec"] for m in of_kind(manifests, "NetworkPolicy") if "Egress" in m["spec"]["policyTypes"]]
    for labels, _ in pods(manifests):  # Who was free to connect anywhere still is.
        rules_of = [policy["egress"] for policy in limited if selects(policy["podSelector"]["matchLabels"], labels)]
        assert len(rules_of) in (0, 2)


@pytest.mark.parametrize("overlay", ["gateway", "gateway-pd", "indexer"])
@pytest.mark.parametrize("components", [["redis"], ["tracing", "redis"]], ids="+".join)
def test_with_redis_gateways_share_through_a_server_that_only_they_reach(
    overlay: str, components: list[str], tmp_path: Path
) -> None:
    here, there = tmp_path.resolve(), DEPLOY / "kustomize"
    ours = {
        "resources": [os.path.relpath(there / "overlays" / overlay, here)],
        "components": [os.path.relpath(there / "components" / each, here) for each in components],
        "namespace": "llm",
    }
    (here / "kustomization.yaml").write_text(yaml.safe_dump(ours))
    manifests = rendered(here)
    test_every_manifest_is_one_that_kubernetes_takes(manifests)
    test_services_monitors_and_policies_select_what_is_there(manifests)
    test_probes_and_mounts_name_what_the_pod_has(manifests)
    test_our_containers_may_do_little(manifests)
    gateway = pod_spec_of(named(manifests, "Deployment", "warmroute-gateway"))["containers"][0]
    env = {row["name"]: row["value"] for row in gateway["env"]}
    assert ("WARMROUTE_TRACING__ENABLED" in env) == ("tracing" in components)
    config = load_config(env={"WARMROUTE_REDIS__URL": env["WARMROUTE_REDIS__URL"]})
    assert config.redis.url is not None
    host, _, port = config.redis.url.removeprefix("redis://").removesuffix("/0").partition(":")
    service = named(manifests, "Service", host)["spec"]
    assert int(port) in [each["port"] for each in service["ports"]]
    let_in = named(manifests, "NetworkPolicy", host)["spec"]
    assert selects(let_in["podSelector"]["matchLabels"], service["selector"])
    (who,) = let_in["ingress"][0]["from"]
    (let_out,) = named(manifests, "NetworkPolicy", "warmroute-gateway-to-valkey")["spec"]["egress"]
    assert selects(let_out["to"][0]["podSelector"]["matchLabels"], service["selector"])
    assert let_out["ports"] == [{"port": int(port)}]
    entering = [labels for labels, _ in pods(manifests) if selects(who["podSelector"]["matchLabels"], labels)]
    assert [labels["app.kubernetes.io/component"] for labels in entering] == ["gateway"]


# ---- examples --------------------------------------------------------------------------------------------------------


def our_containers_in(value: Any) -> list[Manifest]:
    """At any depth."""
    if isinstance(value, dict):
        inner = [each for item in value.values() for each in our_containers_in(item)]
        return [value, *inner] if is_ours(value) else inner
    return [each for item in value for each in our_containers_in(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_what_it_says(path: Path) -> None:
    (manifest,) = documents(path.read_text())
    if "kind" in manifest:
        check(manifest)
    else:  # A patch of a Deployment.
        whole = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "x"},
            "spec": {"selector": {}, **manifest["spec"]},
        }
        whole["spec"]["template"]["spec"].setdefault("containers", [])
        check(whole)
    for container in our_containers_in(manifest):
        assert container["command"] == ["warmroute"]  # The image of the other one has an entry point of its own.
        config_of(container["args"], {})
