"""Headers that say what was planned and what became of it: hints, outcomes, endpoints, objectives."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

from multidict import CIMultiDict
from prometheus_client import CollectorRegistry

from gateway.epp.outcome import read_outcome
from gateway.proxy.errors import ApiError
from gateway.sidecar.allow import parse_entry
from gateway.sidecar.endpoint import parse_endpoint
from gateway.sidecar.hints import KV_SOURCE, PLAN, PREFILLER, RANK, RANK_ENDPOINT, HintReader
from gateway.sidecar.pod import Pod
from gateway.sidecar.targets import Targets
from scorer.fleet import Fleet
from scorer.types import CHOICES

_NAMES = (PREFILLER, RANK, RANK_ENDPOINT, KV_SOURCE, PLAN)
_OUTCOME = b"id=a1;choice=remote;reason=cost;prefiller=10.1.0.1:8000;prefill_ms=12.5"

SEEDS = [
    b"\x00" + b"10.1.0.1:8000,pod-1.ns:8000",
    b"\x00" + b"[fd00::1]:8000",
    b"\x01" + b"1",
    b"\x02" + b"10.0.0.5:8001",
    b"\x03" + b"10.1.2.3:8000",
    b"\x04" + b"v1;id=a1;choice=remote;n=100;hd=16;hp=32",
    b"\x04" + b"v1;id=a1;choice=local;n=1",
    b"\x04" + _OUTCOME,
    b"\x00" + b"10.1.0.1:8000\n\x01" + b"0",
]
# fmt: off
WORDS = [
    b"\n", b":", b",", b";", b"=", b"v1", b"id=", b"choice=local", b"choice=remote", b"n=", b"65536", b"[", b"]",
    b"::1", b"http://", b"*", b"/", b"%", b"\xc2\xb2", b"nan", b"inf", b"1e9", b"prefill_ms=",
]
# fmt: on


class _Sender:
    remote = "10.0.0.9"

    def __init__(self, headers: CIMultiDict[str]) -> None:
        self.headers = headers

    def sockname(self) -> tuple[str, int]:
        return "10.0.0.5", 8000


def fuzz_one(data: bytes) -> None:
    rows: CIMultiDict[str] = CIMultiDict()
    for row in data.split(b"\n")[:8]:
        if row:
            rows.add(_NAMES[row[0] % len(_NAMES)], row[1:].decode("utf-8", "surrogateescape"))
    _hints(rows)
    for value in rows.values():
        outcome = read_outcome(value)
        assert outcome is None or (outcome.choice in CHOICES and (outcome.prefill_s or 0) >= 0)
        try:
            endpoint = parse_endpoint(value)
        except ValueError:
            continue
        assert parse_endpoint(str(endpoint)) == endpoint
        assert parse_entry(str(endpoint)).covers(endpoint)


def _hints(headers: CIMultiDict[str]) -> None:
    fleet = Fleet()
    targets = Targets(fleet, lambda change: fleet.apply(change) and None, ["10.1.0.0/16:*", "pod-1.ns:8000"], most=4)
    pod = Pod("http://127.0.0.1:8200", 2, lambda: [8000, 8001])
    reader = HintReader(targets, CollectorRegistry(), random.Random(1), pod=pod, ranks=lambda engine: [0])
    request: Any = Mock(wraps=_Sender(headers), headers=headers, remote="10.0.0.9")
    try:
        hints = reader.read(request)
    except ApiError as exc:
        if exc.status not in (400, 403):
            raise
        return
    assert set(hints.prefill) <= set(fleet.workers)
    assert len(fleet.workers) <= 4
    assert hints.decode is not None
    assert hints.decode <= set(pod.names)
