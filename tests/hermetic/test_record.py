"""Traffic recorded from a gateway: written, read again, and the same."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.sim.workloads.traces import Replay, read_mooncake
from gateway.errors import UserError
from gateway.record import reader as reader_module
from gateway.record.command import Recording
from gateway.record.reader import BLOCK_TOKENS
from tests.support.gateway_world import Fleet, engine, until


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(), b=engine()) as started:
        yield started


def url(fleet: Fleet) -> str:
    return fleet.admin + "/debug/record"


def active(fleet: Fleet) -> int:
    return len(fleet.core.recorder._readers)


async def begun(recording: Recording) -> asyncio.Task[None]:
    task = asyncio.create_task(recording.run())
    await asyncio.wait_for(recording.begun.wait(), 120)
    return task


def common(a: Any, b: Any) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


async def test_what_is_read_again_has_the_lengths_and_shares_what_was_shared(fleet: Fleet, tmp_path: Path) -> None:
    rng = random.Random(5)
    system = rng.choices(range(1000, 2000), k=300)
    prompts = [system + rng.choices(range(1000, 2000), k=rng.randint(1, 400)) for _ in range(6)]
    prompts += [prompts[0] + rng.choices(range(1000, 2000), k=200), rng.choices(range(1000, 2000), k=150)]
    lengths = [rng.randint(1, 9) for _ in prompts]
    path = tmp_path / "trace.jsonl"
    recording = Recording(url(fleet), path, len(prompts))
    task = await begun(recording)
    for prompt, n in zip(prompts, lengths, strict=True):
        await fleet.complete(prompt, max_tokens=n)
    await asyncio.wait_for(task, 120)
    rows = read_mooncake(path)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [
        (len(prompt), n) for prompt, n in zip(prompts, lengths, strict=True)
    ]
    assert rows[0].at_s >= 0
    assert {row.block_tokens for row in rows} == {BLOCK_TOKENS}
    replay = Replay(rows)
    asks = [replay._ask(i, row).tokens() for i, row in enumerate(rows)]
    for i, prompt in enumerate(prompts):
        for j in range(i):
            blocks = common(prompt, prompts[j]) // BLOCK_TOKENS
            ids, others = rows[i].hash_ids, rows[j].hash_ids
            assert ids is not None
            assert common(ids, others) == blocks
            assert common(asks[i], asks[j]) // (4 * BLOCK_TOKENS) == blocks
    await until(lambda: not active(fleet))


async def test_a_stream_without_usage_has_about_its_length(fleet: Fleet, tmp_path: Path) -> None:
    recording = Recording(url(fleet), tmp_path / "t", 2)
    task = await begun(recording)
    body = {"model": "tiny", "prompt": "some words", "max_tokens": 30, "stream": True}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        async with fleet.http.post(fleet.url + "/v1/completions", json={**body, **options}) as response:
            await response.read()
    await asyncio.wait_for(task, 120)
    rough, exact = read_mooncake(tmp_path / "t")
    assert exact.output_tokens == 30
    assert 30 <= rough.output_tokens <= 33


async def test_refusals_and_what_is_no_prompt_are_not_in_it(fleet: Fleet, tmp_path: Path) -> None:
    recording = Recording(url(fleet), tmp_path / "t", 1)
    task = await begun(recording)
    assert (await fleet.post(fleet.url + "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": -1}))[
        0
    ] == 400
    assert (await fleet.post(fleet.url + "/v1/completions", {"model": "zz", "prompt": "x"}))[0] == 404
    assert (await fleet.post(fleet.url + "/tokenize", {"model": "tiny", "prompt": "x"}))[0] == 200
    await fleet.complete("the only one", max_tokens=4)
    await asyncio.wait_for(task, 120)
    (row,) = read_mooncake(tmp_path / "t")
    assert row.output_tokens == 4


async def test_o8_nothing_that_was_said_is_in_the_file(fleet: Fleet, tmp_path: Path) -> None:
    """O8: no text, no token ids, no names, no hashes: small numbers only."""
    recording = Recording(url(fleet), tmp_path / "t", 3)
    task = await begun(recording)
    for _ in range(3):
        await fleet.complete("the quick brown zebra " * 100, user="giraffe")
    await asyncio.wait_for(task, 120)
    for line in (tmp_path / "t").read_text().splitlines():
        row = json.loads(line)
        assert set(row) == {"timestamp", "input_length", "output_length", "hash_ids", "block_size", "model"}
        assert max(row["hash_ids"]) < 3 * len(row["hash_ids"])
        assert row["model"] == 0


async def test_drain_ends_it_with_what_was_running(fleet: Fleet, tmp_path: Path) -> None:
    recording = Recording(url(fleet), tmp_path / "t")
    task = await begun(recording)
    for server in fleet.engines.values():
        server.faults.headers_delay_s = 0.2
    answer = asyncio.create_task(fleet.complete("one more", max_tokens=50))
    await until(lambda: fleet.gateway.plane.in_flight)
    assert await fleet.gateway.drain(10) == 0
    await asyncio.gather(answer, asyncio.wait_for(task, 120))
    assert (recording.rows, recording.note.end) == (1, "the gateway is going down")
    status, body = await fleet.get(url(fleet))
    assert (status, body["error"]["code"]) == (503, "no_recording")


async def test_closing_the_gateway_ends_it(tmp_path: Path) -> None:
    async with Fleet(a=engine()) as fleet:
        recording = Recording(url(fleet), tmp_path / "t")
        task = await begun(recording)
        await fleet.complete("one")
    await asyncio.wait_for(task, 120)
    assert (recording.rows, recording.note.end) == (1, "the gateway is going down")


async def test_a_reader_that_leaves_is_forgotten_and_a_third_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    tasks = [await begun(Recording(url(fleet), tmp_path / name)) for name in "ab"]
    assert active(fleet) == 2
    with pytest.raises(UserError, match="2 recordings are under way"):
        await Recording(url(fleet), tmp_path / "c").run()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not active(fleet))
    assert not fleet.core.recorder.active


async def stuck(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A reader that has not taken anything for so long that rows are lost."""
    monkeypatch.setattr(reader_module.Reader.__init__, "__defaults__", (1000,))
    host, port = fleet.admin.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 10)
    writer.write(b"GET /debug/record HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await until(lambda: active(fleet))
    recording = fleet.core.recorder._readers[0]
    while not recording._lost_rows:
        recording.add(1e12, "m", [], 1 << 22, 1)  # Longer than the buffers between.
        await asyncio.sleep(0)
    return reader, writer


async def test_a_slow_reader_loses_rows_and_slows_nobody(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await stuck(fleet, monkeypatch)
    await fleet.complete("still served")
    data = b""
    async with asyncio.timeout(120):
        while b'"lost_rows":' not in data[200:]:  # Of which the first stands at the beginning.
            piece = await reader.read(1 << 20)
            assert piece
            data = (data + piece)[-100_000:]
    writer.close()


async def test_a_reader_that_takes_nothing_does_not_keep_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(20):
        async with Fleet(a=engine()) as fleet:
            _, writer = await stuck(fleet, monkeypatch)
        assert not active(fleet)
    writer.close()


async def test_only_get_on_the_admin_port(fleet: Fleet, tmp_path: Path) -> None:
    for method in ("POST", "HEAD", "DELETE"):
        async with fleet.http.request(method, url(fleet)) as response:
            assert response.status == 405
    assert (await fleet.get(fleet.url + "/debug/record"))[0] == 404
    (tmp_path / "t").write_text("kept")
    for wrong in (fleet.url + "/debug/record", fleet.admin + "/health", fleet.admin + "/nope"):
        with pytest.raises(UserError, match="gives no recording"):
            await Recording(wrong, tmp_path / "t").run()
    assert (tmp_path / "t").read_text() == "kept"


async def test_a_gateway_that_is_suddenly_gone_is_told(fleet: Fleet, tmp_path: Path) -> None:
    recording = Recording(url(fleet), tmp_path / "t")
    task = await begun(recording)
    await fleet.complete("one")
    await until(lambda: recording.rows)
    for connection in list(fleet.gateway._admin._runner.server.connections):  # type: ignore[union-attr]
        connection.transport.abort()
    with pytest.raises(UserError, match="holds 1 requests"):
        await asyncio.wait_for(task, 120)
    assert len(read_mooncake(tmp_path / "t")) == 1


async def command(fleet: Fleet, path: Path, *more: str) -> asyncio.subprocess.Process:
    args = ["record", "--admin", fleet.admin, "--out", str(path), *more]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def test_the_command_ends_when_its_time_is_over(fleet: Fleet, tmp_path: Path) -> None:
    process = await command(fleet, tmp_path / "t", "--duration-s", "0.5")
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, err, out[:11]) == (0, b"", b"0 requests ")
    assert read_mooncake(tmp_path / "t") == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, None])
