"""The access log."""

import asyncio
import io
import json
import threading
from typing import Literal

import pytest

from gateway.proxy import access
from gateway.proxy.access import AccessLog, Record, _pieces


def record(**fields: object) -> Record:
    return Record(**{"request_id": "r", "method": "POST", "path": "/v1/completions", "status": 200, **fields})  # type: ignore[arg-type]


async def lines(format_: Literal["text", "json"], *records: Record) -> list[str]:
    stream = io.StringIO()
    log = AccessLog(format_, stream)
    for each in records:
        log.write(each)
    await log.close()
    return stream.getvalue().splitlines()


async def test_text_lines_show_what_is_known() -> None:
    (line,) = await lines("text", record(worker="a", rank=0, duration_ms=1.5))
    time, rest = line.split(" ", 1)
    assert time.endswith("+00:00")
    assert rest == ("POST /v1/completions 200 request_id=r worker=a rank=0 duration_ms=1.5 sent_bytes=0 retries=0")


@pytest.mark.parametrize("format_", ["text", "json"])
async def test_no_client_can_write_a_second_line(format_: Literal["text", "json"]) -> None:
    nasty = 'x\n2026 GET /fake 200\r\n\x1b[31m"é\ud800 '
    (line,) = await lines(format_, record(request_id=nasty, model=nasty, path="/" + nasty))
    assert "\x1b" not in line
    if format_ == "json":
        assert json.loads(line)["status"] == 200


async def test_nothing_is_written_when_it_is_off() -> None:
    stream = io.StringIO()
    log = AccessLog("text", stream, enabled=False)
    log.write(record())
    await log.close()
    assert stream.getvalue() == ""


async def test_a_blocked_stream_holds_up_nobody_and_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_MOST_LINES", 10)
    free = threading.Event()
    blocked = threading.Event()

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            blocked.set()
            free.wait(10)
            return super().write(text)

    stream = Pipe()
    log = AccessLog("text", stream)
    log.write(record())
    async with asyncio.timeout(10):
        while not blocked.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.005)
    for _ in range(25):
        log.write(record())
    assert log.dropped == 15
    free.set()
    await log.close()
    assert len(stream.getvalue().splitlines()) == 11


async def test_a_closed_stream_loses_lines_and_nothing_else() -> None:
    stream = io.StringIO()
    stream.close()
    log = AccessLog("text", stream)
    log.write(record())
    await log.close()
    assert log.dropped == 1


async def test_no_client_writes_a_second_line_or_controls_a_terminal() -> None:
    stream = io.StringIO()
    log = AccessLog("text", stream)
    log.write(record(request_id="a\x85b\u2028c\x9b31md\u202e"))
    await log.close()
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert "\\u0085" in line


def test_many_lines_are_written_in_pieces_that_a_pipe_takes_whole() -> None:
    lines = [f"{i} {'x' * (i % 700)}\n" for i in range(100)]
    lines[50] = "\u00e9" * 3000 + "\n"  # Too long by itself, in bytes.
    pieces = list(_pieces(lines))
    assert "".join(pieces) == "".join(lines)
    assert all(piece.endswith("\n") for piece in pieces)
    assert [piece for piece in pieces if len(piece.encode()) > 4096] == [lines[50]]
    assert len(pieces) < 20
