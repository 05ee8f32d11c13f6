"""doctor: what a worker's answers say of it, on answers recorded from vLLM 0.32 and changed one at a time."""

from __future__ import annotations

import errno
import json
import ssl
from email.utils import parsedate_to_datetime
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from gateway.doctor.fetch import Answer, Fault, classify
from gateway.doctor.findings import Finding
from gateway.doctor.identity import PATHS, Identity, identify

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "vllm_0.32_doctor.json").read_text(encoding="utf-8"))
WALL_S = parsedate_to_datetime(RECORDED["answers"]["/health"]["date"]).timestamp()
URL = "http://10.0.0.1:8100"
CARD = {
    "id": "tiny",
    "object": "model",
    "owned_by": "vllm",
    "root": "/models/tiny",
    "parent": None,
    "max_model_len": 2048,
}


def recorded() -> dict[str, Answer | Fault]:
    answers: dict[str, Answer | Fault] = {
        path: Answer(answer["status"], answer["body"].encode(), WALL_S) for path, answer in RECORDED["answers"].items()
    }
    answers["/v1/models"] = Answer(200, json.dumps({"object": "list", "data": [CARD]}).encode(), WALL_S)
    assert set(answers) == set(PATHS)
    return answers


def seen(**changes: Answer | Fault) -> tuple[Identity, dict[str, Finding]]:
    answers = recorded()
    answers |= {f"/{name.replace('__', '/')}": answer for name, answer in changes.items()}
    me, found = identify(URL, answers)
    return me, {finding.code: finding for finding in found}


def metrics(old: str, new: str) -> Answer:
    text = RECORDED["answers"]["/metrics"]["body"]
    assert old in text
    return Answer(200, text.replace(old, new).encode(), WALL_S)


def version(text: str) -> Answer:
    return Answer(200, json.dumps({"version": text}).encode(), WALL_S)


def test_a_recorded_server_is_well() -> None:
    me, found = seen()
    assert list(found) == ["reachable", "models", "metrics"]
    assert "0.32.0" in found["reachable"].sentence
    assert "2048" in found["models"].sentence
    assert "block size 32" in found["metrics"].sentence
    assert "6400" in found["metrics"].sentence
    assert "1795987310" in found["metrics"].sentence
    assert me.usable
    assert me.engines == (0,)
    assert me.sources is not None
    assert me.sources[0].endpoint == "tcp://10.0.0.1:8200"


def test_aliases_and_adapters_are_named() -> None:
    adapter = {**CARD, "id": "l1", "root": "/lora/l1", "parent": "tiny", "max_model_len": None}
    cards = {"object": "list", "data": [CARD, {**CARD, "id": "nick"}, adapter]}
    _, found = seen(v1__models=Answer(200, json.dumps(cards).encode()))
    assert "also called nick" in found["models"].sentence
    assert "adapters l1" in found["models"].sentence


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0.10.2", "version-unsupported"),
        ("0.9.0.1", "version-unsupported"),
        ("0.11.0", "reachable"),
        ("0.32.1rc1", "reachable"),
        ("0.33.0.dev12+gabc", "version-newer"),
        ("1.0.0", "version-newer"),
        ("0.1.dev1+gdeadbee", "version-unknown"),
        ("nightly", "version-unknown"),
    ],
)
def test_version(text: str, code: str) -> None:
    _, found = seen(version=version(text))
    assert code in found
    assert ("version-unsupported" in found) == (code == "version-unsupported")


def test_a_proxy_or_another_server_is_not_vllm() -> None:
    page = Answer(200, b"<html>welcome</html>")
    me, found = identify(URL, dict.fromkeys(PATHS, page))
    assert [finding.code for finding in found] == ["not-vllm"]
    assert not me.usable


def test_vllm_with_no_version_is_still_vllm() -> None:
    _, found = seen(version=Answer(404, b""))
    assert "version-unknown" in found
    assert "not-vllm" not in found


