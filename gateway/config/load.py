"""All sources together: YAML < environment < flags -> one `Config`, or every reason why not."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from gateway.config.keys import Path, dotted, fields_of
from gateway.config.read import Problem, Reader, Text, Values
from gateway.config.schema import Config, Worker
from gateway.errors import UserError

_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104


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
) -> Config:
    """Read every source and check the whole.

    `env` is a process environment, of which `WARMROUTE_*` is read (and may name the file as WARMROUTE_CONFIG when
    `file` is None); `flags` maps key paths to text. Raises ConfigError with all problems at once.
    """
    env = env or {}
    file = file or env.get("WARMROUTE_CONFIG")
    reader = Reader()
    values: Values = reader.yaml_file(file) if file else {}
    for later in (reader.environment(env), reader.flags(flags or {}, unknown_flags)):
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
    hosts = {gateway.host, gateway.admin_host}
    if gateway.port and gateway.port == gateway.admin_port and (len(hosts) == 1 or hosts & _WILDCARDS):
        yield ("gateway", "admin_port"), f"is the port of the data plane too ({gateway.port})"
    if events.mode == "bind" and events.bind_endpoint is None:
        yield ("events", "bind_endpoint"), "is needed when events.mode is bind"
    yield from _repeated_workers(config.workers)


def _repeated_workers(workers: Iterable[Worker]) -> Iterator[tuple[Path, str]]:
    for name in ("url", "name"):
        first: dict[str, int] = {}
        for i, worker in enumerate(workers):
            value = getattr(worker, name)
            if value is not None and first.setdefault(value, i) != i:
                yield ("workers", i, name), f"is the same as workers[{first[value]}].{name}"
