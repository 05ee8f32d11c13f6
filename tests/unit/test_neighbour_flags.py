"""Command lines of neighbouring routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.cli import Parser
from gateway.config import Config
from gateway.config.flags import GATEWAY_ALIASES, SIDECAR_ALIASES, add_config_flags, flags_of, parse_flags
from gateway.config.keys import flag_name, leaves
from gateway.config.load import ConfigError, load_config
from gateway.config.neighbour_flags import FLAGS, page
from gateway.config.neighbours import NO_POLICIES, POLICIES, Flag, Kind
from gateway.config.schema import Worker
from gateway.errors import UserError

NEEDS = {
    "--static-model-labels": "--static-backends http://a:1,http://b:1",
    "--prefill-model-labels": "--static-backends http://a:1,http://b:1 --static-model-labels p,d",
    "--decode-model-labels": "--static-backends http://a:1,http://b:1 --static-model-labels p,d",
    "--prefiller-hosts": "--prefiller-ports 1 2",
    "--prefiller-host": "--prefiller-ports 1 2",
    "--prefiller-ports": "--prefiller-hosts a b",
    "--prefiller-port": "--prefiller-hosts a b",
    "--decoder-hosts": "--decoder-ports 1",
    "--decoder-host": "--decoder-ports 1",
    "--kv-event-source": "--worker-urls http://w:1",
    "--kv-event-replay-source": "--worker-urls http://w:1",
}
"""What else has to be given."""
CHANGES_NOTHING = {"--static-model-labels", "--kv-connector", "--backend", "--service-discovery"}
"""By themselves, or since it is the default."""


def loaded(*args: str) -> Config:
    parser = Parser(prog="x", description="")
    add_config_flags(parser, GATEWAY_ALIASES)
    _, given, unknown = parse_flags(parser, args)
    return load_config(None, {}, given, unknown, flags_of(parser))


EACH = [(flag, name) for flag in FLAGS for name in flag.names]


@pytest.mark.parametrize(("flag", "name"), EACH, ids=[name for _, name in EACH])
def test_every_flag_does_the_same_or_says_what_it_does(
    flag: Flag, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without = NEEDS.get(name, "").split()
    with_ = [*without, name, *flag.example.split()]
    if flag.kind is Kind.REFUSED:
        with pytest.raises(UserError, match=r"llm-d\.ai/role"):
            loaded(*with_)
        return
    if name.startswith(("--prefiller", "--decoder")):
        assert loaded(*with_).workers
        without = []
    before = loaded(*without)
    capsys.readouterr()
    after, told = loaded(*with_), capsys.readouterr().err
    assert (after == before) == (flag.kind is Kind.TOLD or name in CHANGES_NOTHING)
    assert told.count("\n") == (flag.kind is not Kind.EXACT), told
    assert not told or (told.startswith("warmroute: note: ") and (name in told or "session" in told))


def test_the_page_is_made_from_the_table() -> None:
    """If this fails: python -m gateway.config.neighbour_flags > docs/flags.md"""
    assert (Path(__file__).resolve().parents[2] / "docs/flags.md").read_text() == page()


def test_no_flag_is_ours_too_and_every_key_that_is_named_is_there() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    ours = {flag_name(path) for path, _ in leaves()}
    assert not set(names) & ours
    keys = {".".join(path) for path, _ in leaves()} | {f"workers[].{key}" for key in Worker.__struct_fields__}
    for flag in FLAGS:
        for part in flag.ours.split("`")[1::2]:
            assert part in {"static"} or part.partition(":")[0] in keys, part


def test_a_whole_line_of_vllm_router(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "--host 127.0.0.1 --port 30000 --prometheus-port 29000 --policy kv_aware --worker-urls http://a:1 http://b:2 "
        "--kv-event-source http://a:1=tcp://a:5557 --kv-event-source http://b:2=tcp://b:5557,tcp://b:5558 "
        "--kv-event-model m --request-timeout-secs 600 --cb-failure-threshold 5 --cb-timeout-duration-secs 30 "
        "--max-concurrent-requests 256"
    )
    config = loaded(*line.split())
    assert config.workers == (
        Worker(url="http://a:1", events="tcp://a:5557"),
        Worker(url="http://b:2", events="tcp://b:5557"),
    )
    assert (config.gateway.port, config.gateway.request_timeout_s, config.gateway.max_concurrency) == (30000, 600, 256)
    assert config.scorer.policy == "warmroute"
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in told] == [
        "policy kv_aware is warmroute here",
        "--kv-event-model",
        "--max-concurrent-requests",
        "--cb-failure-threshold, --cb-timeout-duration-secs",
        "--prometheus-port",
    ]


def test_prefill_and_decode_as_sglang_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "--pd-disaggregation --prefill http://p1:1 8998 --prefill http://p2:1 none --decode http://d1:1 --policy random"
    )
    config = loaded(*line.split())
    assert [(worker.url, worker.role) for worker in config.workers] == [
        ("http://p1:1", "prefill"),
        ("http://p2:1", "prefill"),
        ("http://d1:1", "decode"),
    ]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "bootstrap port is not used" in told[0]


@pytest.mark.parametrize(
    "line",
    [
        "--service-discovery --selector app=vllm tier=gpu --service-discovery-port 9000 "
        "--service-discovery-namespace models",
        "--service-discovery k8s --k8s-label-selector app=vllm,tier=gpu --k8s-port 9000 --k8s-namespace models",
    ],
    ids=["vllm-router", "production-stack"],
)
def test_pods_are_followed(line: str) -> None:
    kubernetes = loaded(*line.split()).kubernetes
    assert (kubernetes.selector, kubernetes.ports, kubernetes.namespace) == ("app=vllm,tier=gpu", (9000,), "models")
    assert loaded("--service-discovery", "k8s", "--kubernetes-pool", "p").kubernetes.pool == "p"


def test_the_toy_proxy_and_production_stack() -> None:
    line = "--port 8192 --prefiller-hosts p1 p2 --prefiller-ports 8100 8101 --decoder-ports 8200"
    assert [(worker.url, worker.role) for worker in loaded(*line.split()).workers] == [
        ("http://p1:8100", "prefill"),
        ("http://p2:8101", "prefill"),
        ("http://localhost:8200", "decode"),
    ]
    line = (
        "--service-discovery static --static-backends http://a:1,http://b:1/ --static-models m,m "
        "--static-model-labels p,d --prefill-model-labels p --decode-model-labels d "
        "--routing-logic disaggregated_prefill --session-key x-user"
    )
    config = loaded(*line.split())
    assert [(worker.url, worker.role) for worker in config.workers] == [
        ("http://a:1", "prefill"),
        ("http://b:1/", "decode"),
    ]
    assert (config.pd.policy, config.scorer.session_header) == ("always-remote", "x-user")


@pytest.mark.parametrize("flag", ["--policy", "--routing-logic"])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_of_neighbours(flag: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, known = loaded(flag, name), POLICIES[name]
    assert config.scorer.policy == known.ours
    if known.also is not None:
        (section, key), value = known.also
        assert getattr(getattr(config, section), key) == value
    assert ("policy" in capsys.readouterr().err) == (known.note is not None)


@pytest.mark.parametrize("name", [*NO_POLICIES, "kv-cache"])
def test_policies_that_are_not_there_say_what_is(name: str) -> None:
    with pytest.raises(UserError, match=r"--policy warmroute|session-affinity|one of warmroute, round-robin"):
        loaded("--policy", name)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--prefiller-hosts a b --prefiller-ports 1", "--prefiller-hosts names 2 and --prefiller-ports 1"),
        ("--prefiller-hosts a", "--prefiller-hosts needs --prefiller-ports"),
        ("--kv-event-source http://x:1=tcp://x:1", "http://x:1, which is none of the workers"),
        ("--worker-urls http://x:1 --kv-event-source http://x:1", "takes URL=ENDPOINT"),
        ("--worker-urls http://x:1 --kv-event-source http://x:1=tcp://x:1,tcp://x:7", "on the next port"),
        ("--static-backends http://a:1 --static-model-labels p,d --prefill-model-labels p", "names 2 and"),
        ("--service-discovery", "needs --selector"),
        ("--service-discovery k8s", "needs --selector"),
        ("--service-discovery etcd", "--discovery-dns"),
        ("--backend sglang", "engines are vLLM servers"),
        ("--kv-connector mooncake", "pd.connector: expected one of nixl"),
        ("--max-concurrent-requests -1", "gateway.max_concurrency: expected an integer >= 1"),
        ("--cb-failure-treshold 3", "--cb-failure-treshold: unknown argument; did you mean --cb-failure-threshold?"),
    ],
)
def test_what_cannot_be_meant(line: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(*line.split())
    assert says in str(caught.value)


def test_worker_urls_takes_lists_of_every_kind() -> None:
    line = ["--worker-urls", "http://a:1", "http://b:1,http://c:1", "[{url: 'http://d:1', role: decode}]"]
    workers = {worker.url: worker.role for worker in loaded(*line, "--worker", "http://e:1").workers}
    both = dict.fromkeys((f"http://{name}:1" for name in "abce"), "both")
    assert workers == {**both, "http://d:1": "decode"}


def test_our_own_flag_is_stronger() -> None:
    assert loaded("--request-timeout-secs", "5", "--gateway-request-timeout-s", "7").gateway.request_timeout_s == 7


def test_a_sidecar_takes_none_of_them() -> None:
    parser: Any = Parser(prog="x", description="")
    add_config_flags(parser, SIDECAR_ALIASES)
    _, given, unknown = parse_flags(parser, ["--cb-failure-threshold", "3"])
    with pytest.raises(ConfigError, match="unknown argument"):
        load_config(None, {}, given, unknown)
