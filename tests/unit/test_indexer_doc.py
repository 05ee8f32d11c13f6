"""docs/indexer.md against the code: keys, defaults, metrics, how block keys are made."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

import xxhash

from gateway.config.schema import Config, IndexerConfig, IndexServiceConfig
from gateway.indexservice import followed, publisher, questions, server
from gateway.indexservice.metrics import _COUNTED
from indexer.keys import chain, root

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "indexer.md").read_text(encoding="utf-8")


def test_every_key_is_there() -> None:
    keys = DOC.partition("\n## Keys\n")[2]
    named = set(re.findall(r"`(?:index\.service\.|indexer\.|index\.)?([a-z_]+)`", keys))
    assert set(IndexerConfig.__struct_fields__) | set(IndexServiceConfig.__struct_fields__) <= named
    config = Config()
    assert f"| {config.index.source} |" in keys
    assert f"| {config.index.service.mode}, {config.index.service.budget_ms:g} |" in keys
    ports = config.indexer
    shown = (ports.host, ports.port, "null", "null", ports.metrics_port, ports.admin_host, ports.admin_port)
    assert f"| {', '.join(map(str, shown))} |" in keys
    assert f"| {ports.history_bytes >> 20} MiB |" in keys


def test_every_metric_is_there() -> None:
    for name in _COUNTED:
        assert f"_{name}_total`" in DOC


def test_limits_and_names_are_those_of_the_code() -> None:
    assert server.SERVICE in DOC
    assert f"{questions.MOST_TOKENS:,}" in DOC
    assert f"{server.MOST_MESSAGE_BYTES >> 20} MiB" in DOC
    assert f"more than {followed._GRACE_S:g} s" in DOC
    assert publisher.EVENTS_UP  # what STALE is the absence of


def test_block_keys_are_made_as_it_says() -> None:
    ids = array("I", range(100, 132)).tobytes()
    seed = xxhash.xxh3_64_intdigest(b"base:0::16")
    first = xxhash.xxh3_64_intdigest(ids[:64], seed=seed)
    second = xxhash.xxh3_64_intdigest(ids[64:], seed=first)
    assert chain(root(None, 16), ids, 16, 0, 2, {}) == [first, second]
    assert root("abc", 16) == xxhash.xxh3_64_intdigest(b"name:3:abc:16")


def test_the_wire_is_described_by_a_proto_of_its_own_version() -> None:
    proto = (ROOT / "proto" / "indexer.proto").read_text(encoding="utf-8")
    assert "package warmroute.indexer.v1;" in proto
    for method in re.findall(r"rpc (\w+)\(", proto):
        assert method in DOC
