"""YAML < environment < flags, and what each says about a mistake."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from gateway.cli import Parser
from gateway.config import Config, ConfigError, Worker, load_config, load_workers
from gateway.config.flags import GATEWAY_ALIASES, SIDECAR_ALIASES, add_config_flags, parse_flags
from gateway.config.keys import dotted, env_name, flag_name, leaves
from gateway.discovery.base import change
from gateway.discovery.lines import read_lines
from scorer.types import ChangeKind

LEAVES = [path for path, key in leaves() if not key.is_workers]
# One valid value other than the default for each type of key, by the words of its error message.
OTHER = {
    "a non-empty text": "elsewhere",
    "a non-empty text or null": "elsewhere",
    "a ZeroMQ endpoint (tcp://host:port or ipc://path) or null": "tcp://127.0.0.1:5557",
    "an http:// or https:// URL without user, query or fragment": "https://10.0.0.1:9",
    "an integer >= 1 and <= 256": "4",
    "the name of an HTTP header or null": "x-tenant",
    "the name of an object of Kubernetes or null": "elsewhere",
    "a ZeroMQ endpoint with {ip} for the pod's address (tcp://{ip}:port) or null": "tcp://{ip}:5557",
}
# ... and those of which not every value is good.
OTHER_OF = {
    ("queue", "tenant_share"): "0.25",
    ("pd", "policy"): "isl:2048,0.7",
    ("pd", "allow"): "10.0.0.0/8:*, [fd00::/8]:8000",
    ("pd", "lease_margin_s"): "1",
    ("kubernetes", "ports"): "8000, 8001",
    ("redis", "url"): "rediss://redis.internal:6380/1",
    ("redis", "fleet"): "chat",
    ("redis", "prefix"): "routers",
    ("redis", "interval_ms"): "50",
    ("redis", "ttl_s"): "5",
    ("index", "service", "addresses"): "10.0.0.1:9010, unix:/run/indexer.sock",
}
# Keys that need another one.
CONTEXT = {
    ("events", "bind_endpoint"): "tcp://127.0.0.1:5557",
    ("tls", "cert"): "c.pem",
    ("tls", "key"): "k.pem",
    ("tls", "client_cert"): "cc.pem",
    ("tls", "client_key"): "ck.pem",
    ("index", "service", "addresses"): "10.0.0.1:9010",
    ("index", "service", "cert"): "c.pem",
    ("index", "service", "key"): "k.pem",
}
CONTEXT_OF = {("tenancy", "certificate"): {("tls", "client_ca"): "ca.pem"}}


def other_value(expected: str) -> str:
    if expected.startswith("one of"):
        return expected.rpartition(" ")[2]
    if "<= 1" in expected and "65535" not in expected:
        return "0.5"
    if "<= 64" in expected:
        return "3"
    return OTHER.get(expected, "2000000")[:7] if "65535" not in expected else "1234"


def value_at(config: Config, path: tuple[str, ...]) -> Any:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def _write(text: str) -> str:
        file = tmp_path / "warmroute.yaml"
        file.write_text(text)
        return str(file)

    return _write


def messages(error: ConfigError) -> list[str]:
    return [f"{p.key}: {p.message}" for p in error.problems]


def test_nothing_given_is_the_default() -> None:
    assert load_config() == Config()


@pytest.mark.parametrize("path", LEAVES, ids=dotted)
def test_every_key_can_be_set_by_environment_and_flag(path: tuple[str, ...]) -> None:
    key = dict(leaves())[path]
    if key.type == Literal[key.default]:
        return  # There is no other value yet.
    text = OTHER_OF.get(path) or OTHER.get(key.expected) or other_value(key.expected)
    if key.type is bool:
        text = str(not key.default).lower()
    given = {**CONTEXT, **CONTEXT_OF.get(path, {}), path: text}
    by_env = load_config(env={env_name(each): value for each, value in given.items()})
    by_flag = load_config(flags=given)
    assert by_env == by_flag
    assert value_at(by_env, path) != key.default
    assert flag_name(path).startswith("--")


def test_environment_beats_yaml_and_flag_beats_both(write: Any) -> None:
    file = write("gateway: {port: 1, admin_port: 2, max_concurrency: 3}\n")
    env = {"WARMROUTE_GATEWAY__PORT": "11", "WARMROUTE_GATEWAY__ADMIN_PORT": "12"}
    gateway = load_config(file, env, {("gateway", "port"): "21"}).gateway
    assert (gateway.port, gateway.admin_port, gateway.max_concurrency) == (21, 12, 3)


def test_file_named_by_the_environment_gives_way_to_an_argument(write: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("gateway: {port: 7}\n")
    env = {"WARMROUTE_CONFIG": write("gateway: {port: 6}\n")}
    assert load_config(env=env).gateway.port == 6
    assert load_config(str(other), env).gateway.port == 7


def test_workers_are_urls_or_objects_and_a_later_source_replaces_the_list(write: Any) -> None:
    file = write("workers: [http://a:1, {url: http://b:2, role: prefill, labels: {zone: z}}]\n")
    assert load_config(file).workers == (
        Worker(url="http://a:1"),
        Worker(url="http://b:2", role="prefill", labels={"zone": "z"}),
    )
    assert load_config(file, {"WARMROUTE_WORKERS": "http://c:3, http://d:4"}).workers == (
        Worker(url="http://c:3"),
        Worker(url="http://d:4"),
    )
    flag = ["http://e:5", "[{url: 'http://f:6', role: decode}]"]
    assert load_config(file, flags={("workers",): flag}).workers == (
        Worker(url="http://e:5"),
        Worker(url="http://f:6", role="decode"),
    )


@pytest.mark.parametrize(
    ("text", "source", "key", "nearest"),
    [
        ("index:\n  budget_byte: 1\n", ":2", "index.budget_byte", "index.budget_bytes"),
        ("\nindx: {}\n", ":2", "indx", "index"),
        ("budget_bytes: 5\n", ":1", "budget_bytes", "index.budget_bytes"),
        ("workers:\n- url: http://a\n  rol: both\n", ":3", "workers[0].rol", "workers[0].role"),
    ],
)
def test_unknown_yaml_key_names_the_nearest_and_the_line(
    write: Any, text: str, source: str, key: str, nearest: str
) -> None:
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert problem.source == file + source
    assert problem.key == key
    assert problem.message == f"unknown key; did you mean {nearest}?"


def test_unknown_variable_and_flag_name_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={"WARMROUTE_INDEX__BUDGET_BYTE": "1", "PATH": "x"}, unknown_flags=["--index-budget-byte"])
    assert [(p.source, p.key, p.message.rpartition(" ")[2]) for p in caught.value.problems] == [
        ("environment", "WARMROUTE_INDEX__BUDGET_BYTE", "WARMROUTE_INDEX__BUDGET_BYTES?"),
        ("command line", "--index-budget-byte", "--index-budget-bytes?"),
    ]


def test_variables_of_the_end_to_end_tests_are_not_keys() -> None:
    assert load_config(env={"WARMROUTE_E2E_VENV": ".venv-e2e"}) == Config()


def test_kubernetes_service_links_are_not_keys_but_a_mistyped_port_is() -> None:
    links = {
        "WARMROUTE_SERVICE_HOST": "10.0.0.1",
        "WARMROUTE_SERVICE_PORT_HTTP": "8000",
        "WARMROUTE_PORT": "tcp://10.0.0.1:8000",
        "WARMROUTE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "WARMROUTE_GATEWAY_PORT": "tcp://10.0.0.1:8000",
        "WARMROUTE_GATEWAY_SERVICE_PORT": "8000",
    }
    assert load_config(env=links) == Config()
    with pytest.raises(ConfigError, match="did you mean WARMROUTE_GATEWAY__PORT"):
        load_config(env={"WARMROUTE_GATEWAY_PORT": "9000"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gateway: {port: '80'}", "gateway.port: expected an integer >= 0 and <= 65535, got the text '80'"),
        ("gateway: {port: 70000}", "gateway.port: expected an integer >= 0 and <= 65535, got the number 70000"),
        ("gateway: {port: true}", "gateway.port: expected an integer >= 0 and <= 65535, got true"),
        ("gateway: {host: on}", "gateway.host: expected a non-empty text, got true"),
        ("health: {eject_after_s: .nan}", "health.eject_after_s: expected a number > 0, got the number nan"),
        ("health: {eject_after_s: .inf}", "health.eject_after_s: expected a number > 0, got the number inf"),
        ("scorer: {slo_ttft_ms: [1]}", "scorer.slo_ttft_ms: expected a number > 0 or null, got a list"),
        ("logging: {level: loud}", "logging.level: expected one of debug, info, warning, error, got the text 'loud'"),
        ("tokens: 7", "tokens: expected a mapping, got the number 7"),
        ("- 1", ": expected a mapping, got a list"),
        ("workers: 7", "workers: expected a list of URLs or objects, got the number 7"),
        ("workers: [7]", "workers[0]: expected a URL or an object, got the number 7"),
        (
            "workers: [{url: http://a, labels: {n: 1}}]",
            "workers[0].labels: expected a mapping of texts to texts, got a mapping where n is the number 1",
        ),
    ],
)
def test_bad_type_names_key_expected_type_and_source(write: Any, text: str, expected: str) -> None:
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert messages(caught.value) == [expected]
    assert caught.value.problems[0].source == f"{file}:1"


def test_bad_variable_and_flag_are_named_as_given() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={"WARMROUTE_GATEWAY__PORT": "many"}, flags={("index", "orphan_blocks"): "-1"})
    assert [p.source for p in caught.value.problems] == ["WARMROUTE_GATEWAY__PORT", "--index-orphan-blocks"]


def test_all_problems_of_all_sources_come_at_once_even_when_overridden(write: Any) -> None:
    file = write("gateway: {port: x, admin_port: y}\nworkers: [ftp://a, {name: n}]\nscorer: {polcy: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {"WARMROUTE_GATEWAY__PORT": "80", "WARMROUTE_NO": "1"}, unknown_flags=["--no"])
    keys = [p.key for p in caught.value.problems]
    assert keys == [
        "gateway.port",
        "gateway.admin_port",
        "workers[0].url",
        "workers[1].url",
        "scorer.polcy",
        "WARMROUTE_NO",
        "--no",
    ]
    assert len(str(caught.value).splitlines()) == len(keys)


def test_credentials_in_a_url_are_refused_and_not_repeated(write: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("workers: ['http://user:hunter2@host:8000']\n"))
    assert "hunter2" not in str(caught.value)


def test_key_given_twice_is_an_error(write: Any) -> None:
    file = write("index:\n  orphan_blocks: 1\n  orphan_blocks: 2\n  orphan_blocks: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert [(p.key, p.source) for p in caught.value.problems] == [
        ("index.orphan_blocks", f"{file}:3"),
        ("index.orphan_blocks", f"{file}:4"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a: b: c",
        "a: &a [*a]",
        "a: 2020-99-99",
        "a: \0",
        "? [1]\n: 2",
        "a: !!python/object:os.system x",
        "a: *b",
        "--- 1\n--- 2",
    ],
)
def test_broken_yaml_is_one_problem_in_one_line(write: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(text))
    assert len(caught.value.problems) == 1
    assert "not valid YAML" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    binary = tmp_path / "latin1.yaml"
    binary.write_bytes(b"a: \xff")
    for file, message in (
        (binary, "is not UTF-8 text"),
        (tmp_path, "Is a directory"),
        (tmp_path / "no", "No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(str(file))


def test_yaml_anchors_and_empty_sections_work(write: Any) -> None:
    text = "gateway:\nworkers:\nhealth: &h {eject_after_s: 9}\nindex:\n"
    assert load_config(write(text)).health.eject_after_s == 9.0
    merged = "workers: [&w {url: http://a, role: decode}, {<<: *w, url: http://b}]\n"
    assert [w.role for w in load_config(write(merged)).workers] == ["decode", "decode"]
    assert load_config(write("# nothing\n")) == Config()


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("512M", 512 << 20), ("1.5 gib", 3 << 29), ("2000000", 2000000)]
)
def test_sizes_may_have_a_binary_unit(write: Any, text: str, size: int) -> None:
    assert load_config(write(f"index: {{budget_bytes: {text}}}")).index.budget_bytes == size
    assert load_config(env={"WARMROUTE_INDEX__BUDGET_BYTES": text}).index.budget_bytes == size


@pytest.mark.parametrize("text", ["", "null"])
def test_empty_variable_of_an_optional_key_is_null(write: Any, text: str) -> None:
    file = write("tokens: {tokenizer: /models/x}\nscorer: {slo_ttft_ms: 5}\n")
    config = load_config(file, {"WARMROUTE_TOKENS__TOKENIZER": text, "WARMROUTE_SCORER__SLO_TTFT_MS": text})
    assert config.tokens.tokenizer is None
    assert config.scorer.slo_ttft_ms is None


@pytest.mark.parametrize(
    ("flags", "key", "source"),
    [
        ({("gateway", "admin_port"): "8000"}, "gateway.admin_port", "--gateway-admin-port"),
        ({("events", "mode"): "bind"}, "events.bind_endpoint", "default"),
        ({("tls", "cert"): "c.pem"}, "tls.key", "default"),
        ({("tls", "key"): "k.pem"}, "tls.cert", "default"),
        ({("pd", "policy"): "sometimes"}, "pd.policy", "--pd-policy"),
        ({("pd", "policy"): "threshold:-1"}, "pd.policy", "--pd-policy"),
        ({("pd", "lease_s"): "5"}, "pd.lease_margin_s", "default"),
        ({("pd", "allow"): "a:1,10.0.0.0/8"}, "pd.allow[1]", "--pd-allow"),
        ({("sidecar", "admin_port"): "8000"}, "sidecar.admin_port", "--sidecar-admin-port"),
        (
            {("sidecar", "admin_port"): "8003", ("sidecar", "data_parallel_size"): "4"},
            "sidecar.admin_port",
            "--sidecar-admin-port",
        ),
        ({("sidecar", "engine"): "http://localhost:8000"}, "sidecar.engine", "--sidecar-engine"),
        ({("sidecar", "port"): "8199", ("sidecar", "data_parallel_size"): "2"}, "sidecar.engine", "default"),
        ({("sidecar", "port"): "65535", ("sidecar", "data_parallel_size"): "2"}, "sidecar.port", "--sidecar-port"),
        ({("workers",): "http://a,http://b,http://a"}, "workers[2].url", "--workers"),
        ({("workers",): "[{url: http://a, name: n}, {url: http://b, name: n}]"}, "workers[1].name", "--workers"),
    ],
)
def test_what_no_single_key_shows(flags: dict[tuple[str, ...], Any], key: str, source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags)
    assert [(p.key, p.source) for p in caught.value.problems] == [(key, source)]


def test_entry_that_cannot_be_read_is_named_with_its_line(write: Any) -> None:
    file = write("pd:\n  allow:\n  - a:1\n  - http://b:2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert (problem.key, problem.source) == ("pd.allow[1]", f"{file}:4")
    assert "'http://b:2' cannot be read" in problem.message


def test_lists_of_texts_from_every_source(write: Any) -> None:
    allow = ("a:1", "[::1]:*", "[fd00::/8]:8000")
    assert load_config(write("pd: {allow: ['a:1', '[::1]:*', '[fd00::/8]:8000']}\n")).pd.allow == allow
    assert load_config(env={"WARMROUTE_PD__ALLOW": " a:1 ,[::1]:*,,[fd00::/8]:8000"}).pd.allow == allow
    assert load_config(flags={("pd", "allow"): ["a:1,[::1]:*", "[fd00::/8]:8000"]}).pd.allow == allow
    assert load_config(env={"WARMROUTE_PD__ALLOW": '["a:1", "[::1]:*", "[fd00::/8]:8000"]'}).pd.allow == allow
    assert load_config(write("pd: {allow: }\n"), env={"WARMROUTE_PD__ALLOW": ""}).pd.allow == ()
    for bad in ("a:1", "[7]", "['']", "{a: 1}"):
        with pytest.raises(ConfigError, match=r"pd\.allow: expected a list of texts"):
            load_config(write(f"pd: {{allow: {bad}}}\n"))


def flags_of(*args: str, aliases: Any = GATEWAY_ALIASES) -> Config:
    parser = Parser(prog="warmroute test", description="")
    add_config_flags(parser, aliases)
    _, given, unknown = parse_flags(parser, args)
    return load_config(flags=given, unknown_flags=unknown)


def test_prefill_and_decode_add_workers_with_a_role_in_the_order_given() -> None:
    config = flags_of(
        "--prefill", "http://p1:1,http://p2:2", "--worker", "http://b:3", "--decode=http://d:4", "--prefill", "http://p3:5"
    )  # fmt: skip
    assert [(worker.url, worker.role) for worker in config.workers] == [
        ("http://p1:1", "prefill"),
        ("http://p2:2", "prefill"),
        ("http://b:3", "both"),
        ("http://d:4", "decode"),
        ("http://p3:5", "prefill"),
    ]
    with pytest.raises(ConfigError, match=r"--workers: workers\[0\]\.url: expected an http"):
        flags_of("--prefill", "p1:1")


def test_short_flags_mean_the_face_they_are_given_to() -> None:
    config = flags_of(
        "--host", "h", "--port", "1", "--admin-port", "2", "--pd-policy", "local", "--on-prefill-failure", "fail"
    )
    assert (config.gateway.admin_port, config.sidecar.admin_port) == (2, 8090)
    assert flags_of("--admin-host", "h", "--admin-port", "2", aliases=SIDECAR_ALIASES).sidecar.admin_port == 2
    assert (config.gateway.host, config.gateway.port) == ("h", 1)
    assert (config.pd.policy, config.pd.on_prefill_failure) == ("local", "fail")
    config = flags_of(
        "--host", "h", "--port", "1", "--engine", "http://e:2", "--no-hint", "local", aliases=SIDECAR_ALIASES
    )
    assert (config.sidecar.host, config.sidecar.port, config.sidecar.engine) == ("h", 1, "http://e:2")
    assert (config.gateway, config.pd.no_hint) == (Config().gateway, "local")


@pytest.mark.parametrize("nixl", ["10.0.0.1", "10.0.0.1:5600", "[fd00::1]:5600", "[fd00::1]", "pod-1.ns"])
def test_side_channel_of_a_worker(write: Any, nixl: str) -> None:
    (worker,) = load_config(write(f"workers: [{{url: 'http://a:1', role: prefill, nixl: '{nixl}'}}]\n")).workers
    assert worker.nixl == nixl


@pytest.mark.parametrize("nixl", ["", "10.0.0.1:", "10.0.0.1:99999", "tcp://a:1", "fd00::1", "a b"])
def test_side_channel_that_is_no_address(write: Any, nixl: str) -> None:
    with pytest.raises(ConfigError, match=r"workers\[0\]\.nixl: expected host or host:port"):
        load_config(write(f"workers: [{{url: 'http://a:1', nixl: '{nixl}'}}]\n"))


def test_same_port_on_two_addresses_is_fine() -> None:
    flags = {("gateway", "host"): "10.0.0.1", ("gateway", "admin_port"): "8000"}
    assert load_config(flags=flags).gateway.admin_port == 8000


def test_workers_file_takes_role_and_side_channel(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text("- {url: http://b:2, role: prefill, nixl: 'b-nic:5600'}\n")
    (worker,) = load_workers(str(file))
    assert (worker.role, worker.nixl) == ("prefill", "b-nic:5600")
    assert change(ChangeKind.ADDED, "b", worker).nixl_endpoint == "b-nic:5600"
    (worker,) = read_lines("http://b:2 role=prefill nixl=b-nic\n", "x")
    assert (worker.role, worker.nixl) == ("prefill", "b-nic")


def test_workers_file_holds_the_list_alone(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text("- http://a:1\n- {url: http://b:2, role: decode}\n")
    assert [w.url for w in load_workers(str(file))] == ["http://a:1", "http://b:2"]
    file.write_text("- http://a:1\n- {url: http://b:2, rolle: decode}\n- http://c:3/\n- 4\n")
    with pytest.raises(ConfigError) as caught:
        load_workers(str(file))
    assert [(p.key, p.source) for p in caught.value.problems] == [
        ("workers[1].rolle", f"{file}:2"),
        ("workers[3]", f"{file}:4"),
    ]
    file.write_text("[http://a, http://a]")
    with pytest.raises(ConfigError, match="same as"):
        load_workers(str(file))


def test_config_is_frozen_and_every_key_is_documented() -> None:
    with pytest.raises(AttributeError):
        Config().gateway.port = 1  # type: ignore[misc]
    for path, key in leaves():
        assert key.description.endswith("."), dotted(path)
    assert len({env_name(path) for path, _ in leaves()}) == len({flag_name(path) for path, _ in leaves()})
    assert msgspec.convert(msgspec.to_builtins(Config()), Config) == Config()


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("index: {source: service}", "index.service.addresses", "needed"),
        ("index: {service: {cert: c.pem}}", "index.service.key", "needed"),
        ("index: {service: {addresses: [nowhere]}}", "index.service.addresses", "a list of the text 'nowhere'"),
        ("indexer: {port: null}", "indexer.socket", "needed"),
        ("indexer: {port: 9011}", "indexer.metrics_port", "9011"),
        ("indexer: {admin_port: 9010}", "indexer.admin_port", "9010"),
    ],
)
def test_an_index_service_that_cannot_be(tmp_path: Path, text: str, at: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(str(file))
    (problem,) = str(refused.value).splitlines()
    assert at in problem
    assert says in problem
