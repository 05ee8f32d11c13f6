"""Workers, objectives and rewrites from the Kubernetes API, and which replica leads ([docs/kubernetes.md])."""

from gateway.discovery.kubernetes.access import Access
from gateway.discovery.kubernetes.api import Api
from gateway.discovery.kubernetes.discovery import KubernetesDiscovery, access_of
from gateway.discovery.kubernetes.lease import Elector, lease_name
from gateway.discovery.kubernetes.objectives import Objective
from gateway.discovery.kubernetes.rewrites import ModelRewrite, RewriteRule, RewriteTarget

__all__ = [
    "Access",
    "Api",
    "Elector",
    "KubernetesDiscovery",
    "ModelRewrite",
    "Objective",
    "RewriteRule",
    "RewriteTarget",
    "access_of",
    "lease_name",
]
