"""What is printed reads back equal, and whatever is given, only a ConfigError comes out."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Config, ConfigError, Worker, load_config
from gateway.config.keys import Key, env_name, fields_of, leaves
from gateway.config.show import config_yaml, default_yaml

TEXT = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)
ENDPOINT = st.integers(1, 65535).map(lambda port: f"tcp://127.0.0.1:{port}")
WORKER = st.builds(
    Worker,
    url=st.builds(
        "http://{}:{}{}".format,
        st.from_regex(r"[a-z]{1,8}", fullmatch=True),
        st.integers(1, 65535),
        st.from_regex(r"(/[a-z]{0,4})?", fullmatch=True),
    ),
    name=st.none(),
    role=st.sampled_from(["both", "prefill", "decode"]),
    events=st.none() | ENDPOINT,
    replay=st.none() | ENDPOINT,
    weight=st.floats(0.01, 100.0),
    server_name=st.none() | st.just("vllm.svc"),
    nixl=st.none() | st.sampled_from(["10.0.0.1", "[fd00::1]:5600", "nic-0:5600"]),
    labels=st.dictionaries(TEXT, TEXT, max_size=3),
)


def read(text: str, **kwargs: Any) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config(str(file), **kwargs)


def outcome(load: Callable[[], Config]) -> Config | ConfigError:
    try:
        return load()
    except ConfigError as exc:
        return exc


SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "addresses": st.lists(st.sampled_from(["10.0.0.1:9010", "[fd00::1]:9010", "unix:/run/i.sock"]), max_size=3).map(
        tuple
    ),
    "allow": st.lists(st.sampled_from(["*", "10.0.0.0/8:*", "[fd00::/8]:8000", "pod-1.ns:8000"]), max_size=3).map(
        tuple
    ),
    "source": st.just("local"),
    "digest_interval_s": st.floats(1.0, 100.0),
    "processes": st.integers(1, 64),
    "data_parallel_size": st.integers(1, 4),
    "ports": st.lists(st.integers(1, 65535), min_size=1, max_size=3, unique=True).map(tuple),
    "pool": st.none(),
    "selector": st.none() | st.just("app in (vllm, vllm-canary),tier!=test"),
    "namespace": st.none() | st.just("models"),
    "header": st.none() | st.sampled_from(["x-tenant", "Authorization"]),
    "engine": st.sampled_from(["http://10.0.0.1:8200", "https://[fd00::1]/base"]),
    "lease_s": st.floats(1.0, 100.0, exclude_min=True),
    "interval_s": st.floats(1.0, 100.0),
    "url": st.none() | st.sampled_from(["redis://a", "rediss://a:1,[::1]:2/3", "unix:///run/redis.sock"]),
    "prefix": st.from_regex(r"[A-Za-z0-9_.-]{1,9}", fullmatch=True),
    "fleet": st.from_regex(r"[A-Za-z0-9_.-]{1,9}", fullmatch=True),
    "interval_ms": st.floats(1.0, 1000.0),
    "ttl_s": st.floats(1.0, 60.0),
    "objectives": st.lists(st.sampled_from(["a=1", "b=-1"]), max_size=2).map(tuple),
    "rewrites": st.lists(st.sampled_from(["m=a*3", "m=b"]), max_size=2).map(tuple),
    "session_affinity": st.sampled_from(["off", "strict"]),
    "session_header": st.sampled_from(["x-session-id", "X-Chat"]),
}


def valid(key: Key) -> st.SearchStrategy[Any]:
    if key.name in SPECIAL:
        return SPECIAL[key.name]
    if key.name == "policy" and "one of" not in key.expected:
        return st.none() | st.sampled_from(["header", "threshold:0", "isl:2048,0.7", "isl-ratio:4096,0.6"])
    if key.is_workers:
        return st.lists(WORKER, max_size=4, unique_by=lambda w: w.url).map(tuple)
    if key.section:
        return st.fixed_dictionaries({k.name: valid(k) for k in fields_of(key.section).values()}).map(
            lambda values: key.section(**values)  # type: ignore[misc]
        )
    if get_origin(key.type) is Literal:
        return st.sampled_from(get_args(key.type))
    if key.type is bool:
        return st.booleans()
    if "{ip}" in key.expected:
        return st.none() | st.sampled_from(["tcp://{ip}:5557", "tcp://{pod}.vllm:{port}", "tcp://*:5557"])
    if "ZeroMQ" in key.expected:
        return ENDPOINT
    if "text" in key.expected:
        return TEXT if not key.expected.endswith("null") else st.none() | TEXT
    if "integer" in key.expected:
        return st.integers(1 << 20, 1 << 40) if "65535" not in key.expected else st.integers(0, 65535)
    number = st.floats(1e-9, 1.0, exclude_min=True)
    return st.none() | number if key.expected.endswith("null") else number


CONFIG = st.fixed_dictionaries({k.name: valid(k) for k in fields_of(Config).values()}).map(lambda v: Config(**v))


def test_printed_default_reads_back_as_the_default_and_names_every_key() -> None:
    text = default_yaml()
    assert read(text) == Config()
    assert all(key.name in text and len(line) <= 120 for _, key in leaves() for line in text.splitlines())


@given(CONFIG)
def test_any_config_printed_reads_back_equal(config: Config) -> None:
    sidecar = config.sidecar
    if config.gateway.port == config.gateway.admin_port or (config.tls.cert is None) != (config.tls.key is None):
        return
    # The others of tls go together in ways of their own (tests/hermetic/test_mtls.py).
    tls = msgspec.structs.replace(config.tls, client_ca=None, client_cert=None, client_key=None)
    admin, tenancy = config.admin, msgspec.structs.replace(config.tenancy, certificate=False)
    config = msgspec.structs.replace(
        config, tls=tls, tenancy=tenancy, admin=msgspec.structs.replace(admin, client_ca=None)
    )
    if sidecar.port > 65000 or sidecar.admin_port in range(sidecar.port, sidecar.port + sidecar.data_parallel_size):
        return
    epp = config.epp
    if len({epp.port, epp.health_port, epp.metrics_port, epp.admin_port}) < 4:
        return
    service, indexer = config.index.service, config.indexer
    if (service.cert is None) != (service.key is None) or indexer.port in (None, indexer.metrics_port):
        return
    if indexer.admin_port in (indexer.port, indexer.metrics_port):
        return
    assert read(config_yaml(config)) == config


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*fields_of(Config), "x"]), JUNK, max_size=5))
def test_any_yaml_gives_a_config_or_a_config_error(tree: dict[str, Any]) -> None:
    result = outcome(lambda: read(yaml.safe_dump(tree)))
    assert isinstance(result, Config) or result.problems


@given(st.text(max_size=60))
def test_any_text_gives_a_config_or_a_config_error(text: str) -> None:
    result = outcome(lambda: read(text))
    assert isinstance(result, Config) or result.problems


@given(st.dictionaries(st.sampled_from([env_name(path) for path, _ in leaves()]), st.text(max_size=20), max_size=4))
def test_any_environment_gives_a_config_or_a_config_error(env: dict[str, str]) -> None:
    result = outcome(lambda: load_config(env=env))
    assert isinstance(result, Config) or {p.source for p in result.problems} <= {*env, "default"}
