"""`warmroute top` and its ends, in a terminal and without one."""

import asyncio
import errno
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from gateway.debug import top
from gateway.errors import UserError
from gateway.proxy.errors import ApiError
from tests.support.gateway_world import Fleet, engine
from tests.support.sidecar_world import free_port


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(), b=engine()) as started:
        yield started


def refusing(request: web.BaseRequest) -> web.Response:
    raise ApiError(503, "not now", code="not_now")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"no http\r\n\r\n"])
async def test_a_gateway_that_goes_while_it_answers_is_no_crash(answer: bytes) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(broken, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UserError, match="no gateway answers at"):
            await asyncio.to_thread(top.main, ["--admin", f"http://127.0.0.1:{port}", "--once"])


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(24, 100)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.seen = b""
        self._args = args

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *self._args, stdin=self.slave, stdout=self.slave, stderr=self.slave,
            start_new_session=True,
            # A shell's background jobs ignore it, and so would what they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        os.set_blocking(self._master, False)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> bytes:
        try:
            while data := os.read(self._master, 65536):
                self.seen += data
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EIO):
                raise
        return self.seen

    async def until(self, condition: Callable[[bytes], object]) -> None:
        async with asyncio.timeout(15):
            while not condition(self.read()):  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.02)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    async def ended(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 60)
        self.read()
        os.close(self._master)
        os.close(self.slave)
        return code


async def test_once_and_as_json(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    await fleet.complete("hello")
    for arguments in ([], ["--once"]):
        assert await asyncio.to_thread(top.main, ["--admin", fleet.admin, *arguments]) == 0
        text = capsys.readouterr().out
        assert "warmroute gateway  live" in text
        assert "\x1b" not in text
        assert {line.split()[0] for line in text.splitlines() if " both " in line} == {"a", "b"}
    assert await asyncio.to_thread(top.main, ["--admin", fleet.admin, "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["workers"]] == ["a", "b"]


async def test_what_cannot_be_asked(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no gateway answers at"):
        await asyncio.to_thread(top.main, ["--admin", f"http://127.0.0.1:{free_port()}", "--once"])
    with pytest.raises(UserError, match="--admin takes the gateway's admin address"):
        await asyncio.to_thread(top.main, ["--admin", fleet.url, "--once"])
    fleet.gateway.admin.pages["/debug/state"] = refusing
    assert await asyncio.to_thread(top.main, ["--admin", fleet.admin, "--once"]) == 1
    assert "not now" in capsys.readouterr().err
    for wrong in (["--interval-s", "0"], ["--intervall-s", "1"]):
        with pytest.raises(UserError):
            top.main(wrong)


async def test_a_terminal_is_kept_up_to_date_and_given_back(fleet: Fleet) -> None:
    terminal = Terminal("top", "--admin", fleet.admin, "--interval-s", "0.2")
    await terminal.start()
    await terminal.until(lambda seen: b"No request was decided yet" in seen)
    await fleet.complete("hello")
    await terminal.until(lambda seen: b"local: shorter_than_block" in seen)
    terminal.seen = b""
    terminal.resize(3, 20)
    await terminal.until(lambda seen: b"\x1b[J" in seen and b"WORKER" not in seen.rpartition(b"\x1b[H")[2])
    terminal.type(b"q")
    assert await terminal.ended() == 0
    assert terminal.seen.endswith(b"\x1b[?25h\x1b[?1049l")


async def test_ctrl_c_ends_it_and_the_terminal_is_as_it_was(fleet: Fleet) -> None:
    terminal = Terminal("top", "--admin", fleet.admin)
    await terminal.start()
    await terminal.until(lambda seen: b"warmroute gateway" in seen)
    assert termios.tcgetattr(terminal.slave) != terminal.before
    os.killpg(terminal.process.pid, signal.SIGINT)
    await asyncio.wait_for(terminal.process.wait(), 60)
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert await terminal.ended() == 130
    assert b"Traceback" not in terminal.seen


async def test_a_gateway_that_goes_is_waited_for(fleet: Fleet) -> None:
    terminal = Terminal("top", "--admin", fleet.admin, "--interval-s", "0.2")
    await terminal.start()
    await terminal.until(lambda seen: b"warmroute gateway" in seen)
    await fleet.gateway.close()
    await terminal.until(lambda seen: b"trying again: no gateway answers" in seen)
    terminal.type(b"q")
    assert await terminal.ended() == 0
