"""docs/disaggregation.md against the code: keys, reasons, hints, metrics; and that no flag of llm-d's is left out."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gateway.config import Config
from gateway.config.keys import leaves
from gateway.debug.gauges import BY_NIXL
from gateway.debug.handoffs import HandoffMetrics
from gateway.sidecar import hints
from scorer.types import PdReason

DOC = (Path(__file__).resolve().parents[2] / "docs" / "disaggregation.md").read_text(encoding="utf-8")
LLM_D_FLAGS = (
    "port", "model-server-port", "vllm-port", "data-parallel-size", "kv-connector", "ec-connector",
    "mooncake-bootstrap-port", "p2p-connector-port", "enable-p2p-pull", "secure-proxy", "cert-path",
    "enable-ssrf-protection", "enable-prefiller-sampling", "pool-group", "inference-pool", "decode-chunk-size",
    "tracing", "metrics-port", "enable-tls", "tls-insecure-skip-verify", "max-idle-conns-per-host",
    "prefill-max-retries", "prefill-retry-backoff", "configuration", "configuration-file",
)  # fmt: skip


def section(title: str) -> str:
    _, _, rest = DOC.partition(f"\n## {title}\n")
    assert rest, title
    return rest.partition("\n## ")[0]


def rows(title: str) -> Iterator[list[str]]:
    for line in section(title).splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_reasons_are_exactly_those_there_are() -> None:
    named = [row[0].strip("`") for row in rows("Reasons")][1:]
    assert named == [reason.value for reason in PdReason]


def test_every_key_is_there_with_its_default() -> None:
    told: dict[str, str] = {}
    for row in list(rows("Keys"))[1:]:
        names = re.findall(r"`((?:pd|sidecar|tls)\.\w+)`", row[0])
        told |= dict(
            zip(names, row[1].split(", ") if len(names) > 1 and ", " in row[1] else [row[1]] * 2, strict=False)
        )
    for path, key in leaves():
        if path[0] in ("pd", "sidecar", "tls"):
            default = {None: "null", (): "empty"}.get(key.default, key.default)
            default = f"{default:g}" if isinstance(default, float) else str(default)
            default = default.lower() if isinstance(key.default, bool) else default
            assert told.pop(".".join(path)) == default, path
    assert told == {}
    assert Config().pd.policy is None


@pytest.mark.parametrize("flag", LLM_D_FLAGS)
def test_every_flag_of_llm_d_is_answered(flag: str) -> None:
    (row,) = [row for row in rows("From llm-d's sidecar") if f"`--{flag}`" in row[0]]
    assert row[1]


def test_flags_that_are_named_exist() -> None:
    from gateway.cli import Parser
    from gateway.config.flags import SIDECAR_ALIASES, add_config_flags

    parser = Parser(prog="x", description="")
    add_config_flags(parser, SIDECAR_ALIASES)
    known = set(parser.format_help().replace(",", " ").split())
    ours = {flag for row in rows("From llm-d's sidecar") for flag in re.findall(r"`(--[\w-]+)", row[1])}
    ours |= set(re.findall(r"`(--[\w-]+)`", section("Keys")))
    assert ours - known == set()


def test_every_header_that_is_read_is_there() -> None:
    read = {hints.PREFILLER, hints.RANK, hints.RANK_ENDPOINT, hints.KV_SOURCE, hints.PLAN}
    assert {row[0].strip("`") for row in list(rows("Control headers"))[1:]} == read


def test_metrics_are_exactly_those_there_are() -> None:
    registry = CollectorRegistry()
    HandoffMetrics(registry)
    read = {"pd_stranded_tokens", "pd_pair_broken", *BY_NIXL}
    kept = {family.name for family in registry.collect()} | {"warmroute_hints"} | {f"warmroute_{name}" for name in read}
    named = {name for row in list(rows("Metrics"))[1:] for name in re.findall(r"`(\w+)(?:\{[\w,]*\})?`", row[0])}
    assert {f"warmroute_{name.removesuffix('_total')}" for name in named} == kept
