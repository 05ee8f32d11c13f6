"""Which workers there are: each way of knowing yields the same `WorkerChange`s."""

from gateway.discovery.base import Discovery, NameClashError, Source, worker_name
from gateway.discovery.dns import DnsDiscovery
from gateway.discovery.file import FileDiscovery
from gateway.discovery.renewed import RenewedList
from gateway.discovery.static import StaticDiscovery

__all__ = [
    "Discovery",
    "DnsDiscovery",
    "FileDiscovery",
    "NameClashError",
    "RenewedList",
    "Source",
    "StaticDiscovery",
    "worker_name",
]
