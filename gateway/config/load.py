"""All sources together: YAML < environment < flags -> one `Config`, or every reason why not."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from gateway.config.keys import Path, dotted, fields_of
from gateway.config.read import Problem, Reader, Text, Values
from gateway.config.schema import (
    Config,
    EppConfig,
    IndexConfig,
    IndexerConfig,
    KubernetesConfig,
    PdConfig,
    SidecarConfig,
    Worker,
)
from gateway.errors import UserError
from gateway.sidecar.allow import parse_entry
from scorer.disaggregation import parse_policy

_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_PORTS = {"http": 80, "https": 443}
_LAST_PORT = 65535


class ConfigError(UserError):
    """The configuration cannot be used; `problems` has every reason, one line each in the message."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def load_config(
    file: str | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[tuple[str, ...], Text] | None = None,
    unknown_flags: Iterable[str] = (),
    known_flags: Iterable[str] = (),
) -> Config:
    """Read every source and check the whole.

    `env` is a process environment, of which `WARMROUTE_*` is read (and may name the file as WARMROUTE_CONFIG when
    `file` is None); `flags` maps key paths to text. An unknown flag is answered with the nearest key's, or one of
    `known_flags`. Raises ConfigError with all problems at once.
    """
    env = env or {}
    file = file or env.get("WARMROUTE_CONFIG")
    reader = Reader()
    values: Values = reader.yaml_file(file) if file else {}
    for later in (reader.environment(env), reader.flags(flags or {}, unknown_flags, known_flags)):
        _lay_over(values, later)
    if reader.problems:
        raise ConfigError(reader.problems)
    config: Config = _build(Config, values)
    if found := list(_cross_checks(config)):
        raise ConfigError(Problem(dotted(path), text, reader.sources.get(path, "default")) for path, text in found)
    return config


def load_workers(file: str) -> tuple[Worker, ...]:
    """The list in a `workers_file`. Raises ConfigError with all problems at once."""
    reader = Reader()
    workers = reader.workers_file(file)
    problems = reader.problems or [Problem(dotted(p), text, file) for p, text in _repeated_workers(workers)]
    if problems:
        raise ConfigError(problems)
    return workers


def read_worker(given: object, where: str = "") -> Worker:
    """One worker of a list: a URL or an object with the keys of `Worker`. Raises ConfigError with all problems."""
    reader = Reader()
    worker = reader.worker(given, where)
    if worker is None:
        raise ConfigError(reader.problems)
    return worker


def _lay_over(values: Values, later: Values) -> None:
    for name, value in later.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _lay_over(values[name], value)
        else:
            values[name] = value


def _build(struct: type[Struct], values: Values) -> Any:
    fields = fields_of(struct)
    return struct(**{n: _build(s, v) if (s := fields[n].section) else v for n, v in values.items()})


def _cross_checks(config: Config) -> Iterator[tuple[Path, str]]:
    """What no single key shows."""
    gateway, events = config.gateway, config.events
    if gateway.port and gateway.port == gateway.admin_port and _overlap(gateway.host, gateway.admin_host):
        yield ("gateway", "admin_port"), f"is the port of the data plane too ({gateway.port})"
    if events.mode == "bind" and events.bind_endpoint is None:
        yield ("events", "bind_endpoint"), "is needed when events.mode is bind"
    if config.scorer.session_affinity == "prefer" and config.scorer.policy != "warmroute":
        yield ("scorer", "session_affinity"), f"prefer changes prices, which policy {config.scorer.policy} ignores"
    yield from _sidecar(config.sidecar)
    yield from _picker(config.epp)
    yield from _index(config.index)
    yield from _indexer(config.indexer)
    yield from _disaggregation(config.pd)
    for given, missing in (("cert", "key"), ("key", "cert")):
        if getattr(config.tls, given) is not None and getattr(config.tls, missing) is None:
            yield ("tls", missing), f"is needed with tls.{given}"
    for i, worker in enumerate(config.discovery.dns):
        if worker.name is not None:
            yield ("discovery", "dns", i, "name"), "cannot be given: each address found is a worker called address:port"
        url = urlsplit(worker.url)
        if (url.hostname or "").startswith("_") and url.port is not None:
            yield ("discovery", "dns", i, "url"), "names a service by its SRV records, which name the port"
    yield from _kubernetes(config.kubernetes)
    yield from _repeated_workers(config.workers)


