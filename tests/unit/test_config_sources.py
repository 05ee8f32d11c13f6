"""YAML < environment < flags, and what each says about a mistake."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import Config, ConfigError, Worker, load_config, load_workers
from gateway.config.keys import dotted, env_name, flag_name, leaves

LEAVES = [path for path, key in leaves() if not key.is_workers]
# One valid value other than the default for each type of key, by the words of its error message.
OTHER = {
    "true or false": "false",
    "a non-empty text": "elsewhere",
    "a non-empty text or null": "elsewhere",
    "a ZeroMQ endpoint (tcp://host:port or ipc://path) or null": "tcp://127.0.0.1:5557",
}


def other_value(expected: str) -> str:
    if expected.startswith("one of"):
        return expected.rpartition(" ")[2]
    if "<= 1" in expected and "65535" not in expected:
        return "0.5"
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
    text = OTHER.get(key.expected) or other_value(key.expected)
    by_env = load_config(env={env_name(path): text, "WARMROUTE_EVENTS__BIND_ENDPOINT": "tcp://127.0.0.1:5557"})
    by_flag = load_config(flags={path: text, ("events", "bind_endpoint"): "tcp://127.0.0.1:5557"})
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
        ({("workers",): "http://a,http://b,http://a"}, "workers[2].url", "--workers"),
        ({("workers",): "[{url: http://a, name: n}, {url: http://b, name: n}]"}, "workers[1].name", "--workers"),
    ],
)
def test_what_no_single_key_shows(flags: dict[tuple[str, ...], Any], key: str, source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags)
    assert [(p.key, p.source) for p in caught.value.problems] == [(key, source)]


def test_same_port_on_two_addresses_is_fine() -> None:
    flags = {("gateway", "host"): "10.0.0.1", ("gateway", "admin_port"): "8000"}
    assert load_config(flags=flags).gateway.admin_port == 8000


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
