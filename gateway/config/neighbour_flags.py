"""Every flag of a neighbouring router that is understood. docs/flags.md is made from this table.

Rows are read in this order, whatever the order on the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gateway.config import neighbours as do
from gateway.config.neighbours import Arity, Flag, Kind, Path, Take, Taken
from gateway.config.picker_flags import PICKER_FLAGS, picker_rows
from gateway.config.read import Text
from gateway.errors import UserError

_DEST: Final = "neighbour:"
RUST: Final = "vllm-router, sglang-router, smg"
_ROUTER, _STACK, _TOY = "vllm-router", "production-stack", "vLLM's toy proxies"

_BREAKER: Final = (
    "a worker is ejected after 2 failed connections, or 3 faults that are half of its requests, within "
    "health.eject_after_s; never for 4xx, and never the last one; one probe at a time brings it back"
)
_RETRY: Final = (
    "before the first byte, one other worker is tried at once after a broken connection, 502 or 503; nothing waits"
)
_ASKED: Final = "each engine is asked"
_ROLES: Final = "one --selector for all; a pod's role is its label llm-d.ai/role (prefill, decode)"


def _exact(names: str, of: str, ours: str, take: Take, example: str, nargs: Arity = "1") -> Flag:
    return Flag(names=_names(names), of=of, kind=Kind.EXACT, ours=ours, take=take, example=example, nargs=nargs)


def _near(names: str, of: str, ours: str, take: Take, example: str) -> Flag:
    return Flag(names=_names(names), of=of, kind=Kind.NEAR, ours=ours, take=take, example=example)


def _told(names: str, of: str, ours: str, example: str = "1", nargs: Arity = "1") -> Flag:
    return Flag(names=_names(names), of=of, kind=Kind.TOLD, ours=ours, example=example, nargs=nargs)


def _switch(names: str, of: str, ours: str) -> Flag:
    return _told(names, of, ours, "", "0")


def _refused(names: str, of: str, ours: str, example: str) -> Flag:
    return Flag(names=_names(names), of=of, kind=Kind.REFUSED, ours=ours, example=example, nargs="+")


def _names(text: str) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in text.split())


def _rows() -> Iterator[Flag]:
    yield _exact("static-backends", _STACK, "`workers`", do.backends, "http://a:1,http://b:1", "+")
    yield _told("static-models static-model-types", _STACK, f"{_ASKED} what it serves", "m,m", "+")
    yield _exact("static-model-labels", _STACK, "with the next two: `workers[].role`", do.keep("labels"), "p,d", "+")
    yield _exact("prefill-model-labels", _STACK, "`workers[].role: prefill`", do.labelled("prefill"), "p", "+")
    yield _exact("decode-model-labels", _STACK, "`workers[].role: decode`", do.labelled("decode"), "d", "+")
    for side, role, hosts, ports in (
        ("prefiller", "prefill", "p1 p2", "8100 8101"),
        ("decoder", "decode", "d1", "8200"),
    ):
        take = do.keep(side)
        yield _exact(f"{side}-hosts {side}-host", _TOY, "`workers`, with the next", take, hosts, "+")
        take = do.ports(role, side)
        yield _exact(f"{side}-ports {side}-port", _TOY, f"`workers[].role: {role}`", take, ports, "+")
    for flag, name in (("kv-event-source", "events"), ("kv-event-replay-source", "replay")):
        take = do.events("events" if name == "events" else "replay", f"--{flag}")
        yield _exact(flag, _ROUTER, f"`workers[].{name}`", take, "http://w:1=tcp://w:5557,tcp://w:5558", "+")
    yield _told("kv-event-block-size kv-event-model", _ROUTER, f"{_ASKED} for block size and model")
    yield _told(
        "router-temperature kv-penalty-host kv-penalty-external kv-penalty-disk",
        _ROUTER,
        "lower tiers are priced by the time they take to load; equal prices are settled by load, then at random",
    )
    yield _near("routing-logic", _STACK, "`scorer.policy`, by the table below", do.policy, "session")
    yield _exact("session-key", _STACK, "`scorer.session_header`", do.key("scorer", "session_header"), "x-user-id")
    yield _told(
        "prefill-policy decode-policy",
        RUST,
        "both workers of a request are chosen together, by --policy and --pd-policy",
        "round_robin",
    )
    yield _switch("pd-disaggregation vllm-pd-disaggregation", RUST, "--prefill and --decode say so by themselves")
    yield _exact("kv-connector", _ROUTER, "`pd.connector`", do.key("pd", "connector"), "nixl")
    yield _told(
        "cache-threshold balance-abs-threshold balance-rel-threshold cache-ttl-secs prefix-min-match-length "
        "kv-aware-threshold",
        f"{RUST}, {_STACK}",
        "no thresholds: every worker is priced in predicted seconds",
    )
    yield _told(
        "eviction-interval eviction-interval-secs max-tree-size",
        RUST,
        "the index follows the engines' evictions and is bounded by index.budget_bytes",
    )
    seconds = do.key("gateway", "request_timeout_s")
    yield _exact("request-timeout-secs", RUST, "`gateway.request_timeout_s`", seconds, "1800")
    yield _near(
        "max-concurrent-requests",
        RUST,
        "`gateway.max_concurrency`: requests in flight until their last byte, not a rate",
        do.key("gateway", "max_concurrency"),
        "256",
    )
    yield _near(
        "queue-size",
        RUST,
        "`queue.max_requests`: requests of one model that wait while no worker has room",
        do.key("queue", "max_requests"),
        "100",
    )
    yield _near(
        "queue-timeout-secs",
        RUST,
        "`queue.max_wait_s`: 429 with Retry-After beyond it",
        do.key("queue", "max_wait_s"),
        "60",
    )
    size = do.key("gateway", "max_body_bytes")
    yield _exact("max-payload-size", RUST, "`gateway.max_body_bytes`", size, "536870912")
    seconds = do.key("gateway", "drain_timeout_s")
    yield _exact("shutdown-grace-period-secs", "smg", "`gateway.drain_timeout_s`", seconds, "180")
    seconds = do.key("health", "scrape_interval_s")
    yield _near(
        "health-check-interval-secs",
        RUST,
        "`health.scrape_interval_s`: /metrics is read, and how requests end tells most",
        seconds,
        "5",
    )
    yield _exact("engine-stats-interval engine-scrape-interval", _STACK, "`health.scrape_interval_s`", seconds, "15")
    yield _told("request-stats-window", _STACK, "load is what is booked now, not an average")
    yield _told(
        "health-failure-threshold health-success-threshold health-check-timeout-secs health-check-endpoint",
        RUST,
        _BREAKER,
    )
    yield _told(
        "cb-failure-threshold cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs", RUST, _BREAKER
    )
    yield _switch("disable-circuit-breaker disable-health-check", RUST, f"cannot be turned off: {_BREAKER}")
    yield _told(
        "retry-max-retries retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier retry-jitter-factor",
        RUST,
        _RETRY,
    )
    yield _switch("disable-retries", RUST, f"cannot be turned off: {_RETRY}")
    yield _told("max-instance-failover-reroute-attempts", _STACK, _RETRY)
    yield _told(
        "worker-startup-timeout-secs worker-startup-check-interval", RUST, "workers may come late; none is waited for"
    )
    yield _told(
        "prometheus-port prometheus-host", RUST, "/metrics is on the data plane's port and on the admin port", "29000"
    )
    yield _told("intra-node-data-parallel-size", _ROUTER, f"{_ASKED} for its ranks", "8")
    yield _switch("dp-aware", "sglang-router, smg", f"{_ASKED} for its ranks")
    yield _switch("enable-igw", RUST, "a request goes to workers that serve its model, always")
    yield _told("request-id-headers", RUST, "x-request-id is taken, or made", "x-request-id", "+")
    origins = "preflights are answered by the engines (vLLM: --allowed-origins)"
    yield _told("cors-allowed-origins", RUST, origins, "*", "+")
    yield _told("log-dir", RUST, "logs go to standard error", "/var/log")
    yield _exact("log-level", RUST, "`logging.level`", do.log_level, "warn")
    yield _exact("enable-trace", RUST, "`tracing.enabled`", do.tracing, "", "0")
    yield _told(
        "otlp-traces-endpoint",
        RUST,
        "OTEL_EXPORTER_OTLP_ENDPOINT says where spans go, over HTTP ([observability.md](observability.md))",
        "localhost:4317",
    )
    yield _exact("tokenizer-path", "smg", "`tokens.tokenizer`", do.key("tokens", "tokenizer"), "/models/m")
    yield _exact("backend", "smg", "vllm, the only one", do.backend, "vllm")
    selector, namespace = do.selector, do.key("kubernetes", "namespace")
    yield _exact("selector", RUST, "`kubernetes.selector`", selector, "app=vllm tier=gpu", "+")
    yield _exact("k8s-label-selector", _STACK, "`kubernetes.selector`", selector, "app=vllm")
    yield _exact("service-discovery-port", RUST, "`kubernetes.ports`", do.key("kubernetes", "ports"), "8080")
    yield _exact("k8s-port", _STACK, "`kubernetes.ports`", do.key("kubernetes", "ports"), "8080")
    yield _near(
        "service-discovery-namespace k8s-namespace",
        f"{RUST}, {_STACK}",
        "`kubernetes.namespace`; without it that of the service account, not all of them",
        namespace,
        "models",
    )
    yield _exact(
        "service-discovery",
        f"{RUST}, {_STACK}",
        "follows the pods of --selector or --k8s-label-selector ([kubernetes.md](kubernetes.md)); static: none",
        do.service_discovery,
        "static",
        "?",
    )
    yield _refused("prefill-selector decode-selector", RUST, _ROLES, "app=vllm")


FLAGS: Final = tuple(_rows())


def add_neighbours(parser: argparse.ArgumentParser, flags: Sequence[Flag] = FLAGS) -> None:
    """They are taken, but not shown by --help, which would be twice as long."""
    for flag in flags:
        options: dict[str, Any] = {} if flag.nargs == "1" else {"nargs": 0 if flag.nargs == "0" else flag.nargs}
        for name in flag.names:
            parser.add_argument(
                name, dest=_DEST + name, action=_Collect, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options
            )
    parser.epilog = "Flags of neighbouring routers are understood too: docs/flags.md."


def take_neighbours(options: argparse.Namespace, given: dict[Path, Text]) -> list[str]:
    """Add to `given` what the neighbours' flags say; the notes for people. Raises UserError."""
    taken = Taken(given)
    if isinstance(named := given.get(("scorer", "policy")), str):
        do.policy(taken, [named])
    for flag in (*FLAGS, *PICKER_FLAGS):
        used = {name: vars(options)[_DEST + name] for name in flag.names if _DEST + name in vars(options)}
        if used and flag.kind is Kind.REFUSED and flag.take is None:
            raise UserError(f"{', '.join(used)}: {flag.ours}")
        if flag.take is not None:
            for values in used.values():
                flag.take(taken, values)
        if used and flag.kind in (Kind.NEAR, Kind.TOLD) and flag.take is not do.policy:
            taken.notes.append(f"{', '.join(used)}: {flag.ours.replace('`', '')}")
    for side in ("prefiller", "decoder"):
        if side in taken.scratch:
            raise UserError(f"--{side}-hosts needs --{side}-ports")
    return taken.notes