def _kubernetes(kubernetes: KubernetesConfig) -> Iterator[tuple[Path, str]]:
    if kubernetes.pool is not None and kubernetes.selector is not None:
        yield ("kubernetes", "selector"), "is what kubernetes.pool says; give one of them"
    if len(set(kubernetes.ports)) < len(kubernetes.ports):
        yield ("kubernetes", "ports"), "names a port twice"
    if not kubernetes.ports:
        yield ("kubernetes", "ports"), "names no port"


def _sidecar(sidecar: SidecarConfig) -> Iterator[tuple[Path, str]]:
    size, engine = sidecar.data_parallel_size, urlsplit(sidecar.engine)
    engine_port = engine.port or _PORTS[engine.scheme]
    for name, port in (("port", sidecar.port), ("engine", engine_port)):
        if port + size - 1 > _LAST_PORT:
            yield ("sidecar", name), f"leaves no ports for {size} ranks"
    if not sidecar.port:
        return
    ports = range(sidecar.port, sidecar.port + size)
    if sidecar.admin_port in ports and _overlap(sidecar.host, sidecar.admin_host):
        yield ("sidecar", "admin_port"), f"is a port of the data plane too ({sidecar.admin_port})"
    engine_ports = range(engine_port, engine_port + size)
    if engine.hostname in _LOOPBACK and not set(ports).isdisjoint(engine_ports):
        yield ("sidecar", "engine"), "is the sidecar itself (sidecar.port)"


def _picker(epp: EppConfig) -> Iterator[tuple[Path, str]]:
    taken: set[int] = set()
    for name in ("port", "health_port", "metrics_port"):
        port = getattr(epp, name)
        if port and port in taken:
            yield ("epp", name), f"is another port of the picker too ({port})"
        taken.add(port)
    if epp.admin_port and epp.admin_port in taken and _overlap(epp.host, epp.admin_host):
        yield ("epp", "admin_port"), f"is another port of the picker too ({epp.admin_port})"


def _index(index: IndexConfig) -> Iterator[tuple[Path, str]]:
    service = index.service
    if index.source == "service" and not service.addresses:
        yield ("index", "service", "addresses"), "is needed when index.source is service"
    for given, missing in (("cert", "key"), ("key", "cert")):
        if getattr(service, given) is not None and getattr(service, missing) is None:
            yield ("index", "service", missing), f"is needed with index.service.{given}"


def _indexer(indexer: IndexerConfig) -> Iterator[tuple[Path, str]]:
    if indexer.port is None and indexer.socket is None:
        yield ("indexer", "socket"), "is needed where indexer.port is null"
    if indexer.port and indexer.port == indexer.metrics_port:
        yield ("indexer", "metrics_port"), f"is indexer.port too ({indexer.port})"
    taken = {indexer.port, indexer.metrics_port}
    if indexer.admin_port and indexer.admin_port in taken and _overlap(indexer.host, indexer.admin_host):
        yield ("indexer", "admin_port"), f"is another port of the indexer too ({indexer.admin_port})"


def _disaggregation(pd: PdConfig) -> Iterator[tuple[Path, str]]:
    if pd.policy is not None:
        try:
            parse_policy(pd.policy)
        except ValueError as exc:
            yield ("pd", "policy"), str(exc)
    if pd.lease_margin_s >= pd.lease_s:
        yield ("pd", "lease_margin_s"), f"must be less than pd.lease_s ({pd.lease_s:g})"
    for i, entry in enumerate(pd.allow):
        try:
            parse_entry(entry)
        except ValueError as exc:
            yield ("pd", "allow", i), str(exc)


def _overlap(host: str, other: str) -> bool:
    """Whether one port cannot be listened on at both."""
    return host == other or not _WILDCARDS.isdisjoint({host, other})


def _repeated_workers(workers: Iterable[Worker]) -> Iterator[tuple[Path, str]]:
    for name in ("url", "name"):
        first: dict[str, int] = {}
        for i, worker in enumerate(workers):
            value = getattr(worker, name)
            if value is not None and first.setdefault(value, i) != i:
                yield ("workers", i, name), f"is the same as workers[{first[value]}].{name}"
