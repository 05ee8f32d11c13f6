"""Workers as the proxy knows them, by `ip:port`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.sidecar.endpoint import endpoint_of, parse_endpoint, parse_host
from scorer.fleet import Worker

_MOST_KNOWN = 16_384


class Places:
    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._by_url: dict[str, str | None] = {}

    def endpoint(self, worker: str) -> str | None:
        """`address:port` of a worker, an IPv6 address in brackets; None if it is not known, or goes by a name."""
        known = self._workers.get(worker)
        if known is None or known.url is None:
            return None
        if known.url not in self._by_url:
            if len(self._by_url) >= _MOST_KNOWN:
                self._by_url.clear()
            found = endpoint_of(known.url)
            self._by_url[known.url] = None if found is None or isinstance(found.host, str) else str(found)
        return self._by_url[known.url]

    def at(self, endpoint: str) -> str | None:
        """The worker there."""
        return next(iter(self.among((endpoint,))), None)

    def among(self, endpoints: Iterable[str]) -> frozenset[str]:
        """The workers at these endpoints, those with each of its ports for one without a port. What cannot be read is
        nobody's.
        """
        exact: set[str] = set()
        hosts: set[str] = set()
        for text in endpoints:
            try:
                exact.add(str(parse_endpoint(text)))
            except ValueError:
                try:
                    host = str(parse_host(text))
                except ValueError:
                    continue
                hosts.add(f"[{host}]" if ":" in host else host)
        return frozenset(
            name
            for name in self._workers
            if (here := self.endpoint(name)) is not None and (here in exact or here.rpartition(":")[0] in hosts)
        )
