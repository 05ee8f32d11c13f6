"""Whether Kubernetes would take a manifest: its own schemas, and those of the custom resources that deploy/ uses."""

from __future__ import annotations

import jsonschema
import kubernetes_validate
import yaml

from tests.support.deployed import ROOT
from tests.support.manifests import Manifest

KUBERNETES = "1.34"
_CRDS = yaml.safe_load((ROOT / "tests" / "data" / "kubernetes_crds.yaml").read_text(encoding="utf-8"))


def check(manifest: Manifest) -> None:
    """Raises what says why not; a field that is not known is a mistake."""
    crd = _CRDS.get(manifest["kind"])
    if crd is None:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    else:
        assert manifest["apiVersion"] == crd["apiVersion"]
        jsonschema.validate(manifest["spec"], crd["spec"])