class _Collect(argparse.Action):
    """All values, of a flag given several times too."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        more = values if isinstance(values, list) else [] if values is None else [values]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *map(str, more)])


def page() -> str:
    """docs/flags.md."""
    rows = [
        "| `--host`, `--port` | all | exact | `gateway.host`, `gateway.port` |",
        f"| `--worker-urls URL ...` | {RUST} | exact | `workers` |",
        f"| `--prefill URL [PORT]`, `--decode URL` | {RUST} | exact | `workers[].role`; a bootstrap port is not used |",
        f"| `--policy` | {RUST} | near | `scorer.policy`, by the table below |",
    ]
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        rows.append(f"| {names} | {flag.of} | {flag.kind.value} | {flag.ours} |")
    policies = [f"| `{name}` | `{known}` | {known.note or 'the same'} |" for name, known in do.POLICIES.items()]
    policies += [f"| `{name}` | none | {advice} |" for name, advice in do.NO_POLICIES.items()]
    heads = "| flag | of | | here |\n|---|---|---|---|", "| name | ours | |\n|---|---|---|"
    return "\n".join([_HEAD, heads[0], *rows, _POLICIES, heads[1], *policies, _PICKERS, heads[0], *picker_rows(), ""])


_HEAD = """\
# Flags of neighbouring routers

`warmroute gateway` takes the command line of vllm-router, sglang-router, smg, vLLM's toy proxies and production-stack's
router. *exact*: the same here. *near*: nearly; one line on standard error says what is different. *told*: nothing is
set; one line says what is done instead. *refused*: an error says what to do. What is neither in this table nor one of
our own flags (`warmroute gateway --help`) is an error. Our own flag for the same key is stronger.

The page is made from the table that the command reads: `python -m gateway.config.neighbour_flags > docs/flags.md`.
"""
_POLICIES = """
## Policies

For `--policy` and `--routing-logic`; `random` and our own names are taken as they are.
"""
_PICKERS = """
## Endpoint pickers

`warmroute epp` takes those of llm-d's picker and of the reference picker of Gateway API Inference Extension.
"""


if __name__ == "__main__":
    print(page(), end="")
