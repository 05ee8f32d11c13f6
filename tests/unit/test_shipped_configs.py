"""Every configuration in deploy/, the docs and the README is one that loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway.config import Config, load_config
from gateway.config.keys import dotted, flag_name, leaves
from tests.support.deployed import DEPLOY, ROOT

SECTIONS = {field.name for field in msgspec.structs.fields(Config)}
FOREIGN = {"kind", "services", "static_resources"}
"""Of Kubernetes, Compose and Envoy."""
_BLOCK = re.compile(r"```ya?ml\n(.*?)```", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def is_config(tree: Any) -> bool:
    """Whether it looks like one, mistakes included: a mapping of which any key is a section of ours."""
    return isinstance(tree, dict) and bool(tree.keys() & SECTIONS) and not tree.keys() & FOREIGN


def first_document(text: str) -> Any:
    return next(iter(yaml.safe_load_all(text)), None)


def shipped() -> list[Path]:
    """Those of the chart are held to these by test_deploy_helm.py."""
    files = [path for path in sorted(DEPLOY.rglob("*.yaml")) if "helm" not in path.parts]
    return [path for path in files if is_config(first_document(path.read_text()))]


def documented() -> Iterator[tuple[str, str]]:
    """(page, text) of each block that is a configuration."""
    for page in PAGES:
        for text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if is_config(first_document(text)):
                yield page.name, text


def test_they_are_found() -> None:
    assert {path.name for path in shipped()} >= {"warmroute.yaml", "gateway.yaml", "epp.yaml", "sidecar.yaml"}
    assert {page for page, _ in documented()} >= {"workers.md", "kubernetes.md"}


@pytest.mark.parametrize("path", shipped(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_a_shipped_configuration_loads(path: Path) -> None:
    load_config(str(path), {})


@pytest.mark.parametrize(("page", "text"), list(documented()))
def test_a_documented_configuration_loads(page: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / page
    file.write_text(text)
    load_config(str(file), {})


MOVING = [ROOT / "docs" / "deploy.md", *sorted((ROOT / "docs").glob("migrate-from-*.md"))]
KEYS = {dotted(path) for path, _ in leaves()}
FLAGS = {flag_name(path) for path, _ in leaves()}


@pytest.mark.parametrize("page", MOVING, ids=lambda path: path.stem)
def test_keys_and_flags_named_in_a_page_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {key for key in re.findall(r"`([a-z_]+\.[a-z_]+)[`:]", text) if key.partition(".")[0] in SECTIONS}
    assert named <= KEYS | {f"{key.partition('.')[0]}.*" for key in KEYS}
    ours = set(re.findall(r"--(?:pd|kubernetes|epp|discovery|scorer)-[a-z-]+", text))
    assert ours <= FLAGS


@pytest.mark.parametrize("page", MOVING, ids=lambda path: path.stem)
def test_links_lead_to_what_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
