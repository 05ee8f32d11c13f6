"""Pods and pools as the Kubernetes API shows them."""

from __future__ import annotations

from typing import Any


def pod(
    ip: str = "10.0.0.1",
    *,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    terminating: bool = False,
    phase: str = "Running",
    uid: str | None = None,
    node: str | None = None,
) -> dict[str, Any]:
    meta: dict[str, Any] = {"labels": {"app": "vllm"} if labels is None else labels}
    if annotations:
        meta["annotations"] = annotations
    if terminating:
        meta["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    if uid is not None:
        meta["uid"] = uid
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "True" if ready else "False"},
    ]
    return {
        "metadata": meta,
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, "podIP": ip, "conditions": conditions},
    }


def pool(*ports: int, **labels: str) -> dict[str, Any]:
    return {
        "spec": {
            "selector": {"matchLabels": labels or {"app": "vllm"}},
            "targetPorts": [{"number": port} for port in ports or (8000,)],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
        }
    }


def objective(priority: int | None, pool: str = "pool", **ref: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"poolRef": {"group": "inference.networking.k8s.io", "name": pool, **ref}}
    if priority is not None:
        spec["priority"] = priority
    return {"spec": spec}


def rewrite(*rules: tuple[list[str], dict[str, int]], pool: str = "pool") -> dict[str, Any]:
    """Each rule: the models it is for, and what they become, with weights."""
    return {
        "spec": {
            "poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool},
            "rules": [
                {
                    "matches": [{"model": {"type": "Exact", "value": model}} for model in models],
                    "targets": [{"modelRewrite": name, "weight": weight} for name, weight in targets.items()],
                }
                for models, targets in rules
            ],
        }
    }
