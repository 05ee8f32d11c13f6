"""What an engine says about itself, read from recorded answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.debug.health import no_events
from gateway.engine.capabilities import (
    Adapter,
    Capabilities,
    EventSource,
    engine_binds,
    outside_address,
    parse_event_sources,
    parse_models,
    parse_version,
)


def models(*cards: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": [{"object": "model", **card} for card in cards]}).encode()


def test_models_aliases_and_adapters() -> None:
    found = parse_models(
        models(
            {"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 2048},
            {"id": "tiny-alias", "root": "/models/tiny", "parent": None, "max_model_len": 2048},
            {"id": "l1", "root": "/loras/l1", "parent": "tiny", "max_model_len": None},
        )
    )
    assert found.models == ("tiny", "tiny-alias")
    assert found.adapters == (Adapter("l1", "tiny", "/loras/l1"),)
    assert (found.root, found.max_model_len) == ("/models/tiny", 2048)
    assert Capabilities(models=found.models).aliases == ("tiny-alias",)


def test_models_of_other_servers() -> None:
    assert parse_models(models({"id": "m"})).models == ("m",)
    assert parse_models(models()).models == ()
    for body in (b"", b"[]", b'{"data": 1}', b'{"data": [{"name": "x"}]}', b"\xff"):
        with pytest.raises(msgspec.MsgspecError):
            parse_models(body)


def test_version() -> None:
    assert parse_version(b'{"version": "0.32.0"}') == "0.32.0"


RECORDED = {
    "0": {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:8200",
        "replay_endpoint": "tcp://*:9200",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv@127.0.0.1:8100@tiny",
    }
}


def sources(changes: dict[str, Any], url: str = "http://10.0.0.7:8100") -> dict[int, EventSource]:
    return parse_event_sources(json.dumps({"0": {**RECORDED["0"], **changes}}).encode(), url)


def test_wildcards_become_the_workers_host() -> None:
    assert sources({}) == {
        0: EventSource(
            endpoint="tcp://10.0.0.7:8200",
            replay_endpoint="tcp://10.0.0.7:9200",
            topic="kv@127.0.0.1:8100@tiny",
            buffer_batches=10000,
        )
    }
    ranks = parse_event_sources(json.dumps({"0": RECORDED["0"], "1": RECORDED["0"]}).encode(), "http://[fd00::7]:1")
    assert list(ranks) == [0, 1]
    assert ranks[1].endpoint == "tcp://[fd00::7]:8200"


def test_events_that_are_off_are_no_source() -> None:
    assert sources({"enable_kv_cache_events": False}) == {}
    assert sources({"publisher": "null"}) == {}
    assert sources({"endpoint": None}) == {}
    assert parse_event_sources(b"{}", "http://a:1") == {}


def test_an_engine_that_connects_to_us_is_told_apart() -> None:
    local = sources({"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"})[0]
    assert local.engine_connects
    assert local.endpoint == "tcp://127.0.0.1:5557"
    assert local.replay_endpoint == "tcp://10.0.0.7:5558"
    assert not sources({"endpoint": "tcp://10.0.0.7:40123"})[0].engine_connects


def test_what_cannot_be_reached_is_named() -> None:
    far = sources({"endpoint": "ipc:///tmp/kv", "replay_endpoint": "inproc://x"})[0]
    assert (far.endpoint, far.replay_endpoint) == (None, None)
    assert far.unreachable == "ipc:///tmp/kv, inproc://x"
    near = sources({"endpoint": "ipc:///tmp/kv", "replay_endpoint": None}, "http://localhost:1")[0]
    assert (near.endpoint, near.unreachable) == ("ipc:///tmp/kv", None)


@pytest.mark.parametrize(
    ("endpoint", "seen"),
    [
        ("tcp://*:1", "tcp://h:1"),
        ("tcp://0.0.0.0:1", "tcp://h:1"),
        ("tcp://[::]:1", "tcp://h:1"),
        ("tcp://:::1", "tcp://h:1"),
        ("tcp://localhost:1", "tcp://h:1"),
        ("tcp://[::1]:1", "tcp://h:1"),
        ("tcp://169.254.1.1:1", "tcp://h:1"),
        ("tcp://10.1.2.3:1", "tcp://10.1.2.3:1"),
        ("tcp://[fd00::1]:1", "tcp://[fd00::1]:1"),
        ("tcp://other.svc:1", "tcp://other.svc:1"),
        ("nonsense", None),
    ],
)
def test_addresses_as_seen_from_outside(endpoint: str, seen: str | None) -> None:
    assert outside_address(endpoint, "h") == seen


def test_who_binds() -> None:
    assert engine_binds("tcp://*:5557")
    assert engine_binds("tcp://[::]:5557")
    assert engine_binds("ipc:///x")
    assert engine_binds("tcp://10.0.0.1:5557")
    assert not engine_binds("tcp://localhost:5557")


def test_endless_lists_are_cut() -> None:
    """A worker that lists models or ranks without end must not cost the gateway its loop or its sockets."""
    cards = b",".join(b'{"id":"m%d"}' % i for i in range(5000))
    assert len(parse_models(b'{"data":[' + cards + b"]}").models) == 1000
    source = b'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"}'
    ranks = b",".join(b'"%d":%s' % (i, source) for i in range(-2, 5000))
    found = parse_event_sources(b"{" + ranks + b"}", "http://h:1")
    assert len(found) <= 256
    assert min(found) >= 0


def test_why_nobody_reads_events_is_told_apart() -> None:
    def why(endpoint: str, enabled: bool = True) -> str:
        source = {"enable_kv_cache_events": enabled, "publisher": "zmq", "endpoint": endpoint}
        return no_events(parse_event_sources(json.dumps({"0": source}).encode(), "http://gpu7:8000"))

    assert no_events(None) == "the engine does not say where it publishes any"
    assert why("tcp://*:5557", enabled=False) == "the engine publishes none"
    assert why("ipc:///tmp/kv") == "its address cannot be reached from here (ipc:///tmp/kv)"
    assert "does not listen but connects to tcp://127.0.0.1:5557" in why("tcp://127.0.0.1:5557")
