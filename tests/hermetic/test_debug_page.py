"""The page's faces on the admin port: its snapshot, its stream, the decisions it shows."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gateway.debug.stream import MOST_VIEWERS
from tests.support.gateway_world import Fleet, decode, engine, prefill, until

LONG = "the quick brown fox jumps over the lazy dog " * 400


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(), b=engine()) as started:
        yield started


class Viewer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def message(self) -> dict[str, Any]:
        """The next one. Raises EOFError when the stream has ended."""
        async with asyncio.timeout(60):
            while line := await self.response.content.readline():
                if line.startswith(b"data: "):
                    return dict(json.loads(line[6:]))
        raise EOFError

    async def all(self) -> None:
        while True:
            await self.message()


async def watch(fleet: Fleet) -> Viewer:
    response = await fleet.http.get(fleet.admin + "/debug/stream")
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    return Viewer(response)


async def streamed(fleet: Fleet, prompt: str, n: int) -> None:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": n,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with fleet.http.post(fleet.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        await response.read()


async def test_the_page_is_on_the_admin_port_alone(fleet: Fleet) -> None:
    async with fleet.http.get(fleet.admin + "/debug") as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert "<title>warmroute" in await response.text()
    async with fleet.http.get(fleet.admin + "/debug/", allow_redirects=True) as response:
        assert (response.status, response.url.path) == (200, "/debug")
    for path in ("/debug", "/debug/stream", "/debug/state", "/debug/decisions"):
        assert (await fleet.get(fleet.url + path))[0] == 404
        assert (await fleet.post(fleet.admin + path))[0] == 405


async def test_the_state_tells_the_fleet(fleet: Fleet) -> None:
    used, _ = await fleet.complete(LONG)
    await fleet.complete(LONG)
    await until(lambda: fleet.core.index.held_tokens().get((used, 0), {}).get("gpu"))
    fleet.gateway.faces.stream._advance()
    status, state = await fleet.get(fleet.admin + "/debug/state")
    assert status == 200
    workers = {row["name"]: row for row in state["workers"]}
    assert sorted(workers) == ["a", "b"]
    row = workers[used]
    assert (row["role"], row["state"], row["models"]) == ("both", "healthy", ["tiny"])
    assert row["ranks"][0]["events"] == "live"
    assert row["ranks"][0]["gpu_tokens"] > 3000
    assert row["predicted_tokens"] == row["actual_tokens"] > 3000
    assert state["head"]["decisions"] == 2
    assert [each["worker"] for each in state["decisions"]] == [used, used]
    assert state["prefixes"][0]["saved_tokens"] > 1000
    assert [each["what"] for each in state["warnings"]] == ["tokens_by_engine"]
    assert "fox" not in json.dumps(state)


async def test_viewers_see_what_happens(fleet: Fleet) -> None:
    first, second = await watch(fleet), await watch(fleet)
    assert (await first.message())["full"] is True
    assert (await second.message())["full"] is True
    await fleet.complete(LONG)
    for viewer in (first, second):
        found: list[Any] = []
        while not any(row.get("status") for row in found):
            message = await viewer.message()
            assert "full" not in message
            found += message.get("decisions", [])
        assert found[-1]["model"] == "tiny"
        viewer.response.close()
    await until(lambda: fleet.gateway.faces.stream.viewers == 0)
    await until(lambda: fleet.gateway.faces.stream._ticker is None)


async def test_streamed_answers_show_their_pace(fleet: Fleet) -> None:
    await asyncio.gather(*(streamed(fleet, f"{i} {LONG}", 40) for i in range(3)), streamed(fleet, "x", 5))
    (row,) = [row for row in (await decided(fleet)) if row["prompt_tokens"] < 100]
    assert row["ttft_ms"] >= 0
    assert row["output_tokens"] == 5

    def shown() -> Any:
        snapshot = fleet.gateway.faces.stream._advance().snapshot
        return any(snapshot.ttft_ms) and any(snapshot.itl_ms)

    await until(shown)


async def decided(fleet: Fleet, query: str = "") -> Any:
    status, page = await fleet.get(fleet.admin + "/debug/decisions" + query)
    assert status == 200, page
    return page["decisions"]


async def test_decisions_are_told_with_all_their_ways(fleet: Fleet) -> None:
    for i in range(5):
        await fleet.complete(f"{i} {LONG}")
    rows = await decided(fleet)
    assert [row["number"] for row in rows] == [5, 4, 3, 2, 1]
    assert {way["worker"] for way in rows[0]["considered"]} == {"a", "b"}
    for way in rows[0]["considered"]:
        assert sum(way["prices_ms"].values()) == pytest.approx(way["total_ms"], abs=0.5)
    assert [row["number"] for row in await decided(fleet, "?n=2")] == [5, 4]
    assert [row["number"] for row in await decided(fleet, "?number=3")] == [3]
    assert "fox" not in json.dumps(rows)
    for query, code in (
        ("?number=99", 404),
        ("?number=-1", 400),
        ("?n=x", 400),
        ("?n=%D9%A3", 400),
        ("?n=" + "9" * 99, 400),
    ):
        status, answer = await fleet.get(fleet.admin + "/debug/decisions" + query)
        assert (status, answer["error"]["type"]) == (code, "invalid_request_error")


async def test_hostile_request_ids_are_shown_as_text(fleet: Fleet) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"X-Request-Id: \xff\xfe<b>\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert b'"internal"' not in await reader.read()
    writer.close()
    (row,) = await decided(fleet)
    assert row["request_id"].endswith("<b>")
    viewer = await watch(fleet)
    assert (await viewer.message())["decisions"][0]["request_id"].endswith("<b>")
    viewer.response.close()


async def test_prompts_computed_elsewhere_are_told() -> None:
    async with Fleet(p=prefill(), d=decode()) as fleet:
        await fleet.complete(LONG)
        (row,) = await decided(fleet)
        assert row["worker"] == "d"
        assert row["choice"] in ("local", "remote")
        assert (row.get("prefill") == "p") == (row["choice"] == "remote")


async def test_viewers_are_bounded_and_told_so(fleet: Fleet) -> None:
    viewers = [await watch(fleet) for _ in range(MOST_VIEWERS)]
    status, answer = await fleet.get(fleet.admin + "/debug/stream")
    assert (status, answer["error"]["code"]) == (503, "too_many_viewers")
    viewers.pop().response.close()
    await until(lambda: fleet.gateway.faces.stream.viewers < MOST_VIEWERS)
    viewers.append(await watch(fleet))
    for viewer in viewers:
        viewer.response.close()


async def test_a_viewer_that_reads_nothing_holds_up_nobody(fleet: Fleet) -> None:
    """It misses ticks, and is told everything when it reads again."""
    slow, quick = await watch(fleet), await watch(fleet)
    slow.response.connection.transport.pause_reading()  # type: ignore[union-attr]
    stream = fleet.gateway.faces.stream
    await quick.message()
    big = {"x" * 100: ["y" * 1000] * 300}
    real = stream._take

    def heavy() -> Any:
        snapshot = real()
        snapshot.head["big"] = [big, snapshot.at_s, id(snapshot)]
        return snapshot

    stream._take = heavy
    for _ in range(30):
        stream._advance()
        await quick.message()
    stream._take = real
    last = stream._advance().snapshot
    assert stream.viewers == 2
    slow.response.connection.transport.resume_reading()  # type: ignore[union-attr]
    seen, sizes = {}, 0
    while seen.get("at_s", 0.0) < last.at_s or "big" in seen.get("head", {"big": 1}):
        seen = await slow.message()
        sizes += 1
    assert sizes < 25
    slow.response.close()
    quick.response.close()


async def test_a_tick_that_fails_ends_nothing(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    viewer = await watch(fleet)
    await viewer.message()
    stream = fleet.gateway.faces.stream
    real = stream._take
    failed = asyncio.Event()

    def fails() -> Any:
        failed.set()
        raise RuntimeError("secret prompt")

    stream._take = fails
    await asyncio.wait_for(failed.wait(), 60)
    stream._take = real
    assert "at_s" in await viewer.message()
    viewer.response.close()
    assert "misses a tick" in caplog.text
    assert "RuntimeError: secret prompt" not in caplog.text


async def test_streams_end_when_the_gateway_goes(fleet: Fleet) -> None:
    viewer = await watch(fleet)
    await viewer.message()
    loop = asyncio.get_running_loop()
    fleet.gateway.plane.draining = True
    message: dict[str, Any] = {}
    while not message.get("head", {}).get("draining"):
        message = await viewer.message()
    began_s = loop.time()
    fleet.gateway.faces.stream.end()
    with pytest.raises(EOFError):
        await viewer.all()
    assert loop.time() - began_s < 2
    status, answer = await fleet.get(fleet.admin + "/debug/stream")
    assert (status, answer["error"]["code"]) == (503, "draining")
