"""Flags of other endpoint pickers (llm-d's, GAIE's reference one) that `warmroute epp` takes; part of docs/flags.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gateway.config import neighbours as do
from gateway.config.neighbours import Flag, Kind, Taken
from gateway.errors import UserError

LLM_D: Final = "llm-d, GAIE"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TRUE: Final = frozenset({"1", "t", "true"})
_FALSE: Final = frozenset({"0", "f", "false"})


def _flag(
    names: str,
    ours: str,
    take: do.Take | None = None,
    *,
    kind: Kind = Kind.EXACT,
    nargs: do.Arity = "1",
    example: str = "1",
) -> Flag:
    return Flag(
        names=tuple(f"--{name}" for name in names.split()),
        of=LLM_D,
        kind=kind,
        ours=ours,
        take=take,
        nargs=nargs,
        example=example,
    )


def _is_true(flag: str, values: list[str]) -> bool:
    """As Go reads it; alone it is true."""
    text = values[-1].lower() if values else "true"
    if text not in _TRUE | _FALSE:
        raise UserError(f"{flag}: true or false, got {values[-1]}")
    return text in _TRUE


def _drain_timeout(taken: Taken, values: list[str]) -> None:
    found = _DURATION.findall(values[-1])
    if "".join(number + unit for number, unit in found) != values[-1]:
        raise UserError(f"--drain-timeout: a duration such as 30s, got {values[-1]}")
    taken.set(("gateway", "drain_timeout_s"), f"{sum(float(number) * _SECONDS[unit] for number, unit in found):g}")


def _leader_election(taken: Taken, values: list[str]) -> None:
    taken.set(("kubernetes", "leader_election"), str(_is_true("--ha-enable-leader-election", values)).lower())


def _tracing(taken: Taken, values: list[str]) -> None:
    taken.set(("tracing", "enabled"), str(_is_true("--tracing", values)).lower())


def _secure_serving(taken: Taken, values: list[str]) -> None:
    if not _is_true("--secure-serving", values):
        taken.set(("epp", "tls"), "off")


def _emit_scores(taken: Taken, values: list[str]) -> None:
    taken.set(("epp", "emit_scores"), str(_is_true("--emit-endpoint-scores", values)).lower())


def _cert_path(taken: Taken, values: list[str]) -> None:
    folder = values[-1].rstrip("/")
    taken.set(("tls", "cert"), f"{folder}/tls.crt")
    taken.set(("tls", "key"), f"{folder}/tls.key")
    taken.set(("epp", "tls"), "files")


def _encoder(taken: Taken, values: list[str]) -> None:
    taken.set(("logging", "format"), {"console": "text"}.get(values[-1], values[-1]))


def _told(names: str, ours: str, nargs: do.Arity = "1") -> Flag:
    return _flag(names, ours, kind=Kind.TOLD, nargs=nargs, example="" if nargs == "?" else "1")


def _rows() -> Iterator[Flag]:
    yield _flag("pool-name", "`kubernetes.pool`", do.key("kubernetes", "pool"), example="pool")
    yield _flag("pool-namespace", "`kubernetes.namespace`", do.key("kubernetes", "namespace"), example="models")
    yield _flag("endpoint-selector", "`kubernetes.selector`", do.key("kubernetes", "selector"), example="app=vllm")
    yield _flag("endpoint-target-ports", "`kubernetes.ports`", do.key("kubernetes", "ports"), example="8000,8001")
    yield _flag("ha-enable-leader-election", "`kubernetes.leader_election`", _leader_election, nargs="?", example="")
    yield _flag("kubeconfig", "`kubernetes.kubeconfig`", do.key("kubernetes", "kubeconfig"), example="/k")
    yield _flag("secure-serving", "`epp.tls`", _secure_serving, nargs="?", example="false")
    yield _flag("cert-path", "`tls.cert`, `tls.key` and `epp.tls: files`", _cert_path, example="/certs")
    yield _flag("drain-timeout", "`gateway.drain_timeout_s`", _drain_timeout, example="1m5s")
    yield _flag("zap-encoder", "`logging.format`", _encoder, example="json")
    yield _flag("zap-log-level", "`logging.level`", do.log_level, example="error")
    yield _told(
        "refresh-metrics-interval metrics-staleness-threshold",
        "each engine's metrics are read every health.scrape_interval_s; what is picked is booked at once",
    )
    yield _told("enable-cert-reload", "certificates are always reloaded", "?")
    yield _told("disable-endpoint-subset-filter", "a hint at a subset is always followed", "?")
    yield _flag(
        "emit-endpoint-scores",
        "`epp.emit_scores`; a score is 1 / (1 + predicted seconds)",
        _emit_scores,
        kind=Kind.NEAR,
        nargs="?",
        example="",
    )
    yield _told("metrics-endpoint-auth metrics-client-ca-file", "/metrics is open to who reaches epp.metrics_port", "?")
    yield _told("grpc-max-recv-msg-size grpc-max-send-msg-size", "gateway.max_body_bytes bounds bodies")
    yield _told("tls-min-version tls-cipher-suites", "what gRPC's own library offers")
    yield _flag("tracing", "`tracing.enabled`", _tracing, nargs="?", example="")
    yield _told("enable-pprof enable-grpc-stream-metrics allow-experimental-plugins zap-devel", "not there", "?")
    yield _told("v zap-stacktrace-level zap-time-encoding", "see logging.level and logging.format")
    yield _told("pool-group", "inference.networking.k8s.io, the only one")
    yield _flag(
        "config-file config-text",
        "there are no plugins to choose and weigh; see warmroute config --print-default",
        kind=Kind.REFUSED,
        nargs="+",
        example="f.yaml",
    )


PICKER_FLAGS: Final = tuple(_rows())


def picker_rows() -> list[str]:
    """Of docs/flags.md."""
    rows = [
        f"| `--grpc-port`, `--grpc-health-port`, `--metrics-port` | {LLM_D} | exact | `epp.port`, `epp.health_port`, "
        "`epp.metrics_port` |"
    ]
    for flag in PICKER_FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        rows.append(f"| {names} | {flag.of} | {flag.kind.value} | {flag.ours} |")
    return rows