async def test_the_command_leaves_a_complete_file(fleet: Fleet, tmp_path: Path, how: int | None) -> None:
    path = tmp_path / "trace.jsonl"
    process = await command(fleet, path, *(["--requests", "2"] if how is None else []))
    await until(lambda: active(fleet))
    for _ in range(2):
        await fleet.complete("a prompt of some words " * 40)
    await until(lambda: path.exists() and len(path.read_bytes().splitlines()) == 2)
    if how is not None:
        process.send_signal(how)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, err) == (0, b"")
    assert out.startswith(b"2 requests in ")
    first, second = read_mooncake(path)
    assert first.input_tokens == second.input_tokens
    assert common(first.hash_ids, second.hash_ids) == first.input_tokens // BLOCK_TOKENS


async def test_nothing_is_noted_while_nobody_records(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(*_: object) -> None:
        raise AssertionError("noted")

    monkeypatch.setattr(fleet.core.recorder, "note", note)
    await fleet.complete("x")
    assert not fleet.core.recorder.active


async def test_a_recording_that_fails_does_not_fail_requests(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def note(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(fleet.core.recorder, "note", note)
    task = await begun(Recording(url(fleet), tmp_path / "t"))
    await fleet.complete("x")
    await until(lambda: "unexpected while recording" in caplog.text)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_client_that_leaves_is_recorded_with_what_it_got(fleet: Fleet, tmp_path: Path) -> None:
    recording = Recording(url(fleet), tmp_path / "t", 1)
    task = await begun(recording)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 8000, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(fleet.url + "/v1/completions", json=body) as response:
        await response.content.readline()
    await asyncio.wait_for(task, 120)
    (row,) = read_mooncake(tmp_path / "t")
    assert 1 <= row.output_tokens <= 8001


@pytest.mark.parametrize("line", [b"\x00\xff\n", b'"row"\n', b'{"lost_rows": "many"}\n', b"x" * (9 << 20)])
async def test_what_is_no_recording_is_told(line: bytes, tmp_path: Path) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(body=line, content_type="application/x-ndjson")

    app = web.Application()
    app.router.add_get("/debug/record", page)
    async with TestServer(app) as server:
        with pytest.raises(UserError, match=r"gives something else than a recording; .* holds 0 requests"):
            await asyncio.wait_for(Recording(str(server.make_url("/debug/record")), tmp_path / "t").run(), 120)
    assert (tmp_path / "t").read_bytes() == b""


async def test_a_gateway_that_answers_nothing_leaves_no_file(tmp_path: Path) -> None:
    writers: list[asyncio.StreamWriter] = []
    """Kept: Python 3.13 closes those that nobody has."""
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "record", "--admin", f"http://127.0.0.1:{port}"),
            *("--out", str(tmp_path / "t"), "--duration-s", "0.2"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 120)
        for writer in writers:
            writer.close()
    assert (process.returncode, out) == (2, b"")
    assert b"gave no answer" in err
    assert not (tmp_path / "t").exists()
