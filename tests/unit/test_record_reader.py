"""A recording under way: bounded, honest about what it lost, ended once."""

from __future__ import annotations

import asyncio
import errno
import json
from io import FileIO
from typing import Any

import pytest

from gateway.cli import main
from gateway.record import reader as reader_module
from gateway.record.command import append
from gateway.record.reader import BLOCK_TOKENS, MOST_TOKENS, Reader

HELLO = {"lost_rows": 0, "forgotten_blocks": 0}


async def taken(reader: Reader) -> list[dict[str, Any]]:
    async with asyncio.timeout(5):
        return [json.loads(line) for line in (await reader.take()).splitlines()]


async def test_it_says_that_it_has_begun_and_gives_rows_as_they_come() -> None:
    reader = Reader(10.0)
    assert await taken(reader) == [HELLO]
    waiting = asyncio.create_task(taken(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.add(10.25, "m", [7, 8], 2 * BLOCK_TOKENS + 1, 3)
    assert await waiting == [
        {
            "timestamp": 250,
            "input_length": 2 * BLOCK_TOKENS + 1,
            "output_length": 3,
            "hash_ids": [0, 1, 2],
            "block_size": BLOCK_TOKENS,
            "model": 0,
        }
    ]


async def test_requests_from_before_it_are_left_out() -> None:
    reader = Reader(10.0)
    reader.add(9.9, "m", None, 5, 3)
    assert await taken(reader) == [HELLO]


async def test_tokens_nobody_knew_have_no_ids() -> None:
    reader = Reader(0.0)
    reader.add(1.0, "m", None, 500, 3)
    reader.add(1.0, "n", [1] * 3, 10 * BLOCK_TOKENS, 3)  # of which only three blocks are known
    reader.add(1.0, "m", [5, 6, 7], BLOCK_TOKENS - 1, 3)  # of which the engine saw less than one
    unknown, partly, none_whole, _ = await taken(reader)
    assert (unknown["hash_ids"], unknown["input_length"]) == (None, 500)
    assert partly["hash_ids"] == [0, 0, 0, *range(1, 8)]
    assert none_whole["hash_ids"] == [8]
    assert [row["model"] for row in (unknown, partly, none_whole)] == [0, 1, 0]


async def test_absurd_lengths_are_bounded() -> None:
    reader = Reader(0.0)
    reader.add(1.0, "m", [], 1 << 60, 3)
    reader.add(1.0, "m", [], 0, 3)
    most, least, _ = await taken(reader)
    assert (most["input_length"], len(most["hash_ids"])) == (MOST_TOKENS, MOST_TOKENS // BLOCK_TOKENS)
    assert (least["input_length"], len(least["hash_ids"])) == (1, 1)


async def test_a_reader_that_takes_nothing_loses_rows_and_is_told() -> None:
    reader = Reader(0.0, most_bytes=200)
    assert await taken(reader) == [HELLO]
    for _ in range(50):
        reader.add(1.0, "m", None, 5, 3)
    *rows, note = await taken(reader)
    assert note == {"lost_rows": 50 - len(rows), "forgotten_blocks": 0}
    assert 0 < len(rows) < 5
    reader.add(1.0, "m", None, 5, 3)
    assert len(await taken(reader)) == 1  # nothing new was lost


async def test_blocks_that_had_to_be_forgotten_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MOST_BLOCKS", 4)
    reader = Reader(0.0)
    reader.add(1.0, "m", list(range(6)), 6 * BLOCK_TOKENS, 3)
    _, note = await taken(reader)
    assert note == {"lost_rows": 0, "forgotten_blocks": 2}


async def test_the_end_comes_after_all_rows_and_nothing_after_it() -> None:
    reader = Reader(0.0)
    reader.add(1.0, "m", None, 5, 3)
    reader.end("over")
    reader.end("over again")
    reader.add(1.0, "m", None, 6, 3)
    row, note = await taken(reader)
    assert (row["input_length"], note) == (5, {**HELLO, "end": "over"})
    assert await taken(reader) == []


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--out", "x", "--admin", "ftp://x"], "no http"),
        (["--out", "x", "--requests", "0"], "--requests must be above 0"),
        (["--out", "x", "--duration-s", "-1"], "--duration-s must be above 0"),
        (["--admin", "http://127.0.0.1:9"], "--out"),
        (["--out", "x", "--admin", "http://127.0.0.1:9"], "no gateway answers at http://127.0.0.1:9/debug/record"),
    ],
)
def test_wrong_calls_are_explained(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    args = [str(tmp_path / arg) if arg == "x" else arg for arg in args]
    assert main(["record", *args]) == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class _Full(FileIO):
    """A disk that takes `room` more bytes."""

    room = 10

    def write(self, data: Any) -> int:
        taken = bytes(data)[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(taken)
        return super().write(taken)


def test_a_full_disk_holds_whole_lines(tmp_path: Any) -> None:
    with _Full(str(tmp_path / "t"), "wb") as file:
        append(file, b"1234567\n")
        with pytest.raises(OSError, match="No space"):
            append(file, b"abcdefg\n")
    assert (tmp_path / "t").read_bytes() == b"1234567\n"
