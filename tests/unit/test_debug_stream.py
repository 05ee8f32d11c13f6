"""What is told to viewers: whole snapshots or what has changed; and the page, which may do nothing but its own."""

import asyncio
import base64
import hashlib
import json
import re
from typing import Any

import msgspec
import pytest

from gateway.debug import page
from gateway.debug.decisions import COMPONENTS, Row
from gateway.debug.health import DEGRADATIONS
from gateway.debug.remedies import REMEDIES
from gateway.debug.state import Snapshot, WorkerRow
from gateway.debug.stream import Frame, Stream, changes, encoded


def worker(name: str, streams: int = 0) -> WorkerRow:
    return WorkerRow(name=name, role="both", state="healthy", prefills=0, streams=streams, kv_tokens=0)


def row(number: int, **fields: Any) -> Row:
    return Row(
        **{
            "number": number, "at_s": 1.0, "request_id": "r", "model": "m", "prompt_tokens": 1, "tokens": "local",
            "worker": "a", "rank": 0, "choice": "local", "reason": "cost", "total_ms": 1.0, "prices_ms": {},
            "predicted_ttft_ms": 1.0, "predicted_cached_tokens": 0, **fields,
        }
    )  # fmt: skip


def snapshot(workers: tuple[WorkerRow, ...] = (), decisions: tuple[Row, ...] = (), at_s: float = 1.0) -> Snapshot:
    return Snapshot(
        at_s=at_s, head={"face": "gateway"}, workers=list(workers), hits={"answers": 0}, ttft_ms=[], itl_ms=[],
        prefixes=[], warnings=[], more_warnings=0, decisions=list(decisions),
    )  # fmt: skip


def told(data: bytes) -> Any:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    return json.loads(data[6:])


def test_only_what_changed_is_told() -> None:
    before = snapshot((worker("a"), worker("b"), worker("c")), (row(2), row(1)))
    now = snapshot((worker("a"), worker("b", 3), worker("d")), (row(3), row(2, status=200), row(1)), at_s=2.0)
    found = json.loads(encoded(changes(before, now)))
    assert set(found) == {"at_s", "workers", "gone", "decisions"}
    assert [each["name"] for each in found["workers"]] == ["b", "d"]
    assert found["gone"] == ["c"]
    assert [each["number"] for each in found["decisions"]] == [3, 2]
    assert changes(now, now) == {"at_s": 2.0}


def test_a_client_that_adds_changes_up_knows_everything() -> None:
    steps = [
        snapshot((worker("a"),), (row(1),)),
        snapshot((worker("a", 2), worker("b")), (row(2), row(1, status=200))),
        snapshot((worker("b"),), (row(3), row(2))),
        snapshot((), (row(3, status=503),)),
    ]
    workers: dict[str, Any] = {}
    decisions: dict[int, Any] = {}
    before: Snapshot | None = None
    for number, now in enumerate(steps):
        message = told(Frame(number, now, before).update())
        if message.get("full"):
            workers, decisions = {}, {}
        workers |= {each["name"]: each for each in message.get("workers", [])}
        for name in message.get("gone", []):
            del workers[name]
        decisions |= {each["number"]: each for each in message.get("decisions", [])}
        assert sorted(workers) == [each.name for each in now.workers]
        assert [workers[each.name]["streams"] for each in now.workers] == [each.streams for each in now.workers]
        for each in now.decisions:
            assert decisions[each.number].get("status") == each.status
        before = now


def test_surrogates_do_no_harm() -> None:
    assert json.loads(encoded({"a": ["\ud800x", {"\udfff": 1}]})) == {"a": ["?x", {"?": 1}]}
    assert json.loads(encoded(row(1, request_id="\udc80")))["request_id"] == "?"


async def test_a_snapshot_is_made_once_for_everybody_who_asks_within_a_tick() -> None:
    taken = 0

    def take() -> Snapshot:
        nonlocal taken
        taken += 1
        return snapshot(at_s=float(taken))

    stream = Stream(take, tick_s=0.2)
    assert {stream.snapshot().at_s for _ in range(50)} == {1.0}
    async with asyncio.timeout(5):
        while stream.snapshot().at_s == 1.0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert taken == 2


def test_every_degradation_has_a_remedy() -> None:
    assert set(REMEDIES) == {*DEGRADATIONS, "hits_missed"}


def test_the_page_knows_every_part_of_a_price() -> None:
    document = page._document().decode()
    named = re.search(r"const PARTS = \[(.*?)\n\];", document, re.DOTALL)
    assert named is not None
    assert re.findall(r'\["(\w+)"', named.group(1)) == list(COMPONENTS)
    for name in COMPONENTS:
        assert f".c-{name} " in document
        assert document.count(f"--{name}: #") == 2  # light and dark


def test_the_page_loads_nothing_and_makes_no_markup_of_text() -> None:
    document = page._document().decode()
    assert re.findall(r"https?://(?!host:8000|www\.w3\.org/2000/svg)[^\s\"'<]+", document) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", document) == []
    assert re.findall(r"<script[^>]+>|<link rel=\"stylesheet|@import| style=\"| on\w+=\"", document) == []
    assert len(document) < 48_000


def test_the_policy_allows_this_script_and_style_alone() -> None:
    headers, document = page._headers(), page._document()
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    for directive, tag in (("script-src", b"script"), ("style-src", b"style")):
        (inline,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), document, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"


@pytest.mark.parametrize("n", [64])
def test_a_snapshot_of_many_workers_is_small(n: int) -> None:
    every = snapshot(tuple(worker(f"worker-{i}.pods.cluster.local", i) for i in range(n)), tuple(map(row, range(40))))
    assert len(Frame(1, every, None).full()) < 40_000
    assert len(msgspec.json.encode(every)) < 40_000
