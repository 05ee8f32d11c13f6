"""Kubernetes manifests as kubectl would send them, and what is said in them about warmroute."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from gateway.cli import Parser
from gateway.config import Config, load_config
from gateway.config.flags import (
    EPP_ALIASES,
    GATEWAY_ALIASES,
    INDEXER_ALIASES,
    SIDECAR_ALIASES,
    add_config_flags,
    flags_of,
    parse_flags,
)
from tests.support.deployed import tool

Manifest = dict[str, Any]
FACES = {"gateway": GATEWAY_ALIASES, "sidecar": SIDECAR_ALIASES, "epp": EPP_ALIASES, "indexer": INDEXER_ALIASES}
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")


def rendered(overlay: Path) -> list[Manifest]:
    """What `kubectl apply -k` sends."""
    kubectl = tool("kubectl", "pip install -e '.[dev]'")
    done = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def containers(pod_spec: Manifest) -> Iterator[Manifest]:
    yield from pod_spec.get("initContainers", ())
    yield from pod_spec.get("containers", ())


def pod_spec_of(manifest: Manifest) -> Manifest:
    return dict(manifest["spec"]["template"]["spec"])


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def is_ours(container: Manifest) -> bool:
    return "/warmroute:" in container.get("image", "") and container.get("args", [None])[0] in FACES


def config_of(args: Sequence[str], configs: dict[str, Path]) -> Config:
    """The configuration of a container with these arguments; `configs`: what its `--config` names -> a file here."""
    face, *rest = args
    parser = Parser(prog=f"warmroute {face}", description="")
    add_config_flags(parser, FACES[face])
    options, given, unknown = parse_flags(parser, rest)
    file = None if options.config is None else str(configs[options.config])
    return load_config(file, {}, given, unknown, flags_of(parser))