def test_vllm_that_shows_little_is_still_vllm() -> None:
    _, found = seen(version=Answer(403, b""), metrics=Answer(403, b""))
    assert {"version-unknown", "models", "metrics-unreadable"} <= set(found)


def test_unhealthy() -> None:
    me, found = seen(health=Answer(503, b""))
    assert "503" in found["unhealthy"].sentence
    assert not me.usable


def test_asleep() -> None:
    me, found = seen(metrics=metrics('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0'))
    assert "asleep" in found
    assert not me.usable


@pytest.mark.parametrize("status", [401, 403])
def test_unauthorized(status: int) -> None:
    me, found = seen(v1__models=Answer(status, b'{"error":"Unauthorized"}'))
    assert "unauthorized" in found
    assert "models-unreadable" not in found
    assert not me.usable


@pytest.mark.parametrize("answer", [Answer(500, b""), Answer(200, b"[]"), Answer(200, b'{"data":[]}')])
def test_models_unreadable(answer: Answer) -> None:
    assert "models-unreadable" in seen(v1__models=answer)[1]


@pytest.mark.parametrize("answer", [Answer(404, b""), Answer(200, b"# nothing here\n")])
def test_metrics_unreadable(answer: Answer) -> None:
    me, found = seen(metrics=answer)
    assert "metrics-unreadable" in found
    assert me.usable


def test_prefix_caching_off_and_unknown() -> None:
    off = metrics('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    assert "--no-enable-prefix-caching" in seen(metrics=off)[1]["prefix-caching-off"].fix
    unknown = metrics("vllm:cache_config_info", "vllm:something_else_info")
    assert "prefix-caching-unknown" in seen(metrics=unknown)[1]


def test_one_face_that_stalls_hides_nothing() -> None:
    _, found = seen(metrics=Fault("timeout", "/metrics gave no answer within 5 s"))
    assert {"reachable", "models", "timeout"} <= set(found)


def test_all_faces_away_is_one_finding() -> None:
    answers = dict.fromkeys(PATHS, Fault("unreachable", "cannot connect"))
    assert [finding.code for finding in identify(URL, answers)[1]] == ["unreachable"]


@pytest.mark.parametrize(("body", "sources"), [(b"{}", {}), (b"nonsense", None), (b'{"0": 5}', None)])
def test_event_sources_that_say_nothing(body: bytes, sources: dict[int, object] | None) -> None:
    assert seen(kv_event_sources=Answer(200, body))[0].sources == sources


def test_data_parallel_engines_are_counted() -> None:
    line = next(x for x in RECORDED["answers"]["/metrics"]["body"].splitlines() if "cache_config_info{" in x)
    two = metrics(line, line + "\n" + line.replace('engine="0"', 'engine="1"'))
    me, found = seen(metrics=two)
    assert me.engines == (0, 1)
    assert "2 data-parallel ranks" in found["metrics"].sentence


def test_names_cannot_steer_the_terminal() -> None:
    cards = {"object": "list", "data": [{**CARD, "id": "x\x1b[2J\nerror"}]}
    sentence = seen(v1__models=Answer(200, json.dumps(cards).encode()))[1]["models"].sentence
    assert sentence.isprintable()


KEY = ConnectionKey("h", 80, False, True, None, None, None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (aiohttp.ClientConnectorError(KEY, OSError(errno.ECONNREFUSED, "x")), "unreachable"),
        (aiohttp.ClientConnectorDNSError(KEY, OSError("no name")), "unreachable"),
        (aiohttp.ClientConnectorSSLError(KEY, ssl.SSLError(1, "wrong version number")), "tls-failed"),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.CertificateError("self-signed")), "tls-failed"),
        (aiohttp.ServerDisconnectedError(), "not-http"),
        (aiohttp.ClientResponseError(Mock(), (), status=400, message="bad"), "not-http"),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), "not-http"),
        (aiohttp.InvalidURL("x"), "unreachable"),
    ],
)
def test_every_client_error_has_a_code(error: Exception, code: str) -> None:
    assert classify("/metrics", error).code == code
