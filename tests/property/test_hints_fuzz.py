"""Whatever control headers hold, they are hints or a 400 or 403, and the fleet stays bounded."""

import random
from unittest.mock import Mock

from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry

from gateway.proxy.aio_incoming import AioIncoming
from gateway.proxy.errors import ApiError
from gateway.sidecar.allow import parse_entry
from gateway.sidecar.endpoint import Endpoint, parse_endpoint
from gateway.sidecar.hints import KV_SOURCE, NO_HINTS, PLAN, PREFILLER, RANK, RANK_ENDPOINT, HintReader
from gateway.sidecar.pod import Pod
from gateway.sidecar.targets import Targets
from scorer.fleet import Fleet
from scorer.types import Role

PIECES = st.sampled_from(
    ["10.1.0.1", "10.9.0.1", "[fd00::1]", "::1", "pod-1.ns", ":", "8000", "0", "65536", ",", ";", " ", "v1", "id=a",
     "=", "choice=local", "choice=remote", "n=1", "http://", "@", "/", "%", "*", "-", "[", "]", "\x7f", "é"]
)  # fmt: skip
VALUE = st.lists(PIECES, max_size=6).map("".join) | st.text(st.characters(exclude_categories=("C",)), max_size=30)
HEADERS = st.lists(st.tuples(st.sampled_from([PREFILLER, RANK, RANK_ENDPOINT, KV_SOURCE, PLAN]), VALUE), max_size=6)


@given(HEADERS, st.integers(1, 3))
def test_any_headers_are_hints_or_refused(headers: list[tuple[str, str]], size: int) -> None:
    fleet = Fleet()
    targets = Targets(fleet, lambda change: fleet.apply(change) and None, ["10.1.0.0/16:*", "pod-1.ns:8000"], most=4)
    pod = Pod("http://127.0.0.1:8200", size, lambda: [8000 + rank for rank in range(size)])
    reader = HintReader(targets, CollectorRegistry(), random.Random(1), pod=pod, ranks=lambda engine: [0])
    transport = Mock(get_extra_info=lambda name, default=None: ("10.0.0.5", 8000))
    request = AioIncoming(
        make_mocked_request("POST", "/v1/completions", headers=CIMultiDict(headers), transport=transport)
    )
    status, hints = 200, NO_HINTS
    try:
        hints = reader.read(request)
    except ApiError as error:
        status = error.status
    assert status in (200, 400, 403)
    if status == 200:
        assert len(set(hints.prefill)) == len(hints.prefill)
        assert set(hints.prefill) <= set(fleet.workers)
        assert hints.decode is not None
        assert hints.decode <= set(pod.names)
    assert len(fleet.workers) <= 4
    assert hints.kv_source is None or hints.kv_source in fleet.workers
    assert all(worker.role in (Role.PREFILL, Role.SOURCE) for worker in fleet.workers.values())


@given(VALUE)
def test_what_is_read_as_an_endpoint_reads_back_and_is_covered_by_itself(text: str) -> None:
    try:
        endpoint = parse_endpoint(text)
    except ValueError:
        return
    assert isinstance(endpoint, Endpoint)
    assert parse_endpoint(str(endpoint)) == endpoint
    assert parse_entry(str(endpoint)).covers(endpoint)
    assert parse_entry("*").covers(endpoint)
