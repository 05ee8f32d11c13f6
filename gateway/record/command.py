"""`warmroute record`: a trace of a running gateway's requests into a file."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

from gateway.admin_client import ADDRESS, token_headers
from gateway.cli import Parser
from gateway.errors import UserError
from gateway.record.recorder import CONTENT_TYPE, PATH

_CONNECT_TIMEOUT_S = 10.0
_LONGEST_LINE_BYTES = 4 << 20


class _Line(msgspec.Struct):
    """A row or a note of `gateway.record.reader`; a note says what was lost."""

    lost_rows: int | None = None
    forgotten_blocks: int = 0
    end: str | None = None


_decode = msgspec.json.Decoder(_Line).decode


class Recording:
    """Reads the rows of the gateway at `url` into `out` until `most_rows` are there, or the gateway ends it."""

    def __init__(self, url: str, out: Path, most_rows: int | None = None) -> None:
        self._url = url
        self._out = out
        self._most_rows = most_rows
        self.rows = 0
        self.note = _Line()
        """The last one."""
        self.begun = asyncio.Event()

    async def run(self) -> None:
        """Only whole lines are written, each as it comes; however this is left, the file is complete. Raises UserError
        when there is nothing to read, the gateway is suddenly gone, or the file cannot be written any more.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, read_bufsize=_LONGEST_LINE_BYTES) as http,
                http.get(self._url, headers=token_headers(), allow_redirects=False) as response,
            ):
                await self._check(response)
                # Not before there is something to write does an older file go.
                with self._out.open("wb", buffering=0) as file:
                    self.begun.set()
                    await self._read(response.content, file)
        except (aiohttp.ClientError, TimeoutError) as exc:
            if not self.begun.is_set():
                raise UserError(f"no gateway answers at {self._url}: {str(exc) or 'timed out'}") from None
            raise UserError(f"the gateway broke off; {self._out} holds {self.rows} requests") from None

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200 and response.content_type == CONTENT_TYPE:
            return
        try:
            why = str(msgspec.json.decode(await response.read())["error"]["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            why = f"status {response.status}"
        raise UserError(f"{self._url} gives no recording: {why}; --admin is a gateway's admin address")

    async def _read(self, lines: aiohttp.StreamReader, file: FileIO) -> None:
        while self._most_rows is None or self.rows < self._most_rows:
            try:
                line = await lines.readline()
                if not line.endswith(b"\n"):
                    raise aiohttp.ClientPayloadError
                note = _decode(line)
            except (msgspec.DecodeError, LineTooLong):
                raise UserError(
                    f"{self._url} gives something else than a recording; {self._out} holds {self.rows} requests"
                ) from None
            if note.lost_rows is None:
                try:
                    append(file, line)
                except OSError as exc:
                    raise UserError(f"{self._out}: {exc.strerror or exc}; it holds {self.rows} requests") from None
                self.rows += 1
                continue
            self.note = note
            if note.end is not None:
                return


def append(file: FileIO, line: bytes) -> None:
    """All of it or nothing. Raises OSError."""
    done = 0
    try:
        while done < len(line):
            done += file.write(line[done:])
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(file.tell() - done)
        raise


def main(args: Sequence[str]) -> int:
    parser = Parser(
        prog="warmroute record",
        description="Write the requests that a running gateway serves as a trace: when they came, how long they and "
        "their answers were, which blocks of their prompts were the same. No text, no token ids. Ctrl-C ends it.",
    )
    parser.add_argument("--admin", default=ADDRESS, metavar="URL", help=f"the gateway's admin address ({ADDRESS})")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON lines; an older file is replaced")
    parser.add_argument("--duration-s", type=float, metavar="N", help="end after so long")
    parser.add_argument("--requests", type=int, metavar="N", help="end after so many")
    options = parser.parse(args)
    if not options.admin.startswith(("http://", "https://")):
        parser.error(f"{options.admin} is no http:// or https:// URL")
    for name, value in (("--duration-s", options.duration_s), ("--requests", options.requests)):
        if value is not None and not value > 0:
            parser.error(f"{name} must be above 0")
    recording = Recording(options.admin.rstrip("/") + PATH, options.out, options.requests)
    began_s = time.monotonic()
    asyncio.run(_until_told(recording, options.duration_s))
    if not recording.begun.is_set():
        raise UserError(f"the gateway at {options.admin} gave no answer, so {options.out} was not written")
    print(_summary(recording, options.out, time.monotonic() - began_s))
    return 0


async def _until_told(recording: Recording, duration_s: float | None) -> None:
    """Until it ends by itself, `duration_s` is over, or a signal says so."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(recording.run()), asyncio.create_task(stop.wait())]
    await asyncio.wait(tasks, timeout=duration_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _summary(recording: Recording, out: Path, took_s: float) -> str:
    note = recording.note
    lines = [f"{recording.rows} requests in {took_s:.0f} s in {out}" + (f" ({note.end})" if note.end else "")]
    if note.lost_rows:
        lines.append(f"{note.lost_rows} more are not in it: they came faster than they could be written")
    if note.forgotten_blocks:
        lines.append(
            f"{note.forgotten_blocks} blocks were forgotten meanwhile: prompts that came back to them seem to be new"
        )
    return "\n".join(lines)
