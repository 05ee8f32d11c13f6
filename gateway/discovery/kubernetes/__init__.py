"""Workers, objectives and rewrites from the Kubernetes API, and which replica leads ([docs/kubernetes.md])."""

from gateway.discovery.kubernetes.access import Access
from gateway.discovery.kubernetes.api import Api
from gateway.discovery.kubernetes.discovery import KubernetesDiscovery, access_of, elector_of
from gateway.discovery.kubernetes.lease import Elector, lease_name
from gateway.discovery.kubernetes.rewrites import RewriteRule, RewriteTarget

__all__ = [
    "Access",
    "Api",
    "Elector",
    "KubernetesDiscovery",
    "RewriteRule",
    "RewriteTarget",
    "access_of",
    "elector_of",
    "lease_name",
]
