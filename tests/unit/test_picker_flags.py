"""Command lines of other endpoint pickers."""

from __future__ import annotations

import pytest

from gateway.cli import Parser
from gateway.config import Config
from gateway.config.flags import EPP_ALIASES, add_config_flags, flags_of, parse_flags
from gateway.config.keys import flag_name, leaves
from gateway.config.load import load_config
from gateway.config.neighbours import Flag, Kind
from gateway.config.picker_flags import PICKER_FLAGS
from gateway.errors import UserError

EACH = [(flag, name) for flag in PICKER_FLAGS for name in flag.names]


def loaded(*args: str) -> Config:
    parser = Parser(prog="x", description="")
    add_config_flags(parser, EPP_ALIASES)
    _, given, unknown = parse_flags(parser, args)
    return load_config(None, {}, given, unknown, flags_of(parser))


@pytest.mark.parametrize(("flag", "name"), EACH, ids=[name for _, name in EACH])
def test_every_flag_does_the_same_or_says_what_it_does(
    flag: Flag, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{name}={flag.example}"] if flag.nargs == "?" and flag.example else [name, *flag.example.split()]
    if flag.kind is Kind.REFUSED:
        with pytest.raises(UserError, match="no plugins"):
            loaded(*given)
        return
    after, told = loaded(*given), capsys.readouterr().err
    assert (after == Config()) == (flag.kind is Kind.TOLD)
    assert told.count("\n") == (flag.kind is not Kind.EXACT), told


def test_no_flag_is_ours_too_and_every_key_that_is_named_is_there() -> None:
    names = [name for _, name in EACH]
    assert len(names) == len(set(names))
    keys = {".".join(path) for path, _ in leaves()}
    assert not set(names) & {flag_name(path) for path, _ in leaves()}
    for flag in PICKER_FLAGS:
        for part in flag.ours.split("`")[1::2]:
            assert part.partition(":")[0] in keys, part


def test_the_line_of_gaies_conformance_suite() -> None:
    line = (
        "--pool-name primary-inference-pool --pool-namespace gateway-conformance-app-backend --zap-encoder json "
        "--grpc-port 9002 --grpc-health-port 9003 --metrics-port=9090 --secure-serving=false --conformance"
    )
    config = loaded(*line.split())
    assert (config.kubernetes.pool, config.kubernetes.namespace) == (
        "primary-inference-pool",
        "gateway-conformance-app-backend",
    )
    assert (config.epp.port, config.epp.health_port, config.epp.metrics_port) == (9002, 9003, 9090)
    assert (config.epp.tls, config.epp.conformance, config.logging.format) == ("off", True, "json")


def test_the_line_of_llm_ds_chart(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--pool-name p --ha-enable-leader-election --cert-path /certs/ --drain-timeout 1m30s --v 4 --tracing=false"
    config = loaded(*line.split())
    assert config.kubernetes.leader_election
    assert (config.epp.tls, config.tls.cert, config.tls.key) == ("files", "/certs/tls.crt", "/certs/tls.key")
    assert config.gateway.drain_timeout_s == 90
    assert not config.tracing.enabled
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("line", ["--drain-timeout 5", "--drain-timeout x", "--secure-serving=maybe"])
def test_values_that_cannot_be_read(line: str) -> None:
    with pytest.raises(UserError, match="got"):
        loaded(*line.split())


def test_our_own_flag_is_stronger() -> None:
    assert loaded("--secure-serving=false", "--epp-tls", "self_signed").epp.tls == "self_signed"
